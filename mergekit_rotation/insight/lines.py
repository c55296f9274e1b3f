"""Losses on the way from one model to another, and what stands between them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from mergekit_rotation.graph.report import SCHEMA


@dataclass(frozen=True)
class Line:
    """Losses along a line from one model to another.

    Attributes
    ----------
    points : sequence of float
        From 0 to 1.
    loss : sequence of float
        In nats per token.
    """

    points: Sequence[float]
    loss: Sequence[float]

    def over(self) -> list[float]:
        """Return by how much the loss at each point exceeds the line between those of the ends."""
        first, last = self.loss[0], self.loss[-1]
        return [
            loss - ((1 - t) * first + t * last)
            for t, loss in zip(self.points, self.loss, strict=True)
        ]

    @property
    def barrier(self) -> float:
        """Return the largest excess, at least 0."""
        return max(0.0, *self.over()[1:-1])

    @property
    def top(self) -> float | None:
        """Return where the excess is largest; None without a barrier."""
        return self.points[self.over().index(self.barrier)] if self.barrier else None

    def data(self) -> dict[str, Any]:
        """Return the entry of the JSON."""
        return {"loss": list(self.loss), "barrier": self.barrier, "top": self.top}


@dataclass(frozen=True)
class Barrier:
    """What stands between two models, unaligned and aligned.

    Attributes
    ----------
    models : (str, str)
        The reference, at t = 0, and the other model, at t = 1.
    text : str
    tokens : int
        How many are predicted.
    plain, aligned : Line
    apart, bound : float
        Root mean square, over the tokens, by which alignment changes the losses at the ends, and
        up to which rounding explains that.
    seconds : float
    notes : sequence of str
    """

    models: tuple[str, str]
    text: str
    tokens: int
    plain: Line
    aligned: Line
    apart: float
    bound: float
    seconds: float
    notes: Sequence[str] = field(default=())

    @property
    def same_ends(self) -> bool:
        """Whether alignment left the function of both models as it was, up to rounding."""
        return self.apart <= self.bound

    @property
    def removed(self) -> float | None:
        """Return the share of the barrier that alignment removes.

        None where there is none to speak of: the plain one is within what rounding does to the mean
        over all tokens, which it changes independently of one another.
        """
        plain = self.plain.barrier
        known = plain > self.bound / self.tokens**0.5
        return 1 - self.aligned.barrier / plain if known else None

    def data(self) -> dict[str, Any]:
        """Return the answer as JSON has it."""
        return {
            "schema": SCHEMA,
            "version": version("mergekit-rotation"),
            "reference": self.models[0],
            "model": self.models[1],
            "text": self.text,
            "tokens": self.tokens,
            "t": list(self.plain.points),
            "plain": self.plain.data(),
            "aligned": self.aligned.data(),
            "removed": self.removed,
            "ends": {"apart": self.apart, "bound": self.bound, "same": self.same_ends},
            "seconds": self.seconds,
            "notes": list(self.notes),
        }
