"""What an alignment found, for people and machines: the content of ``alignment.json``."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from mergekit_rotation.graph.motion import Motion
from mergekit_rotation.graph.run import Record, StreamRecord
from mergekit_rotation.graph.verdict import THRESHOLDS, Evidence, judge

#: version of the layout of the JSON; fields may be added without raising it
SCHEMA = 1


@dataclass(frozen=True)
class Sums:
    """Sums over entries, from which relative distances and cosines follow.

    Attributes
    ----------
    reference, before, after : float
        Squared norms: of the reference, of the other model as it is, and once it is moved.
    apart_before, apart_after : float
        Squared distances from the reference.
    inner_before, inner_after : float
        Inner products with the reference.
    """

    reference: float = 0.0
    before: float = 0.0
    after: float = 0.0
    apart_before: float = 0.0
    apart_after: float = 0.0
    inner_before: float = 0.0
    inner_after: float = 0.0

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(
            *(x + y for x, y in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    @classmethod
    def of(cls, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> "Sums":
        """Return the sums for a tensor of the reference, one of the other, and the moved one."""
        a, b, c = (t.flatten() for t in (x, y, z))
        pairs = ((a, a), (b, b), (c, c), (a - b, a - b), (a - c, a - c), (a, b), (a, c))
        return cls(*(float(torch.dot(left, right)) for left, right in pairs))

    @property
    def gain(self) -> float:
        """Share of the squared distance that alignment took away."""
        return 1 - self.apart_after / self.apart_before if self.apart_before > 0 else 0.0

    def summary(self) -> dict[str, float | None]:
        """Return relative distances and cosines; None where the reference is zero."""
        return {
            "distance_before": _ratio(self.apart_before**0.5, self.reference**0.5),
            "distance_after": _ratio(self.apart_after**0.5, self.reference**0.5),
            "cosine_before": _ratio(self.inner_before, (self.reference * self.before) ** 0.5),
            "cosine_after": _ratio(self.inner_after, (self.reference * self.after) ** 0.5),
        }


def _ratio(x: float, y: float) -> float | None:
    return x / y if y > 0 else None


@dataclass(frozen=True)
class Part:
    """One block of one layer, or what a layer has besides its blocks.

    Attributes
    ----------
    label : str
        Of the layer, in the output.
    layers : (int, int)
        The layer of the reference, and that of the other model.
    block : str
        ``attention``, ``neurons``, ``experts`` or another name of the family's; empty for the rest.
    sums : Sums
    moved : tuple of str
        See `Record`.
    motions : tuple of Motion
    condition : float
    """

    label: str
    layers: tuple[int, int]
    block: str
    sums: Sums
    moved: tuple[str, ...] = ()
    motions: tuple[Motion, ...] = ()
    condition: float = 1.0

    @classmethod
    def of_record(cls, record: Record, sums: Sums) -> "Part":
        """Return what was recorded of a block, with sums over its stored tensors."""
        return cls(
            record.layer,
            record.layers,
            record.block,
            sums,
            record.moved,
            record.motions(),
            record.condition,
        )

    def summary(self) -> dict[str, Any]:
        """Return the entry of the block."""
        return {
            "block": self.block or "other",
            **self.sums.summary(),
            "moved": list(self.moved),
            "condition": self.condition,
            "motions": [_plain(motion) for motion in self.motions],
        }


@dataclass(frozen=True)
class Report:
    """One model against its reference.

    Attributes
    ----------
    reference, model : str
    parts : sequence of Part
    outside : mapping of tensor to Sums
        What lies outside of the layers, where that was measured.
    stream : StreamRecord, optional
    notes : sequence of str
    left_out : sequence of str
        Tensors that were not compared, and why.
    apart : str
        Why the two cannot be compared at all, if they cannot.
    compared : bool
        Whether the two were compared; a merge knows distances and orders alone, and no verdict.
    """

    reference: str
    model: str
    parts: Sequence[Part] = ()
    outside: Mapping[str, Sums] = field(default_factory=dict)
    stream: StreamRecord | None = None
    notes: Sequence[str] = ()
    left_out: Sequence[str] = ()
    apart: str = ""
    compared: bool = True

    def total(self) -> Sums:
        """Return the sums over all tensors that were compared."""
        return _total([*(part.sums for part in self.parts), *self.outside.values()])

    def evidence(self) -> Evidence | None:
        """Return the numbers that the verdict rests on; None if the models are not compared."""
        if self.apart or not self.compared:
            return None
        blocks = [part for part in self.parts if part.block]
        kinds = dict.fromkeys(part.block for part in blocks)
        gains = [_total(p.sums for p in blocks if p.block == kind).gain for kind in kinds]
        return Evidence(
            in_place=_in_place([m for part in blocks for m in part.motions]),
            gain=max(gains, default=0.0),
            kinship=_total(part.sums for part in blocks).summary()["cosine_after"] or 0.0,
            stream_moved=self._stream_moved(),
        )

    def _stream_moved(self) -> bool:
        """Tell whether a map of the stream was applied that leaves few coordinates in place."""
        motion = None if self.stream is None else self.stream.motion
        return motion is not None and (motion.kind != "order" or motion.fixed < THRESHOLDS.in_place)

    @property
    def verdict(self) -> str | None:
        """How the two models are related (`mergekit_rotation.graph.verdict`)."""
        if not self.compared:
            return None
        evidence = self.evidence()
        return "unrelated" if evidence is None else judge(evidence)

    def layers(self) -> list[dict[str, Any]]:
        """Return one entry per layer."""
        groups: dict[tuple[str, tuple[int, int]], list[Part]] = {}
        for part in self.parts:
            groups.setdefault((part.label, part.layers), []).append(part)
        return [
            {
                "layer": label,
                "reference_layer": layers[0],
                "model_layer": layers[1],
                **_total(part.sums for part in parts).summary(),
                "blocks": [part.summary() for part in parts],
            }
            for (label, layers), parts in sorted(groups.items(), key=lambda item: item[0][1])
        ]

    def data(self) -> dict[str, Any]:
        """Return the report as JSON has it."""
        evidence = self.evidence()
        return {
            "reference": self.reference or None,
            "model": self.model,
            "verdict": self.verdict,
            "evidence": None if evidence is None else evidence.data(),
            "reason": self.apart or None,
            **self.total().summary(),
            "stream": None if self.stream is None else _stream(self.stream, self.compared),
            "layers": self.layers(),
            "outside": [{"tensor": n, **s.summary()} for n, s in self.outside.items()],
            "left_out": list(self.left_out),
            "notes": list(self.notes),
        }


def _total(sums: Iterable[Sums]) -> Sums:
    return sum(sums, Sums())


def _in_place(motions: Sequence[Motion]) -> float | None:
    """Return the share of neurons and experts that stay in place; of heads where there are none."""
    orders = [motion for motion in motions if motion.kind == "order"]
    chosen = [motion for motion in orders if motion.axis in ("f", "x")] or orders
    size = sum(motion.size for motion in chosen)
    return sum(motion.fixed * motion.size for motion in chosen) / size if size else None


def _stream(record: StreamRecord, with_motion: bool) -> dict[str, Any]:
    explained = None
    motion = record.motion if with_motion else None
    if record.best is not None and record.without > 0:
        explained = 1 - (record.best / record.without) ** 2 if record.taken else 0.0
    return {
        "map": record.kind if record.taken else None,
        "tried": record.kind,
        "relative_distance_without": record.without,
        "relative_distance_with_best": record.best,
        "explained": explained,
        "motion": None if motion is None else _plain(motion),
    }


def _plain(motion: Motion) -> dict[str, Any]:
    entry = asdict(motion)
    entry["angles"] = list(motion.angles) or None
    return entry
