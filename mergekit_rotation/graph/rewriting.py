"""Replacing the inputs of planned tasks by tasks that move them."""

from dataclasses import replace
from typing import Any

from mergekit.architecture import WeightInfo
from mergekit.common import ModelReference
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask

from mergekit_rotation.architecture import Block
from mergekit_rotation.graph import parameters
from mergekit_rotation.graph.block import BlockSpec
from mergekit_rotation.graph.errors import RotationError
from mergekit_rotation.graph.layer import rewrap, unwrap
from mergekit_rotation.graph.moving import Move, MoveTensor
from mergekit_rotation.graph.output import Output, OutputLayer, Solution
from mergekit_rotation.graph.reading import ModelTensors
from mergekit_rotation.graph.sides import OUTER, layout_for
from mergekit_rotation.graph.tasks import CheckedLoad, GatherAligned, Input, checked
from mergekit_rotation.symmetry import ModelTransformation, Transformation, moves


class Rewriter:
    """Rewriting of the planned tensors of one merge.

    Parameters
    ----------
    output : Output
    settings : parameters.WholeModel
    solution : Solution
    """

    def __init__(self, output: Output, settings: parameters.WholeModel, solution: Solution):
        self.output = output
        self.settings = settings
        self.solution = solution

    def rewrite(
        self,
        weight: WeightInfo,
        task: ExecuteMergeMethodTask,
    ) -> ExecuteMergeMethodTask:
        """Return a planned task with its inputs moved; the task itself if none has to be."""
        gather = unwrap(task)
        label = str(gather.group_label())
        layer, template = self.output.locate(weight.name)
        stock = {load.model: load for load in gather.arguments().values()}
        inputs, anything = [], False
        for model, info in gather.weight_info.items():
            dtype = info.force_dtype or gather.dtype
            move = self._moving(model, template, layer, label, dtype)
            anything = anything or move is not None
            inputs.append(Input(model=model, task=move or checked(stock[model], label=label)))
        if not anything:
            return task
        aligned = GatherAligned(
            weight_info=gather.weight_info,
            dtype=gather.dtype,
            device=gather.device,
            inputs=tuple(inputs),
            label=label,
        )
        return rewrap(task, aligned)

    def _moving(
        self,
        model: ModelReference,
        template: str | None,
        layer: OutputLayer | None,
        label: str,
        dtype: str | None,
    ) -> MoveTensor | None:
        """Return the task that moves one input, or None where it is taken as it is."""
        use = self.output.uses.get(model)
        if use is None:
            raise RotationError(
                f"{model}: the output takes tensors outside of the layers from it, but none of its "
                "layers, so it cannot be aligned; correct its layer_range or remove the slice"
            )
        transformation = self.solution.transformations.get(use.solved_for)
        if transformation is None and use.task_base is None:  # the reference, or left unaligned
            return None
        if template is None:
            if use.task_base is None:
                return None
            raise RotationError(
                f"{model}: align_task_base: a tensor ({label}) that the family does not know"
            )
        own = self.output.tensors(model)
        index = None if layer is None else layer.indices[model]
        pair = OUTER if layer is None else self._pair(layer, model)
        move = self.move(template, pair, own, transformation)
        if move is None and use.task_base is None:
            return None
        if move is None:
            move = Move(template, own.stream.layout, None, None, (), {})
        digest = self.solution.fingerprints.get(use.solved_for, {}).get((template, index))
        move = replace(move, fingerprint=digest if use.solved_for == model else None)
        more: dict[str, Any] = {}
        if use.task_base is not None:
            assert self.output.reference is not None
            at = None if layer is None else (pair or (index, index))[0]
            more["base"] = self._loads(self.output.tensors(use.task_base), move, index, label)
            more["reference"] = self.output.tensors(self.output.reference).load(template, at, label)
        return MoveTensor(
            model=model,
            move=move,
            own=self._loads(own, move, index, label),
            dtype=dtype,
            label=label,
            **more,
        )

    def move(
        self,
        template: str,
        pair: tuple[int, int] | None,
        own: ModelTensors,
        transformation: ModelTransformation | None,
    ) -> Move | None:
        """Return what a transformation does to one tensor, or None if nothing."""
        if transformation is None:
            return None
        spec: BlockSpec | None = None
        elements: Transformation = ()
        if pair is not None and pair != OUTER:
            for block in own.blocks(pair[1]):
                if template in block.layout.patterns:
                    elements = transformation.blocks.get((block.kind, *pair), ())
                    if moves(elements, block.layout.patterns[template]):
                        spec = plain_spec(block)
        inside = transformation.stream is not None and template in (
            *own.stream.layout.patterns,
            *own.reader_biases(),
        )
        if spec is None and not inside:
            return None
        targets = {
            norm: target
            for (norm, a, b), target in transformation.norms.items()
            if (a, b) == (pair or (None, None))
        }
        return Move(
            name=template,
            layout=layout_for(own, self.solution.templates),
            stream=transformation.stream if inside else None,
            spec=spec,
            transformation=elements if spec is not None else (),
            targets=targets,
        )

    @staticmethod
    def _loads(
        tensors: ModelTensors, move: Move, index: int | None, label: str
    ) -> tuple[tuple[str, CheckedLoad], ...]:
        loads = ((name, tensors.load(name, index, label)) for name in move.needed())
        return tuple((name, load) for name, load in loads if load is not None)

    def _pair(self, layer: OutputLayer, model: ModelReference) -> tuple[int, int] | None:
        """Return the layers of the reference and of a model whose alignment applies."""
        if self.settings.load is None:
            return self.output.layer_pair(layer, model)
        transformation = self.solution.transformations.get(self.output.uses[model].solved_for)
        own = layer.indices[model]
        known = {} if transformation is None else transformation.blocks
        found = {a for _, a, b in known if b == own}
        wanted = (
            layer.indices.get(self.output.reference) if self.output.reference is not None else None
        )
        if wanted is None and len(found) == 1:
            return found.pop(), own
        if wanted is None or not found:
            return None
        if wanted not in found:
            raise RotationError(
                f"align_load: {self.settings.load} pairs layer {own} of {model} with layer "
                f"{found.pop()} of the reference, not with {wanted}; solve again"
            )
        return wanted, own


def plain_spec(block: Block) -> BlockSpec:
    """Return a block for applying transformations, with its legs named by template."""
    layout = block.layout
    patterns = tuple((name, pattern.text) for name, pattern in layout.patterns.items())
    return BlockSpec(kind=block.kind, patterns=patterns, sizes=tuple(layout.sizes.items()))
