"""What a planned merge would do to each layer: a row for every range that is treated alike."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mergekit_rotation.graph import run
from mergekit_rotation.graph.block import BlockSpec
from mergekit_rotation.graph.tasks import AlignBlock
from mergekit_rotation.symmetry import DirectSum, Group, Pattern, Trivial

_GROUPS = {
    "Orthogonal": "rotated",
    "PlaneRotations": "rotated by a phase per frequency",
    "PlaneSigns": "signs per frequency",
    "Signs": "signs",
}


@dataclass(frozen=True)
class Row:
    """What would happen to one block of consecutive layers of a model, or why nothing does.

    Attributes
    ----------
    model, reference : str
    first, last : str
        Labels of the layers in the output.
    block : str
        ``attention``, ``neurons``, ``experts``, ...; empty for whole layers.
    symmetries : tuple of str
        What it may be aligned by.
    reason : str
        Why it is left as it is, if it is.
    """

    model: str
    reference: str
    first: str
    last: str
    block: str
    symmetries: tuple[str, ...] = ()
    reason: str = ""

    @property
    def layers(self) -> str:
        """The range of layers."""
        last = self.last.rpartition(".")[2]
        return self.first if self.first == self.last else f"{self.first}-{last}"

    def data(self) -> dict[str, Any]:
        """Return the row as JSON has it."""
        return {
            "model": self.model,
            "reference": self.reference,
            "layers": self.layers,
            "block": self.block or None,
            "aligned_by": list(self.symmetries),
            "reason": self.reason or None,
        }


def foreseen_blocks(executor: Any, this: run.Run) -> list[run.Foreseen]:
    """Return all blocks that would be aligned, in the order of the layers."""
    blocks = [
        run.Foreseen(
            str(task.legs[0].other.model),
            str(task.legs[0].reference.model),
            task.layer,
            task.layers,
            task.spec,
        )
        for task in executor.universe.tasks
        if isinstance(task, AlignBlock)
    ]
    return [*blocks, *this.foreseen]


def rows_of(foreseen: Sequence[run.Foreseen], unsolved: Sequence[run.Unsolved]) -> list[Row]:
    """Return one row per range of consecutive layers that are treated alike."""
    single = [
        Row(f.model, f.reference, f.layer, f.layer, f.spec.kind, symmetries(f.spec))
        for f in foreseen
    ]
    for entry in unsolved:
        place, _, block = entry.place.partition(" ")
        if entry.place == "all layers":
            place, block = entry.place, ""
        single.append(Row(entry.model, entry.reference, place, place, block, reason=entry.reason))
    groups: dict[Any, list[Row]] = {}
    for row in dict.fromkeys(single):
        key = (row.model, row.reference, row.block, row.symmetries, row.reason)
        groups.setdefault(key, []).append(row)
    rows = [joined for group in groups.values() for joined in _joined(group)]
    stems = {_place(row.first)[0] for row in rows if _place(row.first)[1] >= 0}
    if len(stems) == 1:  # of models of one module, its name says nothing
        start = f"{stems.pop()}."
        rows = [
            replace(row, first=row.first.removeprefix(start), last=row.last.removeprefix(start))
            for row in rows
        ]
    return sorted(rows, key=lambda row: (row.model, _place(row.first), row.block))


def _joined(rows: Sequence[Row]) -> list[Row]:
    """Join rows of consecutive layers."""
    result: list[Row] = []
    for row in sorted(rows, key=lambda row: _place(row.first)):
        if result:
            (stem, last), (other, index) = _place(result[-1].last), _place(row.first)
            if stem == other and index == last + 1:
                result[-1] = replace(result[-1], last=row.last)
                continue
        result.append(row)
    return result


def _place(layer: str) -> tuple[str, int]:
    """Return the module and the number of a layer."""
    stem, _, number = layer.rpartition(".")
    return (stem, int(number)) if number.isdigit() else (layer, -1)


def symmetries(spec: BlockSpec) -> tuple[str, ...]:
    """Name what a block may be aligned by.

    Parameters
    ----------
    spec : BlockSpec
    """
    orders = spec.orders()
    names = {"kv": "heads reordered", "g": "query heads reordered", "x": "experts reordered"}
    said = [text for axis, text in names.items() if axis in orders]
    if "f" in orders:
        signed = any("~f" in piece for _, p in spec.patterns for piece in Pattern.parse(p).pieces)
        said.append("neurons reordered" + (", with signs" if signed else ""))
    if spec.query_key is not None and spec.use_query_key:
        said += _named("queries and keys", spec.query_key)
    if spec.value_output is not None and spec.use_value_output:
        said += _named("values and outputs", spec.value_output)
    return (*said, "scalings undone") if spec.use_scale else tuple(said)


def _named(what: str, group: Group) -> list[str]:
    if isinstance(group, DirectSum):
        words = dict.fromkeys(w for part in group.blocks for w in _words(part))
        return [f"{what} {' and '.join(words)}"] if words else []
    return [f"{what} {word}" for word in _words(group)]


def _words(group: Group) -> list[str]:
    return [] if isinstance(group, Trivial) else [_GROUPS[type(group).__name__]]
