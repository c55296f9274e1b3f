"""The merge in progress: what was aligned, and which files the output folder may hold.

There is at most one merge at a time in a process; worker threads of a multi-GPU run report to
the same `Run`.
"""

import glob
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mergekit_rotation.graph.errors import RotationError
from mergekit_rotation.graph.motion import Motion, stream_motion, turns
from mergekit_rotation.symmetry import Linear, Scale, Sign, StreamMap, Transformation, svd

LOG = logging.getLogger(__name__)

#: why something stays as it is
FAILED = "left as they are, because a factorisation or an assignment failed numerically"
OVERFLOW = "left as they are, because moved numbers exceed the range of the output's dtype"
_WEIGHTS = (
    "alignment.json",
    "model*.safetensors",
    "model*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model*.bin.index.json",
    ".tmp" + 6 * "[A-Za-z0-9]",  # what safetensors is writing, or was when it was killed
)


@dataclass(frozen=True)
class Record:
    """What one solve did to the tensors of one block.

    Attributes
    ----------
    model, reference : str
    block : str
        ``attention`` or ``neurons``.
    layer : str
        Label of the layer in the reference.
    moved : tuple of str
        Axes that were permuted, rotated, signed or scaled; empty if the block stayed as it was.
    before, after, scale : float
        Squared Frobenius norms of reference minus other, before and after, and of the reference.
    seconds : float
    condition : float
        Largest condition number of what was applied.
    scaled : bool
        Whether the block still differs, but only by what ``align_scale`` would undo.
    left : str
        Why the block had to stay as it was, if it had to.
    layers : (int, int)
        The layer of the reference, and that of the other model, where whole models are solved.
    applied : Transformation
        What was applied there.
    orders : tuple of Motion
        How far what may be reordered is.
    """

    model: str
    reference: str
    block: str
    layer: str
    moved: tuple[str, ...]
    before: float
    after: float
    scale: float
    seconds: float
    condition: float = 1.0
    scaled: bool = False
    left: str = ""
    layers: tuple[int, int] = (0, 0)
    applied: Transformation = field(default=(), compare=False, repr=False)
    orders: tuple[Motion, ...] = ()

    def motions(self) -> tuple[Motion, ...]:
        """Describe how far what was applied moves each axis."""
        return (*self.orders, *turns(self.applied))


@dataclass(frozen=True)
class StreamRecord:
    """Which map of the residual stream was tried for a model, and what it is worth.

    Attributes
    ----------
    model : str
    kind : str
        ``permutation`` or ``orthogonal``.
    taken : int
        Which round's map is applied; 0 if none is.
    rounds : int
        How many rounds were asked for.
    without : float
        Root mean square, over all tensors as the function sees them, of the relative distance to
        the reference without a map.
    best : float, optional
        The same with the best map; None where the streams were equal from the start.
    failed : bool
        Whether no map could be computed.
    stream : StreamMap, optional
        The map that is applied.
    """

    model: str
    kind: str
    taken: int = 0
    rounds: int = 1
    without: float = 0.0
    best: float | None = None
    stream: StreamMap | None = field(default=None, compare=False, repr=False)
    failed: bool = False

    @cached_property
    def motion(self) -> Motion | None:
        """How far the map that is applied moves the stream; takes an eigenvalue decomposition."""
        return None if self.stream is None else stream_motion(self.stream)

    def __str__(self) -> str:
        if self.failed:
            return "residual stream left as it is"
        if self.best is None:
            return "residual stream equal to the reference's"
        if not self.taken:
            return (
                f"residual stream left as it is (relative distance of all tensors "
                f"{self.without:.4g}, {self.best:.4g} with the best {self.kind} map)"
            )
        article = {"permutation": "a", "orthogonal": "an"}[self.kind]
        which = f", round {self.taken} of {self.rounds}" if self.rounds > 1 else ""
        return (
            f"residual stream moved by {article} {self.kind} map{which} (relative distance "
            f"of all tensors {self.without:.4g} without, {self.best:.4g} with it)"
        )


@dataclass(frozen=True)
class Unsolved:
    """A block or layer that was not aligned.

    Attributes
    ----------
    model, reference : str
    place : str
        Label of the layer, with the block if the others are aligned.
    reason : str
    """

    model: str
    reference: str
    place: str
    reason: str


@dataclass(frozen=True)
class Foreseen:
    """A block that a merge would align as a part of its whole model.

    Attributes
    ----------
    model, reference : str
    layer : str
        Label of the layer in the output.
    layers : (int, int)
        The layer of the reference, and that of the other model.
    spec : BlockSpec
    """

    model: str
    reference: str
    layer: str
    layers: tuple[int, int]
    spec: Any


@dataclass
class Run:
    """State of one ``rotation_*`` merge.

    Attributes
    ----------
    config : MergeConfiguration, optional
        Of a merge that mergekit runs from beginning to end.
    """

    config: Any = None
    out_path: str | None = None
    records: list[Record] = field(default_factory=list)
    streams: dict[str, StreamRecord] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    #: by model, what had to stay as it was, and why
    left: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    #: whether somebody calls `warn_of_left` at the end
    ends: bool = True
    unsolved: list[Unsolved] = field(default_factory=list)
    writer: Any = None
    #: whether nothing is to be solved or written, and no weights are read; see `rehearsed`
    dry: bool = False
    foreseen: list[Foreseen] = field(default_factory=list)
    #: where whole models are aligned: the solver that would be used for each
    solvers: dict[str, Any] = field(default_factory=dict)
    _begun: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def record(self, entry: Record) -> None:
        """Add what a solve did; called from any thread. Warn once per model of a scaling."""
        with self._lock:
            first = entry.scaled and not any(
                known.scaled for known in self.records if known.model == entry.model
            )
            self.records.append(entry)
        if first:
            text = (
                f"{entry.block} of {entry.layer} differ from the reference's only by an "
                "invertible map that is not orthogonal; set align_scale: true to undo it"
            )
            self.note(entry.model, text)
            LOG.warning("%s: %s", entry.model, text)
        if entry.left:
            self.leave(entry.model, f"{entry.block} of {entry.layer}", entry.left)

    def record_stream(self, entry: StreamRecord) -> None:
        """Add what was done to the residual stream of a model, and a remark on it."""
        self.streams[entry.model] = entry
        self.note(entry.model, str(entry))

    def leave(self, model: str, place: str, reason: str = FAILED) -> None:
        """Remember what had to stay as it was; called from any thread."""
        with self._lock:
            self.left.setdefault(model, []).append((place, reason))
        if not self.ends:
            self.warn_of_left()
            self.left.clear()

    def warn_of_left(self) -> None:
        """Say once per model and reason what had to stay as it was."""
        for model, left in self.left.items():
            for reason in dict.fromkeys(reason for _, reason in left):
                places = ", ".join(place for place, why in left if why == reason)
                LOG.warning("%s: %s: %s", model, reason, places)

    def note(self, model: str, text: str) -> None:
        """Add a remark on a model to the summary."""
        self.notes.setdefault(model, []).append(text)

    def begin_output(self, out_path: str, inputs: list[str]) -> None:
        """Make sure that no older model stays beside the weights that are about to be written.

        The configuration goes first: without it the rest passes for no model, whenever the
        process may be killed. mergekit writes it last, when weights and index are complete.

        Raises
        ------
        RotationError
            If the output folder is one of the inputs, or cannot be written to.
        """
        refuse_inputs(out_path, inputs)
        with folders(out_path, keep=not self.dry):
            if not os.access(out_path, os.W_OK | os.X_OK):
                raise RotationError(
                    f"{out_path} cannot be written to; choose another output folder"
                )
        if self.dry:
            return
        self.out_path = out_path
        self._begun = True
        self.remove_model()

    def discard_output(self) -> None:
        """After a failure, leave nothing that looks like a model.

        Weights whose configuration was written already are complete and stay.
        """
        threads = getattr(self.writer, "_executor", None)  # of --async-write
        if threads is not None:
            threads.shutdown(wait=True, cancel_futures=True)
        if self._begun and not self._complete():
            self.remove_model()

    def _complete(self) -> bool:
        """Tell whether there is a configuration, and not only the beginning of one."""
        assert self.out_path is not None
        try:
            with open(os.path.join(self.out_path, "config.json"), encoding="utf-8") as file:
                json.load(file)
        except (OSError, ValueError):
            return False
        return True

    def remove_model(self) -> None:
        """Remove configuration, weights and indices from the output folder, in this order."""
        assert self.out_path is not None
        for path in old_model(self.out_path):
            os.remove(path)

    def summary(self) -> list[str]:
        """Return the lines shown at the end of a merge."""
        lines = []
        for model in dict.fromkeys(record.model for record in self.records):
            mine = [record for record in self.records if record.model == model]
            scale = sum(record.scale for record in mine) or 1.0
            before = (sum(record.before for record in mine) / scale) ** 0.5
            after = (sum(record.after for record in mine) / scale) ** 0.5
            lines.append(
                f"{model} -> {mine[0].reference}: {layers_of(mine)}, "
                f"relative distance {before:.4g} -> {after:.4g}, {moves_of(mine)}, "
                f"{sum(record.seconds for record in mine):.1f} s"
            )
        lines += [f"{model}: {text}" for model, texts in self.notes.items() for text in texts]
        return lines


def refuse_inputs(out_path: str, inputs: Sequence[str]) -> None:
    """Refuse an output folder that is one of the inputs.

    Raises
    ------
    RotationError
    """
    for path in inputs:
        if os.path.exists(out_path) and os.path.exists(path):
            if os.path.samefile(out_path, path):
                raise RotationError(f"{out_path} is one of the inputs; write to another folder")


def moved_axes(transformation: Transformation) -> tuple[str, ...]:
    """Name the axes that a transformation moves, as `Record.moved` has them."""
    marks = {Sign: "~", Linear: "^", Scale: "^"}
    return tuple(marks.get(type(e), "") + e.axis for e in transformation)


def condition(transformation: Transformation) -> float:
    """Return the largest condition number of the maps of a transformation."""
    result = 1.0
    for element in transformation:
        if isinstance(element, Linear):
            norms = [svd(x)[1].amax(-1) for x in (element.matrix, element.dual)]
            result = max(result, float((norms[0] * norms[1]).max()))
        elif isinstance(element, Scale):
            result = max(result, float(element.factor.max() / element.factor.min()))
    return result


_WORDS = {
    "kv": "heads reordered",
    "g": "query heads reordered",
    "qk": "queries and keys rotated",
    "vo": "values and outputs rotated",
    "x": "experts reordered",
    "f": "neurons reordered",
    "~f": "neurons sign-flipped",
    "^qk": "queries and keys scaled",
    "^vo": "values and outputs scaled",
    "^f": "neurons scaled",
}


def layers_of(records: Sequence[Record]) -> str:
    """Say how many layers there are, and what only some of them have."""
    layers = len({record.layer for record in records})
    count = Counter(block for _, block in dict.fromkeys((r.layer, r.block) for r in records))
    some = [f"{block} in {number}" for block, number in count.items() if number < layers]
    return f"{layers} layers" + (f" ({', '.join(some)})" if some else "")


def moves_of(records: Sequence[Record]) -> str:
    """Say what was moved, and in how many layers."""
    layers = len({record.layer for record in records})
    count = Counter(axis for _, axis in {(r.layer, axis) for r in records for axis in r.moved})
    if not count:
        return "nothing had to move"
    words = [f"{_WORDS[axis]} in {count[axis]}/{layers}" for axis in _WORDS if count[axis]]
    largest = max(record.condition for record in records)
    if largest > 1:
        words.append(f"condition numbers up to {largest:.3g}")
    gap = max((m.gap or 0.0 for record in records for m in record.orders), default=0.0)
    if gap > 0:
        words.append(f"order of neurons within {gap:.2g} of the best")
    return ", ".join(words)


def old_model(folder: str) -> list[str]:
    """Return the files in an output folder that are removed before a merge writes to it."""
    patterns = ("config.json", *_WEIGHTS)
    return [path for p in patterns for path in glob.glob(os.path.join(glob.escape(folder), p))]


@contextmanager
def folders(path: str, keep: bool) -> Iterator[None]:
    """Make a folder, with all above it; where it is not kept, remove those that were not there."""
    missing = []
    above = os.path.abspath(path)
    while not os.path.lexists(above):
        missing.append(above)
        above = os.path.dirname(above)
    try:
        os.makedirs(path, exist_ok=True)
        yield
    finally:
        for folder in () if keep else missing:
            if os.path.isdir(folder):
                os.rmdir(folder)


_current = Run()
_dry = ContextVar("_dry", default=False)


@contextmanager
def rehearsed() -> Iterator[None]:
    """Let runs that start in here be dry: all is checked, nothing solved, read or written."""
    token = _dry.set(True)
    try:
        yield
    finally:
        _dry.reset(token)


def start(config: Any = None, ends: bool = True) -> Run:
    """Begin a new run."""
    global _current
    _current = Run(config, ends=ends, dry=_dry.get())
    return _current


def current() -> Run:
    """Return the run in progress (or the last one)."""
    return _current
