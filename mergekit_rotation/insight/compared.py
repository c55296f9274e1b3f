"""Two models against one another, and several."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import combinations
from typing import Any

from mergekit.options import MergeOptions

from mergekit_rotation.graph.report import SCHEMA, Part, Report
from mergekit_rotation.insight.measure import Meter
from mergekit_rotation.insight.solved import Apart, Solved, solve


def compare(reference: str, other: str, options: MergeOptions, scale: bool = False) -> Report:
    """Return what alignment tells of two models.

    Every tensor that both models store is compared as it is stored, before and after the other
    model is moved to the reference's coordinates.

    Raises
    ------
    RotationError
        If one of them cannot be read, or no symmetries are known for it.
    """
    try:
        solved = solve(reference, other, options, scale)
    except Apart as problem:
        return Report(reference, other, apart=str(problem))
    return measured(solved)


def measured(solved: Solved) -> Report:
    """Return the report of a pair that is solved, with distances of all stored tensors."""
    meter = Meter(solved)
    found, labels = meter.measure(), meter.pairs()
    parts = [
        Part.of_record(record, found.blocks.pop((*record.layers, record.block)))
        for record in solved.run.records
    ]
    parts += [
        Part(labels[a, b], (a, b), block, sums) for (a, b, block), sums in found.blocks.items()
    ]
    notes = list(solved.run.notes.get(str(solved.other), []))
    if solved.depths[0] != solved.depths[1]:
        fewer = min(solved.depths)
        notes.append(
            f"{solved.depths[1]} layers, {solved.depths[0]} in the reference; the first {fewer} of "
            "both are compared"
        )
    return Report(
        str(solved.reference),
        str(solved.other),
        parts,
        found.outside,
        solved.run.streams.get(str(solved.other)),
        notes,
        found.left_out,
    )


@dataclass(frozen=True)
class Comparison:
    """All pairs among some models.

    Attributes
    ----------
    models : sequence of str
    reports : sequence of Report
        One per pair, in order; the first of a pair is the reference.
    """

    models: Sequence[str]
    reports: Sequence[Report]

    @classmethod
    def of(cls, models: Sequence[str], options: MergeOptions, scale: bool = False) -> "Comparison":
        """Compare every two of some models."""
        pairs = combinations(models, 2)
        return cls(models, [compare(a, b, options, scale) for a, b in pairs])

    def matrix(self, name: str) -> list[list[float | None]]:
        """Return a number of the reports for every pair; it is taken as symmetric."""
        place = {model: k for k, model in enumerate(self.models)}
        size = len(self.models)
        same = 1.0 if name.startswith("cosine") else 0.0
        result: list[list[float | None]] = [[same] * size for _ in range(size)]
        for report in self.reports:
            i, j = place[report.reference], place[report.model]
            result[i][j] = result[j][i] = report.total().summary()[name]
        return result

    def data(self) -> dict[str, Any]:
        """Return the comparison as JSON has it."""
        head = {"schema": SCHEMA, "version": version("mergekit-rotation")}
        if len(self.reports) == 1:
            return head | self.reports[0].data()
        names = ("distance_before", "distance_after", "cosine_before", "cosine_after")
        return {
            **head,
            "models": list(self.models),
            "matrix": {name: self.matrix(name) for name in names},
            "pairs": [report.data() for report in self.reports],
        }
