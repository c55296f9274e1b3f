"""Applying a solved transformation to tensors as they stream by."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from mergekit.common import ModelReference, dtype_from_name
from mergekit.graph import Task
from pydantic import ConfigDict

from mergekit_rotation.graph.block import BlockSpec
from mergekit_rotation.graph.errors import RotationError
from mergekit_rotation.graph.tasks import CheckedLoad
from mergekit_rotation.symmetry import (
    STREAM_AXES,
    Norm,
    StreamLayout,
    StreamMap,
    SymmetryError,
    Transformation,
    all_finite,
    full_precision,
    into_stream,
    out_of_stream,
    target_norm,
    working_dtype,
)

Tensors = Mapping[str, torch.Tensor]
#: rows of an embedding that are held in the working dtype at a time
ROWS = 1 << 12
#: digests of the tensors of one model: (template, layer or None) to digest
Fingerprints = dict[tuple[str, int | None], str]
_SAMPLE = 1024


def fingerprint(tensor: torch.Tensor) -> str:
    """Return a short digest of a tensor: shape, dtype and up to 1024 evenly spaced entries."""
    flat = tensor.detach().reshape(-1)
    sample = flat[:: max(1, len(flat) // _SAMPLE)][:_SAMPLE].cpu().contiguous()
    digest = hashlib.blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=12)
    digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def moved_tensors(
    tensors: Tensors,
    names: Sequence[str],
    layout: StreamLayout,
    stream: StreamMap | None,
    spec: BlockSpec | None,
    transformation: Transformation,
    targets: Mapping[str, Norm],
) -> dict[str, torch.Tensor]:
    """Return tensors of a model in other coordinates: the stream first, then heads and neurons.

    Parameters
    ----------
    tensors : mapping of template to Tensor
        In the working dtype, with all that `StreamLayout.needed` names.
    names : sequence of str
        The tensors to return.
    layout : StreamLayout
    stream : StreamMap, optional
    spec : BlockSpec, optional
        The block whose legs ``transformation`` moves.
    transformation : Transformation
    targets : mapping of norm weight to Norm
        A norm without an entry gets coordinates of its own (`target_norm`).
    """
    if stream is None:
        return {n: spec.move(transformation, n, tensors[n]) if spec else tensors[n] for n in names}
    inside = [name for name in layout.needed(names) if name in tensors]
    moved = into_stream(tensors, inside, layout, stream)
    if spec is not None:
        moved = spec.move_legs(transformation, moved)
    norms = {layout.norm_of(name) for name in names} - {None, *targets}
    own = {n: target_norm(layout.norm(n, tensors), None, stream) for n in norms if n is not None}
    return out_of_stream(moved, tensors, names, layout, stream, {**targets, **own})


@dataclass(frozen=True, eq=False)
class Move:
    """How one tensor of one model is moved.

    Attributes
    ----------
    name : str
        Its template.
    layout, stream, spec, transformation, targets
        See `moved_tensors`.
    fingerprint : str, optional
        What the tensor has to be, if the transformation was loaded.
    """

    name: str
    layout: StreamLayout
    stream: StreamMap | None
    spec: BlockSpec | None
    transformation: Transformation
    targets: Mapping[str, Norm]
    fingerprint: str | None = None

    def needed(self) -> list[str]:
        """Return the templates of all tensors that are read for it, itself first."""
        return self.layout.needed([self.name]) if self.stream is not None else [self.name]

    def __call__(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """Return the moved tensor in the given dtype, an embedding a few rows at a time."""
        x = tensors[self.name]
        if not x.is_floating_point():
            return x
        work = working_dtype(x.dtype, dtype)
        extras = {n: t.to(work) for n, t in tensors.items() if n != self.name}
        if not self._splits(x):
            return self._apply({**extras, self.name: x}, work).to(dtype)
        result = torch.empty(x.shape, dtype=dtype, device=x.device)
        for part, target in zip(x.split(ROWS), result.split(ROWS), strict=True):
            target.copy_(self._apply({**extras, self.name: part}, work))
        return result

    def _apply(self, tensors: Tensors, work: torch.dtype) -> torch.Tensor:
        raised = {name: x.to(work) for name, x in tensors.items()}
        arguments = (self.layout, self.stream, self.spec, self.transformation, self.targets)
        return moved_tensors(raised, [self.name], *arguments)[self.name]

    def _splits(self, x: torch.Tensor) -> bool:
        """Tell whether the rows of a tensor can be moved one by one."""
        pattern = self.layout.patterns.get(self.name)
        if pattern is None or self.spec is not None or len(x) <= ROWS:
            return False
        return not any(pattern.dim_of(axis) == 0 for axis in STREAM_AXES)


class MoveTensor(Task[torch.Tensor | None]):
    """Move one tensor; with a task base, return reference + moved(own) - moved(base).

    Attributes
    ----------
    model : ModelReference
    move : Move
    own, base : tuple of (template, CheckedLoad)
        What `Move.needed` names, of the model and of its task base.
    reference : CheckedLoad, optional
        The reference's tensor, with a task base.
    dtype : str, optional
        That of the result; by default the model's.
    label : str
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    model: ModelReference
    move: Move
    own: tuple[tuple[str, CheckedLoad], ...]
    base: tuple[tuple[str, CheckedLoad], ...] = ()
    reference: CheckedLoad | None = None
    dtype: str | None = None
    label: str

    def arguments(self) -> dict[str, Task]:
        loads: dict[str, Task] = {f"own:{name}": load for name, load in self.own}
        loads |= {f"base:{name}": load for name, load in self.base}
        return loads | ({"reference": self.reference} if self.reference is not None else {})

    def group_label(self) -> str | None:
        return self.label

    def uses_accelerator(self) -> bool:
        return True

    def execute(self, **kwargs: torch.Tensor | None) -> torch.Tensor | None:
        own = self._side("own", kwargs)
        x = own.get(self.move.name)
        if x is None:
            return None
        found = self.move.fingerprint
        if found is not None and found != fingerprint(x):
            raise RotationError(
                f"{self.model}: {self.move.name} is not the tensor that the loaded transformation "
                "was solved for; solve again, or set align_load_unchecked: true"
            )
        dtype = dtype_from_name(self.dtype) or x.dtype
        try:
            with torch.no_grad(), full_precision():
                if not self.base:
                    moved = self.move(own, dtype)
                else:
                    base = self._side("base", kwargs)
                    moved = self._carried(own, base, kwargs["reference"], dtype)
        except SymmetryError as problem:
            raise RotationError(
                f"{self.model}: {self.move.name}: {problem}; set align_residual: permutation"
            ) from problem
        if moved.is_floating_point() and not all_finite(moved):
            raise RotationError(
                f"{self.model}: {self.move.name} exceeds the range of "
                f"{str(dtype).removeprefix('torch.')} in the coordinates "
                "of the reference; set dtype: bfloat16 or float32"
            )
        return moved

    def outline(self, **kwargs: torch.Tensor | None) -> torch.Tensor | None:
        """Return what `execute` does, of tensors on the meta device; shapes are checked."""
        x = self._side("own", kwargs).get(self.move.name)
        if x is None:
            return None
        if self.base and x.is_floating_point():
            before = self._side("base", kwargs).get(self.move.name)
            self._check_carried(x, before, kwargs["reference"])
        return torch.empty_like(x, dtype=dtype_from_name(self.dtype))

    def _side(
        self, side: str, values: Mapping[str, torch.Tensor | None]
    ) -> dict[str, torch.Tensor]:
        loads = self.own if side == "own" else self.base
        found = {name: values[f"{side}:{name}"] for name, _ in loads}
        return {name: x for name, x in found.items() if x is not None}

    def _carried(
        self, own: Tensors, base: Tensors, reference: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the reference plus what the model learnt after its task base."""
        x, before = own[self.move.name], base.get(self.move.name)
        if not x.is_floating_point():
            return x
        self._check_carried(x, before, reference)
        assert before is not None and reference is not None
        if torch.equal(x, before) and all(torch.equal(own[n], base[n]) for n in own if n in base):
            return reference.to(dtype)
        work = working_dtype(x.dtype, before.dtype, reference.dtype)
        result = reference.to(work) + (self.move(own, work) - self.move(base, work))
        return result.to(dtype)

    def _check_carried(
        self, x: torch.Tensor, before: torch.Tensor | None, reference: torch.Tensor | None
    ) -> None:
        """Refuse a difference of tensors of several shapes."""
        if before is None or reference is None or not x.shape == before.shape == reference.shape:
            shapes = [None if t is None else tuple(t.shape) for t in (x, before, reference)]
            raise RotationError(
                f"{self.model}: {self.move.name} has shape {shapes[0]}, {shapes[1]} in its "
                f"align_task_base and {shapes[2]} in the reference; all three must be equal"
            )
