"""The schedule of a planned merge, run on tensors without values.

mergekit's own tasks run in mergekit's own order, on the meta device; only what needs values is
replaced: a block that would be solved returns tensors of the right shapes, and a merge method or a
change of vocabulary runs on small stand-ins. So what they refuse is refused here, and at every step
it is known which tensors the merge holds.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from mergekit.graph import Executor, Task
from mergekit.io.tasks import (
    FinalizeModel,
    GatherTensors,
    LoadTensor,
    SaveTensor,
    TensorWriterTask,
)
from mergekit.io.tensor_writer import TensorWriter
from mergekit.merge_methods.base import TensorEntry, TensorGroup, TensorMetadata
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.options import MergeOptions
from mergekit.tokenizer import BuildTokenizer, PermutedVocabulary
from mergekit.tokenizer.build import TokenizerInfo
from mergekit.tokenizer.truncate import TruncatedVocabulary
from torch.utils._pytree import tree_leaves

from mergekit_rotation.graph.moving import ROWS, MoveTensor
from mergekit_rotation.graph.tasks import AlignBlock
from mergekit_rotation.insight.headers import HeaderLoaders, Shard
from mergekit_rotation.insight.workspace import Allocations, Cost, block_cost

#: largest extent of the stand-ins that merge methods run on
_SMALL = 32


@dataclass
class Usage:
    """What a merge holds, reads, writes and computes.

    Attributes
    ----------
    held, mapped : int
        Bytes at the worst moment: of tensors, and of mapped files, which the system can drop.
    most : int
        The largest sum of both where full assignments are solved.
    device : int
        Bytes on the accelerator at its worst moment.
    read, written : int
        Bytes of weights.
    shards : int
        Files that are written.
    costs : list of Cost
        Of every step.
    merged : float
        Bytes that merge methods make, temporaries included.
    tensors : dict of str to Tensor
        What is written, without values.
    tokenizer : object, optional
        The one that the merge would make.
    """

    held: int = 0
    mapped: int = 0
    most: int = 0
    device: int = 0
    read: int = 0
    written: int = 0
    shards: int = 0
    costs: list[Cost] = field(default_factory=list)
    merged: float = 0.0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    tokenizer: Any = None

    def note(self, held: int, mapped: int, more: int = 0) -> None:
        """Take note of a moment; ``more`` is what full assignments would add."""
        if held + mapped > self.held + self.mapped:
            self.held, self.mapped = held, mapped
        self.most = max(self.most, held + mapped + more)


class _Writer(TensorWriter):
    """Distributes tensors to shards as mergekit does, and writes none."""

    def __init__(self, options: MergeOptions, usage: Usage, folder: str):
        super().__init__(folder, options.out_shard_size, options.safe_serialization)
        self.usage = usage
        self.pending: deque[int] = deque(maxlen=options.write_threads if options.async_write else 0)

    def save_tensor(self, name: str, tensor: torch.Tensor, clone: bool = False) -> None:
        self.usage.tensors[name] = tensor
        super().save_tensor(name, tensor, clone)

    def _write_shard_task(
        self, shard_data: dict[str, torch.Tensor], shard_index: int, shard_path: str
    ) -> None:
        size = sum(x.nbytes for x in shard_data.values())
        self.usage.shards += 1
        self.usage.written += size
        self.pending.append(size)

    def finalize(self) -> None:
        self._flush_current_shard()


class Rehearsal:
    """One run of a schedule without values.

    Parameters
    ----------
    executor : Executor
        With the schedule of the merge.
    options : MergeOptions
        Those of the merge.
    loaders : HeaderLoaders
    folder : str
        An empty one, for mergekit's writer.
    """

    def __init__(self, executor: Any, options: MergeOptions, loaders: HeaderLoaders, folder: str):
        schedule = executor.schedule if isinstance(executor, Executor) else executor.serial_schedule
        self.handles = schedule.tasks
        self.last: Mapping[Any, int] = schedule.last_use_index
        self.loaders, self.options = loaders, options
        self.on_device = torch.device(options.device or "cpu").type != "cpu"
        self.stays_there = self.on_device and options.low_cpu_memory
        self.usage = Usage()
        self.writer = _Writer(options, self.usage, folder)
        self._vocabularies: dict[Any, dict[Any, torch.Size]] = {}

    def run(self) -> Usage:
        """Return what the merge takes.

        Raises
        ------
        Exception
            What the merge would end with, as it would raise it.
        """
        for loader in self.loaders.values():
            loader.flush()
            loader.bytes = 0
        values: dict[Any, Any] = {}
        ends: dict[int, list[Any]] = {}
        for handle, index in self.last.items():
            ends.setdefault(index, []).append(handle)
        for index, handle in enumerate(self.handles):
            arguments = {name: values.get(dep) for name, dep in handle.arguments().items()}
            result, cost = self._outlined(handle.task(), arguments)
            if result is not None:
                values[handle] = result
            self._note(handle.task(), values, arguments, result, cost)
            for expired in ends.get(index, ()):
                values.pop(expired, None)
        self.usage.read = sum(loader.bytes for loader in self.loaders.values())
        return self.usage

    def _note(
        self, task: Task, values: Mapping[Any, Any], arguments: Any, result: Any, cost: Cost
    ) -> None:
        """Take note of all that is held while a task runs."""
        self.usage.costs.append(cost)
        alive = _tensors([*values.values(), self.writer.current_shard])
        shards: set[Shard] = {x.shard for x in alive if hasattr(x, "shard")}
        shards |= {loader.shard for loader in self.loaders.values() if loader.shard is not None}
        mapped = sum(shard.resident for shard in shards if shard.mapped)
        held = sum(shard.resident for shard in shards if not shard.mapped)
        copied = self.options.read_to_gpu or self.stays_there
        own = sum(x.nbytes for x in alive if copied or not hasattr(x, "shard"))
        own += sum(self.writer.pending)
        local = task.uses_accelerator() and self.on_device
        if local:
            inputs = 0 if self.stays_there else _bytes(arguments)
            self.usage.device = max(
                self.usage.device,
                (own if self.stays_there else inputs + _bytes(result)) + cost.memory,
            )
        elif self.stays_there:
            self.usage.device = max(self.usage.device, own + cost.memory)
        held += 0 if self.stays_there else own
        held += 0 if local else cost.memory
        self.usage.note(held, mapped, 0 if local else cost.most - cost.memory)

    # -- one task -----------------------------------------------------------------------------

    def _outlined(self, task: Task, arguments: dict[str, Any]) -> tuple[Any, Cost]:
        """Return what a task returns, without values, and what it takes."""
        if isinstance(task, TensorWriterTask):
            return self.writer, Cost()
        if isinstance(task, BuildTokenizer):
            found = task.execute()
            self.usage.tokenizer = found.tokenizer
            return found, Cost()
        if isinstance(task, LoadTensor | GatherTensors | TruncatedVocabulary):
            return task.execute(**arguments), Cost(passes=_bytes(arguments) / 2)
        if isinstance(task, AlignBlock):
            dtypes = [x.dtype for x in arguments.values() if x is not None]
            moved = task.outline(**arguments)
            return moved, block_cost(task.spec, dtypes, _bytes(moved))
        if isinstance(task, MoveTensor):
            return task.outline(**arguments), self._moving_cost(task, arguments)
        if isinstance(task, PermutedVocabulary):
            return self._permuted(task, **arguments), Cost()
        if isinstance(task, ExecuteMergeMethodTask):
            return self._merged(task, **arguments)
        if isinstance(task, SaveTensor | FinalizeModel):
            task.execute(**arguments)
        return None, Cost()

    @staticmethod
    def _moving_cost(task: MoveTensor, arguments: Mapping[str, Any]) -> Cost:
        """A tensor is raised to the working precision, moved, and cast; a large one by rows."""
        x = arguments.get(f"own:{task.move.name}")
        if x is None:
            return Cost()
        stream = task.move.stream
        size = 0 if stream is None else x.shape[-1]
        return Cost(
            memory=min(4 * x.nbytes, 4 * ROWS * 4 * x.shape[-1]) if x.dim() else 0,
            passes=8.0 * x.nbytes,
            products=2.0 * x.numel() * size if not getattr(stream, "exact", True) else 0.0,
        )

    def _permuted(
        self, task: PermutedVocabulary, tokenizer_info: TokenizerInfo, tensors: dict[Any, Any]
    ) -> dict[Any, torch.Tensor]:
        """Bring vocabularies together, on tensors with one number per token."""
        axis = task.vocabulary_axis
        narrow = {
            model: torch.zeros([n if k == axis else 1 for k, n in enumerate(x.shape)])
            for model, x in tensors.items()
        }
        if not tensors:
            return {}
        key = (axis, *((model, x.shape) for model, x in narrow.items()))
        if key not in self._vocabularies:  # takes a while for every token
            found = task.execute(tokenizer_info, narrow)
            self._vocabularies[key] = {model: x.shape for model, x in found.items()}
        dtype = reduce(torch.promote_types, (x.dtype for x in tensors.values()))
        result = {}
        for model, shape in self._vocabularies[key].items():
            whole = [shape[k] if k == axis else n for k, n in enumerate(tensors[model].shape)]
            result[model] = torch.empty(whole, dtype=dtype, device="meta")
        return result

    def _merged(
        self, task: ExecuteMergeMethodTask, tensors: dict[Any, torch.Tensor]
    ) -> tuple[torch.Tensor | None, Cost]:
        """Run the merge method on small tensors; its memory grows as the tensors do."""
        entries = tuple(
            TensorEntry(id=model, tensor=x, is_base=model == task.base_model)
            for model in task.model_order
            if (x := tensors.get(model)) is not None
        )
        floating = all(entry.tensor.is_floating_point() for entry in entries)
        if len(entries) > 1 and floating:  # first, so that its sentence has the true shapes
            metadata = TensorMetadata.from_weight_info(task.output_weight)
            TensorGroup(entries, metadata).validate_tensors()
        generator = torch.Generator().manual_seed(0)
        small = {model: _stand_in(x, generator) for model, x in tensors.items()}
        with torch.random.fork_rng(devices=[]), Allocations() as made:
            found = task.execute(small)
        if found is None:
            return None, Cost()
        for model, x in small.items():
            if x.untyped_storage().data_ptr() == found.untyped_storage().data_ptr():
                return tensors[model], Cost()
        first = entries[0].tensor
        ratio = first.numel() / max(1, small[entries[0].id].numel())
        result = torch.empty(first.shape, dtype=found.dtype, device="meta")
        self.usage.merged += ratio * made.peak
        return result, Cost(memory=max(0, int(ratio * made.peak) - result.nbytes))


def _stand_in(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    shape = [min(extent, _SMALL) for extent in x.shape]
    if not x.is_floating_point():
        return torch.zeros(shape, dtype=x.dtype)
    return torch.randn(shape, generator=generator).to(x.dtype)


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value, each once."""
    leaves = (x for x in tree_leaves(value) if isinstance(x, torch.Tensor))
    return list({id(x): x for x in leaves}.values())


def _bytes(value: Any) -> int:
    return sum(x.nbytes for x in _tensors(value))
