"""The tasks that align: load a leg, move a block of a layer, gather what was moved."""

import time
from collections.abc import Mapping

import torch
from mergekit.common import ModelReference, dtype_from_name
from mergekit.graph import Task
from mergekit.io.tasks import GatherTensors, LoadTensor, ReturnTensor
from pydantic import BaseModel

from mergekit_rotation.graph import run
from mergekit_rotation.graph.block import BlockSpec
from mergekit_rotation.graph.checkpoints import FLOATING
from mergekit_rotation.graph.errors import RotationError, is_out_of_memory, one_line
from mergekit_rotation.graph.motion import orders
from mergekit_rotation.symmetry import (
    Squares,
    Transformation,
    all_finite,
    full_precision,
    product_dtype,
    squares,
    working_dtype,
)

Tensors = Mapping[str, torch.Tensor]


class CheckedLoad(LoadTensor):
    """Load a tensor as mergekit does, and refuse what must not be merged.

    Attributes
    ----------
    label : str, optional
        Overrides the group label, so that all legs of a layer are read one after the other
        whatever the checkpoint calls them.
    leg : bool
        Whether a symmetry acts on it, so that it has to be floating point.
    """

    label: str | None = None
    leg: bool = False

    def group_label(self) -> str | None:
        return self.label if self.label is not None else super().group_label()

    def execute(self) -> torch.Tensor | None:
        try:
            x = super().execute()
        except Exception as problem:
            if is_out_of_memory(problem):
                raise
            raise RotationError(
                f"{self.model}: cannot read {self.tensor} ({one_line(problem)}); "
                "fetch the model again"
            ) from problem
        if x is None:
            return None
        if (self.leg or x.is_floating_point()) and x.dtype not in FLOATING.values():
            raise RotationError(
                f"{self.model}: {self.tensor} has dtype {str(x.dtype).removeprefix('torch.')}, "
                "which cannot be aligned or merged; use the unquantised model"
            )
        if x.is_floating_point() and not x.is_meta and not all_finite(x):
            raise RotationError(
                f"{self.model}: {self.tensor} holds NaN or Inf; the model is damaged, "
                "fetch or train it again"
            )
        return x


class Leg(BaseModel, frozen=True):
    """One tensor of a block in the reference and in the other model."""

    name: str
    reference: CheckedLoad
    other: CheckedLoad
    dtype: str | None = None


class AlignBlock(Task[dict[str, torch.Tensor]]):
    """Move one block (attention or neurons) of one layer to the reference.

    Returns the moved tensors by leg name, cast once to the dtype that the merge asks for. Where
    the other model's block equals the reference's, or nothing improves, the tensors that were
    loaded are handed on as they are.
    """

    spec: BlockSpec
    layer: str
    layers: tuple[int, int]
    label: str | None
    legs: tuple[Leg, ...]

    def __hash__(self) -> int:  # planning asks often, and what tells blocks apart is short
        return hash((self.layer, self.layers, self.spec.kind, self.legs[0].other.model))

    def arguments(self) -> dict[str, Task]:
        loads: dict[str, Task] = {f"reference:{leg.name}": leg.reference for leg in self.legs}
        return loads | {f"other:{leg.name}": leg.other for leg in self.legs}

    def group_label(self) -> str | None:
        return self.label

    def uses_accelerator(self) -> bool:
        return True

    def execute(self, **kwargs: torch.Tensor | None) -> dict[str, torch.Tensor]:
        start = time.perf_counter()
        reference = self._side("reference", kwargs)
        other = self._side("other", kwargs)
        with torch.no_grad(), full_precision():
            same = all(torch.equal(reference[n], other[n]) for n in reference if n in other)
            apart = self._compare(reference, other)
            before = sum(one.apart for one in apart.values())
            scale = sum(one.first for one in apart.values())
            solved = () if same else self._solve(reference, other, apart)
            transformation = solved or ()
            moved, after = self._move(transformation, reference, other, apart)
            overflows = not all(all_finite(x) for name, x in moved.items() if x is not other[name])
            if overflows or after > before:  # nothing may get worse, not even by rounding
                transformation = ()
                moved, after = self._move(transformation, reference, other, apart)
        record = run.Record(
            model=str(self.legs[0].other.model),
            reference=str(self.legs[0].reference.model),
            block=self.spec.kind,
            layer=self.layer,
            moved=run.moved_axes(transformation),
            before=before,
            after=after,
            scale=scale,
            seconds=time.perf_counter() - start,
            condition=run.condition(transformation),
            scaled=not same and self.spec.scaled_apart(reference, other, after, scale),
            left=run.FAILED if solved is None else run.OVERFLOW if overflows else "",
            layers=self.layers,
            orders=orders(transformation, self.spec.orders()),
        )
        run.current().record(record)
        return moved

    def outline(self, **kwargs: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Return what `execute` does, of tensors on the meta device; shapes are checked."""
        self._side("reference", kwargs)
        dtypes = {leg.name: dtype_from_name(leg.dtype) for leg in self.legs}
        return {
            name: torch.empty_like(tensor, dtype=dtypes[name])
            for name, tensor in self._side("other", kwargs).items()
        }

    def _side(
        self, side: str, values: Mapping[str, torch.Tensor | None]
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of one model by leg name, without those that it lacks."""
        result = {}
        for leg in self.legs:
            tensor = values[f"{side}:{leg.name}"]
            if tensor is not None:
                load = leg.reference if side == "reference" else leg.other
                check_shape(tensor, load, self.spec.pattern(leg.name).shape(dict(self.spec.sizes)))
                result[leg.name] = tensor
        return result

    def _compare(self, reference: Tensors, other: Tensors) -> dict[str, Squares]:
        """Return squares and distances of the legs that both models have, as they are seen."""
        return {
            leg.name: self._squares(leg.name, reference[leg.name], other[leg.name])
            for leg in self.legs
            if leg.name in reference and leg.name in other
        }

    def _squares(self, name: str, fixed: torch.Tensor, tensor: torch.Tensor) -> Squares:
        return squares(self.spec.seen(name, fixed), self.spec.seen(name, tensor))

    def _solve(
        self, reference: Tensors, other: Tensors, apart: Mapping[str, Squares]
    ) -> Transformation | None:
        stored = next(
            dtype_from_name(leg.dtype) or other[leg.name].dtype
            for leg in self.legs
            if leg.name in other
        )
        where = f"{self.legs[0].other.model}: {self.spec.kind} of {self.layer}"
        alone = [x for side in (reference, other) for n, x in side.items() if n not in apart]
        work = working_dtype(product_dtype(*alone), *(one.work for one in apart.values()))
        return self.spec.solve(reference, other, stored, where, work)

    def _move(
        self,
        transformation: Transformation,
        reference: Tensors,
        other: Tensors,
        apart: Mapping[str, Squares],
    ) -> tuple[dict[str, torch.Tensor], float]:
        """Return the moved tensors, and their squared distance from the reference."""
        moved: dict[str, torch.Tensor] = {}
        after = 0.0
        for leg in self.legs:
            if leg.name not in other:
                continue
            tensor = other[leg.name]
            image = self.spec.move(transformation, leg.name, tensor)
            moved[leg.name] = image.to(dtype_from_name(leg.dtype) or tensor.dtype)
            if leg.name in apart:
                known = apart[leg.name]
                if image is not tensor:
                    known = self._squares(leg.name, reference[leg.name], image)
                after += known.apart
        return moved, after


def check_shape(tensor: torch.Tensor, load: LoadTensor, expected: tuple[int, ...]) -> None:
    """Refuse a tensor that does not have the shape that its model's configuration demands.

    Raises
    ------
    RotationError
    """
    if tuple(tensor.shape) != expected:
        raise RotationError(
            f"{load.model}: {load.tensor} has shape {tuple(tensor.shape)} where its "
            f"config demands {expected}; repair the model"
        )


class Input(BaseModel, frozen=True):
    """One input of a gathering: a task, and the leg to take from its result if it aligns."""

    model: ModelReference
    task: Task
    leg: str | None = None
    dtype: str | None = None


class GatherAligned(GatherTensors):
    """`GatherTensors` whose inputs may have been moved."""

    inputs: tuple[Input, ...]
    label: str | None = None
    after: tuple[AlignBlock, ...] = ()

    def arguments(self) -> dict[str, Task]:
        inputs = {str(position): entry.task for position, entry in enumerate(self.inputs)}
        return inputs | _waiting(self.after)

    def group_label(self) -> str | None:
        return self.label

    def execute(self, **kwargs: object) -> dict[ModelReference, torch.Tensor]:
        result = {}
        for position, entry in enumerate(self.inputs):
            value = kwargs[str(position)]
            if entry.leg is not None:
                assert isinstance(value, dict)
                value = value.get(entry.leg)
            if value is None:
                continue
            assert isinstance(value, torch.Tensor)
            dtype = dtype_from_name(entry.dtype)
            result[entry.model] = value if dtype in (None, value.dtype) else value.to(dtype)
        return result


class GatherChecked(GatherTensors):
    """`GatherTensors` that refuses damaged inputs."""

    after: tuple[AlignBlock, ...] = ()

    def loads(self) -> dict[str, CheckedLoad]:
        """Return the loads of the inputs by argument name."""
        stock = super().arguments()
        return {key: checked(load) for key, load in stock.items() if isinstance(load, LoadTensor)}

    def arguments(self) -> dict[str, Task]:
        return {**self.loads(), **_waiting(self.after)}

    def group_label(self) -> str | None:
        return max(load.group_label() or "" for load in self.loads().values())


class ReturnMerged(ReturnTensor):
    """`ReturnTensor` that accepts what mergekit plans: a tensor, or None where there is none."""

    tensor_task: Task

    def execute(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else super().execute(tensor)


def _waiting(blocks: tuple[AlignBlock, ...]) -> dict[str, Task]:
    """Arguments that are only waited for.

    Tensors that mergekit would merge after the first tensor of a block must wait for the block,
    so that everything is merged in mergekit's order: random methods draw from one stream.
    """
    return {f"after:{position}": block for position, block in enumerate(blocks)}


def checked(load: LoadTensor, **changes: object) -> CheckedLoad:
    """Return the checked twin of one of mergekit's loads."""
    fields = {name: getattr(load, name) for name in LoadTensor.model_fields}
    return CheckedLoad(**{**fields, **changes})
