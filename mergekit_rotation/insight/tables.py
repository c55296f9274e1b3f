"""Tables for people on a terminal."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

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
_SHAPES = "tensors of different shapes cannot be merged"
_ORDER = {"kv": "heads", "g": "group", "f": "neurons", "x": "experts"}
_ANGLE = {"qk": "q/k", "vo": "v/o"}
#: wide enough for every line of a file or a pipe
_UNLIMITED = 10_000


@dataclass(frozen=True)
class Column:
    """A column of a table, with one cell per row; blank cells are empty."""

    name: str
    cells: Sequence[str]


def terminal() -> Console:
    """Return where tables are printed; what is no terminal has no width."""
    console = Console()
    return console if console.is_terminal else Console(width=_UNLIMITED)


def show_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Print a comparison: of two models in full, of more as a matrix with one line per pair."""
    console = console or terminal()
    if len(comparison.reports) == 1:
        show_report(comparison.reports[0], console)
        return
    for k, model in enumerate(comparison.models, 1):
        console.print(f"{k:3}  {model}", highlight=False, markup=False)
    places = [str(k) for k, _ in enumerate(comparison.models, 1)]
    for title, key in (("before", "distance_before"), ("after", "distance_after")):
        console.print(f"\nrelative distance {title} alignment", highlight=False)
        rows = comparison.matrix(key)
        columns = [Column(name, [number(row[k]) for row in rows]) for k, name in enumerate(places)]
        for table in stacked(console, "", [places], [columns]):
            console.print(table)
    names = dict(zip(comparison.models, short_names(comparison.models), strict=True))
    for report in comparison.reports:
        title = f"{escape(names[report.reference])} - {escape(names[report.model])}"
        console.print(f"{title}: [bold]{report.verdict}[/bold]", highlight=False)
        _indented(console, _because(report))


def show_report(report: Report, console: Console) -> None:
    """Print a pair: one row per layer, and the verdict with what it rests on."""
    data = report.data()
    assert report.verdict is not None  # as of all that compare has measured
    if not report.apart:
        title = f"{data['model']} aligned to {data['reference']}"
        console.print(title, highlight=False, markup=False)
        _show_layers(data, console)
    for note in data["notes"]:
        console.print(f"note: {note}", highlight=False, markup=False)
    if data["left_out"]:
        left = data["left_out"]
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        console.print(f"not compared: {'; '.join(left[:3])}{more}", highlight=False, markup=False)
    meaning = _SHAPES if report.apart else _MEANING[report.verdict]
    console.print(f"\nverdict: [bold]{report.verdict}[/bold]: {meaning}", highlight=False)
    _indented(console, _because(report))


def stacked(
    console: Console,
    corner: str,
    sections: Sequence[Sequence[str]],
    groups: Sequence[Sequence[Column]],
) -> Iterator[Table]:
    """Give a table as wide as the console allows, or several below one another.

    Parameters
    ----------
    console : Console
    corner : str
        Heading of the names of the rows, which stand before every table.
    sections : sequence of sequences of str
        Names of rows, with a gap after each section. A row is left out where it is blank.
    groups : sequence of sequences of Column
        What belongs together; if not all fits, each group begins a table.
    """

    def table(columns: Sequence[Column]) -> Table:
        result = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        result.add_column(corner, overflow="fold")
        for column in columns:
            result.add_column(column.name, justify="right", no_wrap=True)
        cells = iter(zip(*(column.cells for column in columns), strict=True))
        for section in sections:
            result.add_section()
            for name, row in zip(section, cells, strict=False):
                if any(row):
                    result.add_row(escape(name), *row)
        return result

    def fits(columns: Sequence[Column]) -> bool:
        options = console.options.update(max_width=_UNLIMITED)
        return console.measure(table(columns), options=options).maximum <= console.width

    whole = [column for group in groups for column in group]
    for group in [whole] if fits(whole) else groups:
        begun: list[Column] = []
        for column in group:
            if begun and not fits([*begun, column]):
                yield table(begun)
                begun = []
            begun.append(column)
        yield table(begun)


def _indented(console: Console, text: str) -> None:
    console.print(Padding(Text(text), (0, 0, 0, 2), expand=False))


def show_verified(verified: Verified, console: Console | None = None) -> None:
    """Print whether two models are the same function, and how far they are apart where."""
    console = console or terminal()
    first, second = verified.models
    table = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0))
    table.add_column("", overflow="fold")
    for name in ("relative", "by rounding", "largest"):
        table.add_column(name, justify="right", no_wrap=True)
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
    console = console or terminal()
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
    console = console or terminal()
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
        return report.apart
    limits = evidence.data()["thresholds"]
    said = []
    if evidence.in_place is not None:
        said.append(f"neurons in place {evidence.in_place:.0%} (from {limits['in_place']:.0%})")
    if evidence.stream_moved:
        said.append("residual stream moved")
    else:
        said.append(f"explained by alignment {evidence.gain:.0%} (up to {limits['gain']:.0%})")
    kinship = f"same from {limits['same']:.2f}, related from {limits['related']:.2f}"
    return f"{', '.join(said)}, kinship {evidence.kinship:.3f} ({kinship})"


def _show_layers(data: Mapping[str, Any], console: Console) -> None:
    """Print one row per layer: distances, cosines, what stays in place, and angles."""
    layers, outside = data["layers"], data["outside"]
    entries = [*layers, *outside, data]
    numbers = [
        Column(name, [_change(entry, name) for entry in entries]) for name in ("distance", "cosine")
    ]
    motions = [[m for block in e["blocks"] for m in block["motions"]] for e in layers]

    def columns(kind: str, names: Mapping[str, str], shown: str) -> list[Column]:
        found = {
            name: [_mean(_of(m, kind, axis), shown) for m in motions]
            for axis, name in names.items()
        }
        blank = [""] * (len(outside) + 1)
        return [Column(name, [*cells, *blank]) for name, cells in found.items() if any(cells)]

    orders, angles = columns("order", _ORDER, "{:.0%}"), columns("rotation", _ANGLE, "{:.0f}°")
    sections = [
        [_layer_name(entry) for entry in layers],
        [_tensor_name(entry["tensor"]) for entry in outside],
        ["all"],
    ]
    for table in stacked(console, "layer", sections, [numbers, [*orders, *angles]]):
        console.print(table)
    legend = ["before → after alignment"]
    for means, group in (("share in place", orders), ("median angle of rotation", angles)):
        if group:
            legend.append(f"{', '.join(column.name for column in group)}: {means}")
    console.print("; ".join(legend), highlight=False, markup=False)


def _of(motions: Sequence[Mapping[str, Any]], kind: str, axis: str) -> list[tuple[float, int]]:
    """Return share in place or median angle, and size, of one kind of motion along an axis."""
    return [
        (m["fixed"] if kind == "order" else m["angles"][2], m["size"])
        for m in motions
        if m["kind"] == kind and m["axis"] == axis
    ]


def _mean(values: Sequence[tuple[float, int]], shown: str) -> str:
    if not values:
        return ""
    return shown.format(sum(x * size for x, size in values) / sum(size for _, size in values))


def _layer_name(entry: Mapping[str, Any]) -> str:
    a, b = entry["reference_layer"], entry["model_layer"]
    return str(a) if a == b else f"{a} - {b}"


def _tensor_name(tensor: str) -> str:
    """Return the end of a name that tells what the tensor is."""
    name = tensor.removesuffix(".weight")
    return ".".join(name.split(".")[-2 if name.endswith(".bias") else -1 :])


def _change(entry: Mapping[str, Any], name: str) -> str:
    return f"{number(entry[f'{name}_before'])} → {number(entry[f'{name}_after'])}"


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
