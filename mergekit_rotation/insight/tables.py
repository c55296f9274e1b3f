"""Tables for people on a terminal."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mergekit_rotation.graph.report import Report
from mergekit_rotation.insight.align import Aligned, as_options
from mergekit_rotation.insight.compared import Comparison
from mergekit_rotation.insight.lines import Barrier
from mergekit_rotation.insight.verify import Verified

_MEANING = {
    "same-coordinates": "merge them as they are",
    "same-function": "(nearly) the same function in other coordinates; use rotation_* methods",
    "related": "parts are shared, or an ancestor far back; align, and check the result",
    "unrelated": "nothing but align_residual has a chance, and training after it",
}
_LEGEND = (
    "before → after alignment; heads (in a group, too), neurons: share that stays in place; "
    "q/k, v/o: median angle of their rotations"
)
_ORDER = {"kv": "heads", "g": "group", "f": "neurons", "x": "experts"}
_ANGLE = {"qk": "q/k", "vo": "v/o"}


def show_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Print a comparison: of two models in full, of more as a matrix with one line per pair."""
    console = console or Console()
    if len(comparison.reports) == 1:
        show_report(comparison.reports[0], console)
        return
    names = short_names(comparison.models)
    for title, key in (("before", "distance_before"), ("after", "distance_after")):
        table = Table(title=f"relative distance {title} alignment")
        table.add_column("")
        for name in names:
            table.add_column(name, justify="right")
        for name, row in zip(names, comparison.matrix(key), strict=True):
            table.add_row(name, *(number(value) for value in row))
        console.print(table)
    short = dict(zip(comparison.models, names, strict=True))
    for report in comparison.reports:
        title = f"{short[report.reference]} - {short[report.model]}"
        console.print(f"{title}: [bold]{report.verdict}[/bold]{_because(report)}", highlight=False)


def show_report(report: Report, console: Console) -> None:
    """Print a pair: one row per layer, and the verdict with what it rests on."""
    data = report.data()
    assert report.verdict is not None  # as of all that compare has measured
    if not report.apart:
        title = f"{data['model']} aligned to {data['reference']}"
        console.print(title, highlight=False, markup=False)
        console.print(_layers(data))
        console.print(_LEGEND, highlight=False, markup=False)
    for note in data["notes"]:
        console.print(f"note: {note}", highlight=False, markup=False)
    if data["left_out"]:
        left = data["left_out"]
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        console.print(f"not compared: {'; '.join(left[:3])}{more}", highlight=False, markup=False)
    console.print(
        f"\nverdict: [bold]{report.verdict}[/bold]: {_MEANING[report.verdict]}{_because(report)}",
        highlight=False,
    )


def show_verified(verified: Verified, console: Console | None = None) -> None:
    """Print whether two models are the same function, and how far they are apart where."""
    console = console or Console()
    first, second = verified.models
    table = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0))
    for name in ("", "relative", "by rounding", "largest"):
        table.add_column(name, justify="right" if name else "left")
    for entry in (*verified.hidden, *verified.outputs):
        numbers = (entry.relative, entry.bound, entry.largest)
        style = None if entry.agrees else "bold"
        table.add_row(entry.name, *(f"{number:.2g}" for number in numbers), style=style)
    if verified.outputs:
        stored, computed = (
            str(x).removeprefix("torch.") for x in (verified.stored, verified.dtype)
        )
        title = f"differences on {verified.inputs}, in {computed}, weights stored in {stored}"
        console.print(title, highlight=False, markup=False)
        console.print(table)
    said = [f"{second} is {'' if verified.same else 'not '}the same function as {first}"]
    if verified.reason:
        said.append(f": {verified.reason}")
    elif not verified.same:
        said.append(f": they differ from {verified.apart} on")
    elif verified.stream == "other":
        said.append(f"; its residual stream is in other coordinates, from {verified.apart} on")
    console.print("".join(said), highlight=False, markup=False)
    if verified.unseen:
        unseen = ", ".join(verified.unseen)
        console.print(f"note: not run, so not verified: {unseen}", highlight=False, markup=False)


def show_barrier(barrier: Barrier, console: Console | None = None) -> None:
    """Print the losses along both lines, what stands between the models, and what is left of it."""
    console = console or Console()
    reference, other = barrier.models
    title = f"nats per token from {reference} (t = 0) to {other} (t = 1), {barrier.tokens} tokens"
    console.print(title, highlight=False, markup=False)
    table = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0))
    for name in ("t", "plain", "aligned"):
        table.add_column(name, justify="right")
    lines = (barrier.plain, barrier.aligned)
    for t, *losses in zip(barrier.plain.points, *(line.loss for line in lines), strict=True):
        table.add_row(f"{t:.3g}", *(f"{loss:.4f}" for loss in losses))
    table.add_section()
    table.add_row("barrier", *(f"{line.barrier:.4f}" for line in lines))
    console.print(table)
    if barrier.removed is None:
        said = "no barrier stands between the two as they are"
    else:
        said = f"alignment removes {barrier.removed:.0%} of the barrier"
    console.print(said, highlight=False, markup=False)
    for note in barrier.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    if not barrier.same_ends:
        console.print(
            f"warning: alignment changes the losses at the ends by {barrier.apart:.2g} (root mean "
            f"square over tokens), and rounding explains {barrier.bound:.2g}: the aligned model is "
            "not quite the same function",
            highlight=False,
            markup=False,
        )


def show_aligned(aligned: Aligned, console: Console | None = None) -> None:
    """Print how far a model was from its reference and is now, and whether it is verified."""
    console = console or Console()
    for report in aligned.reports:
        total = report.total().summary()
        before, after = (number(total[f"distance_{when}"]) for when in ("before", "after"))
        title = f"{report.model} in the coordinates of {report.reference}"
        said = f"{title}: relative distance of what was aligned {before} → {after}"
        console.print(said, highlight=False, markup=False)
        for note in report.notes:
            console.print(f"note: {as_options(note)}", highlight=False, markup=False)
    if aligned.verified is not None:
        show_verified(aligned.verified, console)


def _because(report: Report) -> str:
    evidence = report.evidence()
    if evidence is None:
        return f"\n  {report.apart}"
    limits = evidence.data()["thresholds"]
    said = []
    if evidence.in_place is not None:
        said.append(f"neurons in place {evidence.in_place:.0%} (from {limits['in_place']:.0%})")
    if evidence.stream_moved:
        said.append("residual stream moved")
    else:
        said.append(f"explained by alignment {evidence.gain:.0%} (up to {limits['gain']:.0%})")
    kinship = f"same from {limits['same']:.2f}, related from {limits['related']:.2f}"
    return f"\n  {', '.join(said)}, kinship {evidence.kinship:.3f} ({kinship})"


def _layers(data: Mapping[str, Any]) -> Table:
    """Return one row per layer: distances, cosines, what stays in place, and angles."""
    motions = [m for e in data["layers"] for b in e["blocks"] for m in b["motions"]]
    orders = [axis for axis in _ORDER if _of(motions, "order", axis)]
    angles = [axis for axis in _ANGLE if _of(motions, "rotation", axis)]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("layer", overflow="fold", min_width=12)
    for name in ("distance", "cosine", *(_ORDER[a] for a in orders)):
        table.add_column(name, justify="right", no_wrap=True)
    for axis in angles:
        table.add_column(_ANGLE[axis], justify="right", no_wrap=True)
    for entry in data["layers"]:
        mine = [motion for block in entry["blocks"] for motion in block["motions"]]
        places = [_mean(_of(mine, "order", axis), lambda m: f"{m:.0%}") for axis in orders]
        turns = [_mean(_of(mine, "rotation", axis), lambda m: f"{m:.0f}°") for axis in angles]
        table.add_row(_layer_name(entry), *_numbers(entry), *places, *turns)
    table.add_section()
    for entry in data["outside"]:
        name = entry["tensor"].removesuffix(".weight").rsplit(".", 1)[-1]
        table.add_row(name, *_numbers(entry))
    table.add_section()
    table.add_row("all", *_numbers(data))
    return table


def _of(motions: Sequence[Mapping[str, Any]], kind: str, axis: str) -> list[tuple[float, int]]:
    """Return share in place or median angle, and size, of one kind of motion along an axis."""
    return [
        (m["fixed"] if kind == "order" else m["angles"][2], m["size"])
        for m in motions
        if m["kind"] == kind and m["axis"] == axis
    ]


def _mean(values: Sequence[tuple[float, int]], shown: Callable[[float], str]) -> str:
    if not values:
        return ""
    return shown(sum(x * size for x, size in values) / sum(size for _, size in values))


def _layer_name(entry: Mapping[str, Any]) -> str:
    a, b = entry["reference_layer"], entry["model_layer"]
    return str(a) if a == b else f"{a} - {b}"


def _numbers(entry: Mapping[str, Any]) -> list[str]:
    return [
        f"{number(entry[f'{name}_before'])} → {number(entry[f'{name}_after'])}"
        for name in ("distance", "cosine")
    ]


def number(value: float | None) -> str:
    """Return a number as tables have it."""
    return "-" if value is None else f"{value:.3g}"


def short_names(models: Sequence[str]) -> list[str]:
    """Return the shortest ends of paths that tell models apart."""
    parts = [PurePath(model).parts for model in models]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return list(models)
