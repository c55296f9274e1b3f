"""Tables and figure of the results."""

import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import evaluate
import heal
import train
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Curves = list[dict[str, evaluate.Curve]]

COLOURS = {
    "unaligned": "#8a8a8a",
    "local only": "#e69f00",
    "permutation": "#009e73",
    "orthogonal": "#0072b2",
    "orthogonal, 3 rounds": "#cc3311",
}
DASHES = {"orthogonal, 3 rounds": (0, (4, 2))}
NAMES = {
    "target": "the target alone",
    "fine-tune": "the fine-tune itself",
    "naive": "carried without alignment",
    "local only": "carried, local only",
    "orthogonal": "carried, orthogonal",
}


@dataclass(frozen=True)
class Results:
    """All that one run has measured."""

    curves: dict[str, Curves]
    forks: dict[str, dict[str, float]]
    transport: list[dict[str, dict[str, float]]]
    healed: list[heal.Healed]
    seconds: float


def spread(values: Iterable[float], digits: int = 3) -> str:
    """Mean and standard deviation."""
    numbers = list(values)
    mean = f"{statistics.mean(numbers):.{digits}f}"
    return f"{mean} ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else mean


def percent(values: Iterable[float]) -> str:
    return spread([100 * value for value in values], 0) + " %"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def curve_rows(curves: Curves) -> list[list[str]]:
    rows = []
    for variant in curves[0]:
        mine = [pair[variant] for pair in curves]
        plain = [pair["unaligned"] for pair in curves]
        removed = [
            1 - curve.middle_barrier / other.middle_barrier
            for curve, other in zip(mine, plain, strict=True)
        ]
        rows.append(
            [
                variant,
                spread(curve.middle for curve in mine),
                spread(curve.middle_barrier for curve in mine),
                spread(curve.barrier for curve in mine),
                "-" if variant == "unaligned" else percent(removed),
            ]
        )
    return rows


def curves_text(curves: dict[str, Curves]) -> str:
    head = ["variant", "loss of the middle", "barrier in the middle", "barrier", "removed"]
    parts = [
        "## Between independently trained models\n",
        "Barrier: how far the loss lies above the straight line between the losses of the two "
        "models, at its highest among eleven points and in the middle; removed: the share of the "
        "unaligned barrier in the middle that is gone. Pairs share models, so the deviations are "
        "not those of independent samples.\n",
    ]
    for name, pairs in curves.items():
        ends = {
            seed: pair["unaligned"].losses[end]
            for seeds, pair in zip(evaluate.PAIRS, pairs, strict=False)
            for seed, end in zip(seeds, (0, -1), strict=True)
        }
        parts += [
            f"### {train.TITLES[name]}\n",
            f"{len(pairs)} pair{'s' * (len(pairs) > 1)}; "
            f"the models themselves score {spread(ends.values())}.\n",
            table(head, curve_rows(pairs)),
        ]
    return "\n".join(parts)


def forks_text(forks: dict[str, dict[str, float]]) -> str:
    rows = [[row, *(f"{loss:.3f}" for loss in losses.values())] for row, losses in forks.items()]
    return (
        "## Two far forks of one model\n\n"
        "A Llama trained on, once with code and once with documentation, at twice its learning "
        "rate.\n\n" + table(["model", *next(iter(forks.values()))], rows)
    )


def transport_text(transport: list[dict[str, dict[str, float]]]) -> str:
    rows = []
    for row in transport[0]:
        cells = [NAMES[row]]
        for text in ("headers", "code"):
            mine = [target[row][text] for target in transport]
            alone = [target["target"][text] for target in transport]
            change = [a - b for a, b in zip(mine, alone, strict=True)]
            if row == "fine-tune":  # one model, whatever the target
                cells += [f"{mine[0]:.3f}", "-"]
            else:
                cells += [spread(mine), "-" if row == "target" else spread(change)]
        rows.append(cells)
    return (
        "## A fine-tune carried to another model\n\n"
        "A Llama fine-tuned on C headers; what it learned is added to Llamas of other seeds "
        f"({len(transport)}), which never saw such text. Change: against the target alone.\n\n"
        + table(["model", "headers", "change", "code", "change"], rows)
    )


def heal_text(healed: list[heal.Healed]) -> str:
    rows = [
        [f"average, {variant}"]
        + [spread(pair.losses[variant][i] for pair in healed) for i in range(len(heal.STEPS))]
        for variant in heal.VARIANTS
    ]
    pairs = f"{len(healed)} pair{'s' * (len(healed) > 1)}"
    return (
        "## Healing\n\n"
        f"Averages of Llamas ({pairs}), distilled with low-rank corrections of rank {heal.RANK} "
        f"on {heal.SEQUENCES} sequences of {heal.LENGTH} bytes that the two parents wrote "
        f"themselves. The parents score {spread(pair.parents for pair in healed)}.\n\n"
        + table(["model", *(f"{step} steps" for step in heal.STEPS)], rows)
    )


def text(results: Results) -> str:
    packages = ("mergekit-rotation", "mergekit", "torch", "transformers")
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    return "\n".join(
        [
            "# Merging models that were trained independently\n",
            "Written by `python benchmarks/independent`. The models are byte-level, have four "
            "layers of width 128, and were trained on the sources of Python's standard library "
            "from different initial weights in different orders. Losses are in nats per byte of "
            "held-out code (the text of the quickstart) where no other text is named; mean ± "
            "standard deviation. Smaller is better.\n",
            "![Loss between models, and healing](results.png)\n",
            curves_text(results.curves),
            forks_text(results.forks),
            transport_text(results.transport),
            heal_text(results.healed),
            f"Python {platform.python_version()}, {versions}, CPU; evaluated in "
            f"{results.seconds / 60:.0f} minutes, after training.\n",
        ]
    )


def draw_band(axes: Axes, x: Sequence[float], lines: list[tuple[float, ...]], name: str) -> None:
    """The mean of some lines, and a band of one standard deviation around it."""
    columns = list(zip(*lines, strict=True))
    mean = [statistics.mean(column) for column in columns]
    style = {"color": COLOURS[name], "linestyle": DASHES.get(name, "-")}
    axes.plot(x, mean, label=name, marker="o", markersize=3, linewidth=1.6, **style)
    if len(lines) > 1:
        deviation = [statistics.stdev(column) for column in columns]
        low = [m - d for m, d in zip(mean, deviation, strict=True)]
        high = [m + d for m, d in zip(mean, deviation, strict=True)]
        axes.fill_between(x, low, high, color=COLOURS[name], alpha=0.15, linewidth=0)


def figure(results: Results, file: Path) -> None:
    """One panel of curves per architecture, and one of healing."""
    drawing = Figure(figsize=(15, 4.2), layout="constrained")
    panels: Sequence[Axes] = drawing.subplots(1, len(results.curves) + 1)
    for axes, (name, pairs) in zip(panels, results.curves.items(), strict=False):
        for variant in pairs[0]:
            draw_band(axes, evaluate.POINTS, [pair[variant].losses for pair in pairs], variant)
        axes.set_title(train.TITLES[name])
        axes.set_xlabel("share of the second model")
    panels[0].set_ylabel("loss, nats per byte of held-out code")
    healing = panels[-1]
    for variant in heal.VARIANTS:
        draw_band(healing, heal.STEPS, [pair.losses[variant] for pair in results.healed], variant)
    parents = statistics.mean(pair.parents for pair in results.healed)
    healing.axhline(parents, color="black", linewidth=1, linestyle=":", label="the parents")
    healing.set_title("Healing the average (Llama)")
    healing.set_xlabel("steps of distillation")
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
    handles = dict(
        (label, handle)
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    )
    drawing.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=6, frameon=False
    )
    drawing.savefig(file, dpi=110, metadata={"Software": None})


def write(results: Results, folder: Path) -> None:
    """Write results.md and results.png."""
    figure(results, folder / "results.png")
    (folder / "results.md").write_text(text(results))
