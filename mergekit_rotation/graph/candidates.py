"""Maps of the stream that were tried for a model, and which of them is taken."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mergekit_rotation.graph import run
from mergekit_rotation.graph.sides import Sides
from mergekit_rotation.symmetry import (
    Norm,
    Orthogonal,
    OrthogonalFixingOnes,
    OrthogonalMap,
    StreamMap,
    Transformation,
    chance_share,
)

#: standard errors of the mean by which a map that is not measured on all layers lies behind
DECISIVE = 5.0


@dataclass
class Candidate:
    """One map of the stream (None: no map), with what the layers made of it."""

    stream: StreamMap | None
    blocks: dict[tuple[str, int, int], Transformation] = field(default_factory=dict)
    norms: dict[tuple[str, int, int], Norm] = field(default_factory=dict)
    records: list[run.Record] = field(default_factory=list)
    entries: int = 0
    #: squared distance to the reference, and squared norm of it, by tensor and pair of layers
    squares: dict[tuple[str, int, int], tuple[float, float]] = field(default_factory=dict)

    def add(self, name: str, layers: tuple[int, int], distance: float, scale: float) -> None:
        """Add a tensor, or some rows of it."""
        key = (name, *layers)
        before = self.squares.get(key, (0.0, 0.0))
        self.squares[key] = (before[0] + distance, before[1] + scale)

    def shares(self) -> dict[tuple[str, int, int], float]:
        """Squared relative distance to the reference, by tensor and pair of layers."""
        return {key: d / scale for key, (d, scale) in self.squares.items() if scale > 0}

    @property
    def distance(self) -> float:
        """Sum over tensors of the squared relative distance to the reference."""
        return sum(self.shares().values())

    @property
    def tensors(self) -> int:
        """How many tensors were compared."""
        return len(self.squares)

    def relative(self) -> float:
        """Root mean square over all tensors of the relative distance to the reference."""
        return float((self.distance / max(self.tensors, 1)) ** 0.5)


class Judge:
    """Comparison of the candidates for one pair of models.

    Parameters
    ----------
    sides : Sides
    """

    def __init__(self, sides: Sides):
        self.sides = sides

    def best(self, candidates: Sequence[Candidate]) -> Candidate:
        """Return the closest candidate; a map has to gain more than chance and rounding do."""
        best = candidates[0]
        for candidate in candidates[1:]:
            if best.distance - candidate.distance > self._margin(best, candidate):
                best = candidate
        return best

    def _margin(self, plain: Candidate, mapped: Candidate) -> float:
        """How much of a distance a map may explain without there being anything to it."""
        if plain.stream is not None or mapped.stream is None:
            return 0.0
        # Numbers that were fitted: the map itself, and the gauge of every norm.
        size = self.sides.sizes["e"]
        freedom = size * len(mapped.norms)
        rounding = 0.0
        if isinstance(mapped.stream, OrthogonalMap):
            group = OrthogonalFixingOnes if self.sides.layout.layer_norm else Orthogonal
            freedom += group(size).freedom
            rounding = torch.finfo(self.sides.stored or torch.float32).eps ** 2 / 12
        share = chance_share(freedom, mapped.entries)
        return share * plain.distance + rounding * mapped.tensors

    def without_losers(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates that may still turn out to be the closest."""
        best = self.best(candidates)
        return [c for c in candidates if c is best or not self._is_behind(c, best)]

    def _is_behind(self, candidate: Candidate, best: Candidate) -> bool:
        ahead = best.shares()
        gaps = [share - ahead[key] for key, share in candidate.shares().items()]
        if len(gaps) < 2:
            return False
        error = len(gaps) ** 0.5 * statistics.stdev(gaps)
        return sum(gaps) > self._margin(candidate, best) + DECISIVE * error
