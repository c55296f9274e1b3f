"""The tasks that align: load a leg, move a block of a layer, gather what was moved."""

import time
from collections.abc import Mapping

import torch
from mergekit.common import ModelReference, dtype_from_name
from mergekit.graph import Task
from mergekit.io.tasks import GatherTensors, LoadTensor
from pydantic import BaseModel, ConfigDict

from mergekit_rotation.graph import run
from mergekit_rotation.graph.checkpoints import FLOATING
from mergekit_rotation.graph.errors import RotationError
from mergekit_rotation.symmetry import (
    AttentionLayout,
    Group,
    NeuronLayout,
    Pattern,
    Rotate,
    Sign,
    SymmetryError,
    Transformation,
    act,
    full_precision,
    moves,
    solve_attention,
    solve_neurons,
    working_dtype,
)


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
        x = super().execute()
        if x is None:
            return None
        if (self.leg or x.is_floating_point()) and x.dtype not in FLOATING.values():
            raise RotationError(
                f"{self.model}: {self.tensor} has dtype {str(x.dtype).removeprefix('torch.')}, "
                "which cannot be aligned or merged; use the unquantised model"
            )
        if x.is_floating_point() and not bool(torch.isfinite(x).all()):
            raise RotationError(
                f"{self.model}: {self.tensor} holds NaN or Inf; the model is damaged, "
                "fetch or train it again"
            )
        return x


class Leg(BaseModel, frozen=True):
    """One tensor of a block in the reference and in the other model."""

    name: str
    pattern: str
    reference: CheckedLoad
    other: CheckedLoad
    dtype: str | None = None


class AlignBlock(Task[dict[str, torch.Tensor]]):
    """Move one block (attention or neurons) of one layer to the reference.

    Returns the moved tensors by leg name, cast once to the dtype that the merge asks for. Where
    the other model's block equals the reference's, or nothing improves, the tensors that were
    loaded are handed on as they are.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    block: str
    layer: str
    label: str | None
    legs: tuple[Leg, ...]
    sizes: tuple[tuple[str, int], ...]
    query_key: Group | None = None
    value_output: Group | None = None
    use_query_key: bool = True
    use_value_output: bool = True
    use_heads: bool = True

    def arguments(self) -> dict[str, Task]:
        loads: dict[str, Task] = {f"reference:{leg.name}": leg.reference for leg in self.legs}
        return loads | {f"other:{leg.name}": leg.other for leg in self.legs}

    def group_label(self) -> str | None:
        return self.label

    def uses_accelerator(self) -> bool:
        return True

    def execute(self, **kwargs: torch.Tensor | None) -> dict[str, torch.Tensor]:
        start = time.perf_counter()
        reference, other = ({}, {})  # type: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
        for leg in self.legs:
            for side, load in ((reference, leg.reference), (other, leg.other)):
                key = "reference" if side is reference else "other"
                tensor = kwargs[f"{key}:{leg.name}"]
                if tensor is not None:
                    self._check_shape(leg, load, tensor)
                    side[leg.name] = tensor
        with torch.no_grad(), full_precision():
            moved, transformation, distances = self._align(reference, other)
        run.current().record(
            run.Record(
                model=str(self.legs[0].other.model),
                reference=str(self.legs[0].reference.model),
                block=self.block,
                layer=self.layer,
                moved=tuple(("~" if isinstance(e, Sign) else "") + e.axis for e in transformation),
                before=distances[0],
                after=distances[1],
                scale=distances[2],
                seconds=time.perf_counter() - start,
            )
        )
        return moved

    def _check_shape(self, leg: Leg, load: CheckedLoad, tensor: torch.Tensor) -> None:
        expected = Pattern.parse(leg.pattern).shape(dict(self.sizes))
        if tuple(tensor.shape) != expected:
            raise RotationError(
                f"{load.model}: {load.tensor} has shape {tuple(tensor.shape)} where its config "
                f"demands {expected}; repair the model"
            )

    def _align(
        self, reference: dict[str, torch.Tensor], other: dict[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], Transformation, tuple[float, float, float]]:
        patterns = {leg.name: Pattern.parse(leg.pattern) for leg in self.legs}
        sizes = dict(self.sizes)
        target = {leg.name: dtype_from_name(leg.dtype) for leg in self.legs}
        transformation: Transformation = ()
        common = [name for name in reference if name in other]
        if not all(torch.equal(reference[name], other[name]) for name in common):
            transformation = self._solve(reference, other, patterns, target)
        before = after = scale = 0.0
        moved = {}
        for name, tensor in other.items():
            a = reference.get(name)
            work = working_dtype(tensor.dtype, *([] if a is None else [a.dtype]))
            image = tensor
            if moves(transformation, patterns[name]):
                # Permutations and signs are exact in any dtype; only rotations need more.
                rotated = moves(
                    tuple(e for e in transformation if isinstance(e, Rotate)), patterns[name]
                )
                source = tensor.to(work) if rotated else tensor
                image = act(transformation, source, patterns[name], sizes)
            if a is not None:
                a = a.to(work)
                scale += float(a.square().sum())
                change = float((a - tensor.to(work)).square().sum())
                before += change
                after += change if image is tensor else float((a - image.to(work)).square().sum())
            dtype = target[name] or tensor.dtype
            moved[name] = image if image.dtype == dtype else image.to(dtype)
        if after > before:  # nothing may get worse, not even by rounding
            moved = {n: t if (d := target[n]) is None else t.to(d) for n, t in other.items()}
            return moved, (), (before, before, scale)
        return moved, transformation, (before, after, scale)

    def _solve(
        self,
        reference: Mapping[str, torch.Tensor],
        other: Mapping[str, torch.Tensor],
        patterns: Mapping[str, Pattern],
        target: Mapping[str, torch.dtype | None],
    ) -> Transformation:
        sizes = dict(self.sizes)
        try:
            if self.query_key is None or self.value_output is None:
                return solve_neurons(reference, other, NeuronLayout(patterns, sizes))
            layout = AttentionLayout(patterns, sizes, self.query_key, self.value_output)
            stored = next(target[name] or tensor.dtype for name, tensor in other.items())
            return solve_attention(
                reference,
                other,
                layout,
                query_key=self.use_query_key,
                value_output=self.use_value_output,
                heads=self.use_heads,
                stored=stored,
            )
        except SymmetryError as problem:
            raise RotationError(f"{self.legs[0].other.model}, {self.layer}: {problem}") from problem


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
