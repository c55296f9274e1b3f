"""How often verdicts err, on pairs whose relation is known: ``python benchmarks/verdict``.

The models are those that `benchmarks/independent` and `benchmarks/scaling` train and cache; with
them come copies with noise, scrambled copies (heads, rotary phases, neurons), copies whose
residual stream was brought to the coordinates of a stranger, scrambled forks, and grafts: models
of which half of the layers are a stranger's. The thresholds lie half-way between the kinds of pairs
over all of them; what they would err without having seen an architecture is printed beside it.
"""

import argparse
import itertools
import json
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from mergekit_rotation import startup

startup.install()

from mergekit.config import MergeConfiguration  # noqa: E402
from mergekit.merge import run_merge  # noqa: E402
from mergekit.options import MergeOptions  # noqa: E402

from mergekit_rotation.architecture import find_family  # noqa: E402
from mergekit_rotation.graph.verdict import (  # noqa: E402
    THRESHOLDS,
    VERDICTS,
    Evidence,
    Thresholds,
    judge,
)
from mergekit_rotation.insight.compared import compare  # noqa: E402
from mergekit_rotation.insight.solved import settings  # noqa: E402
from mergekit_rotation.proof import scrambled  # noqa: E402

HERE = Path(__file__).resolve().parent
OPTIONS = MergeOptions(quiet=True, device="cpu", write_model_card=False, copy_tokenizer=False)
NOISE = (0.01, 0.1, 0.5)


@dataclass(frozen=True)
class Pair:
    """Two models and what they are to one another."""

    what: str
    group: str
    expected: str
    reference: Path
    model: Path


class Copies:
    """Changed copies of trained models, in a temporary folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def _copy(self, source: Path, name: str) -> Path:
        target = self.folder / f"{source.name}-{name}"
        shutil.copytree(source, target)
        return target

    def noisy(self, source: Path, size: float) -> Path:
        """A copy with Gaussian noise of a relative size in every tensor."""
        target, generator = self._copy(source, f"noise-{size}"), torch.Generator().manual_seed(0)
        state = load_file(source / "model.safetensors")
        for x in state.values():
            noise = torch.randn(x.shape, generator=generator)
            x += (size * x.float().square().mean().sqrt() * noise).to(x.dtype)
        save_file(state, target / "model.safetensors", metadata={"format": "pt"})
        return target

    def scrambled(self, source: Path, seed: int = 1) -> Path:
        """A copy whose heads and neurons are in other coordinates."""
        from transformers import AutoConfig, AutoModel

        config = AutoConfig.from_pretrained(source)
        import transformers

        kind = getattr(transformers, config.architectures[0], AutoModel)
        model = kind.from_pretrained(source)
        family = find_family(config, type(model).__name__)
        assert family is not None
        model.load_state_dict(scrambled(model, family, seed))
        target = self.folder / f"{source.name}-scrambled-{seed}"
        model.save_pretrained(target)
        return target

    def moved(self, source: Path, stranger: Path, residual: str) -> Path:
        """A copy whose stream is in the coordinates of a stranger."""
        target = self.folder / f"{source.name}-moved"
        given = settings(str(stranger), str(source), residual, scale=False)
        run_merge(MergeConfiguration.model_validate(given), str(target), OPTIONS)
        return target

    def grafted(self, source: Path, stranger: Path) -> Path:
        """A copy with every second layer from a stranger."""
        target = self._copy(source, "grafted")
        state = load_file(source / "model.safetensors")
        other = load_file(stranger / "model.safetensors")
        for name in state:
            if any(f".{k}." in name for k in (1, 3)):
                state[name] = other[name]
        save_file(state, target / "model.safetensors", metadata={"format": "pt"})
        return target


def pairs(independent: Path, scaling: Path, folder: Path) -> Iterator[Pair]:
    """Yield all pairs, the copies made on the way."""
    copies = Copies(folder)
    groups = {
        name: sorted(cache.glob(f"{name}-[0-9]"))
        for cache, names in (
            (independent, ("llama", "gpt2", "qwen3")),
            (scaling, ("encoder", "vision")),
        )
        for name in names
    }
    for group, models in groups.items():
        for a, b in itertools.permutations(models, 2):
            yield Pair("other seed", group, "unrelated", a, b)
        for k, model in enumerate(models):
            stranger = models[(k + 1) % len(models)]
            yield Pair("itself", group, "same-coordinates", model, model)
            for size in NOISE:
                noisy = copies.noisy(model, size)
                yield Pair(f"noise {size}", group, "same-coordinates", model, noisy)
                if size < 0.5:
                    twin = copies.scrambled(noisy)
                    yield Pair(f"noise {size}, scrambled", group, "same-function", model, twin)
            twin = copies.scrambled(model)
            yield Pair("scrambled", group, "same-function", model, twin)
            moved = copies.moved(
                model, stranger, "permutation" if group in ("encoder", "vision") else "orthogonal"
            )
            yield Pair("other stream", group, "same-function", model, moved)
            graft = copies.grafted(model, stranger)
            yield Pair("half the layers", group, "related", model, copies.scrambled(graft))
    llama, forks = independent / "llama-0", [independent / f"fork-{t}" for t in ("code", "docs")]
    tuned = independent / "finetune"
    yield Pair("fine-tune", "llama", "same-coordinates", independent / "llama-1", tuned)
    for seed in range(1, 4):
        twin = copies.scrambled(tuned, seed)
        yield Pair("fine-tune, scrambled", "llama", "same-function", independent / "llama-1", twin)
    for a, b in itertools.permutations([llama, *forks], 2):
        yield Pair("fork", "llama", "same-coordinates", a, b)
        yield Pair("fork, scrambled", "llama", "related", a, copies.scrambled(b, seed=len(a.name)))
    for fork, model in itertools.product(forks, groups["llama"][1:]):
        yield Pair("other seed and data", "llama", "unrelated", model, fork)
    for a, b in itertools.permutations(groups, 2):
        yield Pair("other architecture", f"{a} {b}", "unrelated", groups[a][0], groups[b][0])


def derive(rows: list[tuple[Pair, Evidence | None]]) -> Thresholds:
    """Return thresholds half-way between the kinds of pairs."""
    found: dict[str, list[Evidence]] = {name: [] for name in VERDICTS}
    for pair, evidence in rows:
        if evidence is not None:
            found[pair.expected].append(evidence)
    still, twins, kin, strangers = (found[name] for name in VERDICTS)
    placed = [e.in_place for e in still if e.in_place is not None]

    def between(low: list[float], high: list[float]) -> float:
        return (max(low) + min(high)) / 2

    return Thresholds(
        in_place=between([e.in_place or 0.0 for e in strangers], placed),
        gain=between([e.gain for e in still], [e.gain for e in twins]),
        same=between([e.kinship for e in kin], [e.kinship for e in twins]),
        related=between([e.kinship for e in strangers], [e.kinship for e in kin]),
    )


def report(rows: list[tuple[Pair, Evidence | None]]) -> str:
    """Return tables of evidence and errors as markdown."""
    lines = [
        "| pair | number | in place | gain | kinship | stream moved | verdict | errors |",
        "|---|---|---|---|---|---|---|---|",
    ]
    wrong: dict[str, list[bool]] = {}
    for (expected, what), group in itertools.groupby(
        sorted(rows, key=lambda row: (VERDICTS.index(row[0].expected), row[0].what)),
        lambda row: (row[0].expected, row[0].what),
    ):
        entries = list(group)
        some = [e for _, e in entries if e is not None]
        errors = []
        for pair, evidence in entries:
            verdict = "unrelated" if evidence is None else judge(evidence)
            errors.append(verdict != expected)
            wrong.setdefault(pair.group, []).append(errors[-1])
        cells = [
            _range([getattr(e, name) for e in some if getattr(e, name) is not None])
            for name in ("in_place", "gain", "kinship")
        ]
        moved = f"{sum(e.stream_moved for e in some)}/{len(some)}"
        cells += [moved, expected, str(sum(errors))]
        lines.append(f"| {what} | {len(entries)} | {' | '.join(cells)} |")
    total = [error for errors in wrong.values() for error in errors]
    lines += [
        "",
        f"{sum(total)} of {len(total)} pairs wrong, with thresholds from these pairs.",
        "",
    ]
    lines += ["| left out of the thresholds | pairs | wrong |", "|---|---|---|"]
    for group in dict.fromkeys(p.group for p, e in rows if e is not None):
        limits = derive([row for row in rows if row[0].group != group])
        mine = [(p, e) for p, e in rows if p.group == group and e is not None]
        errors = [judge(e, limits) != p.expected for p, e in mine]
        lines.append(f"| {group} | {len(errors)} | {sum(errors)} |")
    return "\n".join(lines)


def _range(values: list[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}" if values else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    benchmarks = HERE.parent
    parser.add_argument("--independent", type=Path, default=benchmarks / "independent" / "cache")
    parser.add_argument("--scaling", type=Path, default=benchmarks / "scaling" / "cache")
    given = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for pair in pairs(given.independent, given.scaling, Path(folder)):
            found = compare(str(pair.reference), str(pair.model), OPTIONS)
            rows.append((pair, found.evidence()))
            verdict = found.verdict
            mark = "" if verdict == pair.expected else f"  but {pair.expected}"
            print(f"{pair.group} {pair.what}: {verdict}{mark} {found.evidence()}", flush=True)
    print(f"derived {json.dumps(vars(derive(rows)))}, in use {json.dumps(vars(THRESHOLDS))}")
    text = report(rows)
    print(text)
    (HERE / "results.md").write_text(
        "# How often verdicts err\n\nPrinted by `python benchmarks/verdict`. Ranges over all pairs "
        f"of a kind.\n\n{text}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
