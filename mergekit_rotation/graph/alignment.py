"""What a merge tells of its alignment: ``alignment.json``, and a section of the model card.

Only what the merge has computed anyway is reported: distances and orders of the blocks that were
solved. Rotation angles, cosines, the verdict and the tensors besides the blocks are left to
``mergekit-rotation compare``, whose JSON has the same layout.
"""

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mergekit.config import MergeConfiguration
from mergekit.graph import Task

from mergekit_rotation.graph import parameters, run
from mergekit_rotation.graph.report import SCHEMA, Part, Report, Sums
from mergekit_rotation.graph.run import Record, Run

FILE = "alignment.json"
_VERSIONS = ("mergekit", "mergekit-rotation", "torch")


class WriteAlignment(Task[None]):
    """Write ``alignment.json`` once all weights are written; the configuration comes later."""

    out_path: str
    finalize: Task

    def arguments(self) -> dict[str, Task]:
        return {"finalize": self.finalize}

    def main_thread_only(self) -> bool:
        return True

    def execute(self, finalize: None) -> None:
        text = json.dumps(data(run.current()), indent=2) + "\n"
        Path(self.out_path, FILE).write_text(text, encoding="utf-8")


def is_asked_for(config: MergeConfiguration) -> bool:
    """Tell whether a merge is reported: mergekit runs it, and ``align_report`` is not off."""
    return run.current().config is config and parameters.report(config.parameters)


def data(this: Run) -> dict[str, Any]:
    """Return the content of ``alignment.json``: the same for the same merge.

    The layout is that of ``mergekit-rotation compare --json``. In place of a ``matrix`` there are

    - ``versions``: of mergekit, mergekit-rotation and torch;
    - ``settings``: the method, and the ``align_*`` parameters at the top level;

    and null or empty is what only compare measures: ``verdict``, ``evidence``, cosines,
    ``outside``, rotation angles. Each pair's ``left_out`` names the layers and blocks that were
    not aligned, with the reason. One pair lies at the top level; any other number in ``pairs``.
    """
    found = reports(this)
    given = this.config.model_dump(mode="json", include={"parameters"})["parameters"] or {}
    head = {
        "schema": SCHEMA,
        "version": version("mergekit-rotation"),
        "versions": {name: version(name) for name in _VERSIONS},
        "settings": {
            "merge_method": this.config.merge_method,
            **{name: given[name] for name in sorted(given) if name in parameters.KNOWN},
        },
    }
    if len(found) == 1:
        return head | found[0].data()
    return {
        **head,
        "models": _models(this),
        "pairs": [report.data() for report in found],
    }


def reports(this: Run) -> list[Report]:
    """Return one report per model and reference, in the order of the configuration."""
    place = {model: k for k, model in enumerate(_models(this))}
    pairs = {(record.model, record.reference) for record in this.records}
    pairs |= {(entry.model, entry.reference) for entry in this.unsolved}
    pairs |= {(model, "") for model in this.notes if model not in {m for m, _ in pairs}}
    chosen = sorted(pairs, key=lambda pair: (place.get(pair[0], len(place)), *pair))
    return [_report(this, model, reference) for model, reference in chosen]


def _models(this: Run) -> list[str]:
    return [str(model) for model in this.config.referenced_models()]


def _report(this: Run, model: str, reference: str) -> Report:
    return Report(
        reference,
        model,
        [_part(record) for record in _records(this, model, reference)],
        stream=this.streams.get(model),
        notes=this.notes.get(model, []),
        left_out=[
            f"{entry.place}: {entry.reason}"
            for entry in this.unsolved
            if (entry.model, entry.reference) == (model, reference)
        ]
        + [f"{place}: {reason}" for place, reason in sorted(this.left.get(model, []))],
        compared=False,
    )


def _records(this: Run, model: str, reference: str) -> list[Record]:
    """Return what was recorded of a pair, in an order that does not depend on threads."""
    mine = [r for r in this.records if (r.model, r.reference) == (model, reference)]
    return sorted(mine, key=lambda r: (r.layers, r.layer, r.block))


def _part(record: Record) -> Part:
    sums = Sums(reference=record.scale, apart_before=record.before, apart_after=record.after)
    return Part(
        record.layer,
        record.layers,
        record.block,
        sums,
        record.moved,
        record.orders,
        record.condition,
    )


# -- the model card -------------------------------------------------------------------------------

_INTRODUCTION = """
### Alignment

Before the merge, mergekit-rotation moved each model to the coordinates of its reference, by
transformations that leave its function unchanged. Distances are relative, |reference - model| /
|reference|, over the heads and neurons that were aligned; `alignment.json` has them by layer.
"""


def card(this: Run) -> str:
    """Return the section of the model card, in Markdown."""
    found = reports(this)
    lines = [_INTRODUCTION]
    if any(report.parts for report in found):
        lines.append("| model | reference | distance before | after | what was aligned |")
        lines.append("|---|---|---|---|---|")
        lines += [_row(this, report) for report in found if report.parts]
        lines.append("")
    lines += _remarks(found) or ([] if found else ["No two models meet in a layer."])
    settings = data(this)["settings"]
    versions = ", ".join(f"{name} {version(name)}" for name in _VERSIONS)
    shown = ", ".join(f"`{name}: {json.dumps(value)}`" for name, value in settings.items())
    return "\n".join([*lines, "", f"Settings: {shown}.", "", f"Versions: {versions}.", ""])


def _row(this: Run, report: Report) -> str:
    records = _records(this, report.model, report.reference)
    total = report.total().summary()
    numbers = [
        "-" if x is None else f"{x:.4g}"
        for x in (total["distance_before"], total["distance_after"])
    ]
    words = f"{run.layers_of(records)}: {run.moves_of(records)}"
    cells = (report.model, report.reference, *numbers, words)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _remarks(found: Sequence[Report]) -> list[str]:
    """Return the notes of each model, and how much of it was not aligned and why."""
    lines = []
    for report in found:
        lines += [f"* {report.model}: {note}" for note in report.notes]
        reasons: dict[str, list[str]] = {}
        for entry in report.left_out:
            place, reason = entry.split(": ", 1)
            reasons.setdefault(reason, []).append(place)
        for reason, places in reasons.items():
            more = f" and {len(places) - 2} more" if len(places) > 2 else ""
            lines.append(f"* {report.model}: not aligned: {', '.join(places[:2])}{more} ({reason})")
    return lines
