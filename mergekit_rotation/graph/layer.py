"""The tasks of one output layer: what is loaded, moved and handed to mergekit's method."""

from collections.abc import Mapping, Sequence
from typing import Any

from mergekit.architecture import WeightInfo
from mergekit.common import ModelReference
from mergekit.config import ConfigReader, InputSliceDefinition
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.tokenizer import PermutedVocabulary
from mergekit.tokenizer.truncate import TruncatedVocabulary

from mergekit_rotation.architecture import LAYER, Block, Family
from mergekit_rotation.graph import parameters, run
from mergekit_rotation.graph.block import BlockSpec
from mergekit_rotation.graph.context import Context
from mergekit_rotation.graph.errors import RotationError
from mergekit_rotation.graph.layout import (
    Unsupported,
    check_header,
    check_same_layout,
    present_blocks,
)
from mergekit_rotation.graph.tasks import (
    AlignBlock,
    CheckedLoad,
    GatherAligned,
    GatherChecked,
    Input,
    Leg,
)
from mergekit_rotation.symmetry import AttentionLayout, ExpertLayout

Entry = tuple[WeightInfo, ExecuteMergeMethodTask]


class LayerPlan:
    """Alignment of one output layer."""

    def __init__(
        self,
        context: Context,
        entries: Sequence[Entry],
        sources: Sequence[InputSliceDefinition],
        layer_offset: int,
        index: int,
        reader: ConfigReader,
        module_name: str,
    ):
        self.context = context
        self.entries = {weight.name: (weight, task) for weight, task in entries}
        self.order = list(entries)
        #: of everything that belongs to one output tensor: what stock would use
        self.labels = {weight.name: str(unwrap(task).group_label()) for weight, task in entries}
        self.sources = sources
        self.offset = layer_offset
        self.index = index
        self.reader = reader
        self.module = module_name
        self.name = f"{module_name}.{index}"
        definition = context.planner.arch_info.modules[module_name]
        self.prefix = definition.weight_prefix or ""

    def align(self, reference: ModelReference, others: Sequence[ModelReference]) -> list[Entry]:
        inputs: dict[tuple[str, ModelReference], Input] = {}
        for other in others:
            try:
                inputs |= self._pair(reference, other)
            except Unsupported as problem:
                self._refuse_or_skip(other, problem)
                self.leave(other, reference, self.name, str(problem))
        tasks = dict.fromkeys(one.task for one in inputs.values())
        blocks = tuple(task for task in tasks if isinstance(task, AlignBlock))
        return [(info, self._rewrite(info, task, inputs, blocks)) for info, task in self.order]

    def _refuse_or_skip(self, other: ModelReference, problem: Unsupported) -> None:
        first = self.order[0][0].name if self.order else ""
        choice = parameters.resolve_choice("align_unsupported", self.reader, other, first)
        if choice != "skip":
            raise RotationError(f"{problem}, or set align_unsupported: skip to merge it unaligned")
        self.context.warn_once(f"not aligned: {problem}")

    @staticmethod
    def leave(model: ModelReference, reference: ModelReference, place: str, reason: str) -> None:
        """Take note of a layer, or a block of it, that is not aligned."""
        run.current().unsolved.append(run.Unsolved(str(model), str(reference), place, reason))

    # -- one pair of models -----------------------------------------------------------------

    def _pair(
        self, reference: ModelReference, other: ModelReference
    ) -> dict[tuple[str, ModelReference], Input]:
        checkpoint = self.context.checkpoint
        layers = (self._index(reference), self._index(other))
        family, layer = check_same_layout(checkpoint(reference), checkpoint(other), layers)
        if family.modules and self.module not in family.modules:
            why = f"of {family.family} models, only {' and '.join(family.modules)} is aligned"
            self.leave(other, reference, self.name, why)
            return {}
        inputs: dict[tuple[str, ModelReference], Input] = {}
        templates = (t for block in layer.blocks for t in block.layout.patterns)
        planned = {t: name for t in templates if (name := self._planned(family, t)) is not None}
        for block in present_blocks(layer, planned, other):
            names = {t: planned[t] for t in block.layout.patterns if t in planned}
            legs = tuple(
                Leg(
                    name=name,
                    reference=self._load(name, reference),
                    other=self._load(name, other),
                    dtype=self._dtype(name),
                )
                for template, name in names.items()
            )
            spec = self.spec(block, names, {leg.name: leg.other.tensor for leg in legs}, other)
            if not spec.used():
                self.leave(other, reference, f"{self.name} {block.kind}", "switched off")
                continue
            task = AlignBlock(
                spec=spec,
                layer=self.name,
                layers=layers,
                label=min(self.labels[leg.name] for leg in legs),
                legs=legs,
            )
            for leg in legs:
                for load in (leg.reference, leg.other):
                    pattern = spec.pattern(leg.name)
                    check_header(checkpoint(load.model), load, pattern.shape(block.layout.sizes))
                inputs[leg.name, other] = Input(model=other, task=task, leg=leg.name)
        return inputs

    def _index(self, model: ModelReference) -> int:
        """Return the layer of a model that goes into this one."""
        own = [s for s in self.sources if s.model == model] or self.sources
        return int(own[0].layer_range[0]) + self.offset

    def _planned(self, family: Family, template: str) -> str | None:
        """Return the planned output tensor that a template stands for, if any."""
        local = template.replace(LAYER, str(self.index))
        names = (self.prefix + prefix + local for prefix in family.prefixes)
        return next((name for name in names if name in self.entries), None)

    def _load(self, name: str, model: ModelReference) -> CheckedLoad:
        """Load a leg in its own dtype: it is cast once, after it has been moved."""
        info = self._weight(name, model)
        options = self.context.planner.options
        load = CheckedLoad(
            model=model,
            tensor=info.name,
            device=options.device if options.read_to_gpu else None,
            optional=info.optional,
            aliases=info.aliases,
            tied_names=info.tied_names,
            label=self.labels[name],
            leg=True,
        )
        self.context.check_present(load)
        return load

    def _weight(self, name: str, model: ModelReference) -> WeightInfo:
        """Return mergekit's description of a model's input to an output tensor."""
        gather = unwrap(self.entries[name][1])
        if model in gather.weight_info.keys():
            info: WeightInfo = gather.weight_info[model]
            return info
        # A reference that is no input of the merge: the same layer as the first source.
        position = [entry[0].name for entry in self.order].index(name)
        weights = self._layer_weights(model)
        return weights[position]

    def _layer_weights(self, model: ModelReference) -> list[WeightInfo]:
        module = self.context.planner._model_arch(model).get_module(self.module)
        index = self._index(model)
        if index >= module.num_layers():
            raise Unsupported(
                f"{model}: has {module.num_layers()} layers, but layer {index} is asked for; "
                "choose another align_reference"
            )
        planned = {weight.name for weight, _ in self.order}
        every = self.context.planner._out_module_arch(self.module).layer_weights(index=self.index)
        mine = module.layer_weights(index=index)
        return [m for m, out in zip(mine, every, strict=True) if out.name in planned]

    def _dtype(self, name: str) -> str | None:
        weight, task = self.entries[name]
        dtype: str | None = weight.force_dtype or unwrap(task).dtype
        return dtype

    def spec(
        self,
        block: Block,
        keys: Mapping[str, str],
        tensors: Mapping[str, str],
        other: ModelReference,
    ) -> BlockSpec:
        """Return a block with the symmetries that are switched on for a model.

        Parameters
        ----------
        block : Block
        keys : mapping
            Template of each leg to the name that it has in the result.
        tensors : mapping
            That name to the name of the model's tensor, which filters are matched with.
        other : ModelReference
        """
        layout = block.layout

        def ask(name: str, axis: str | None = None) -> bool:
            found = [
                tensors[key]
                for template, key in keys.items()
                if axis is None or axis in layout.patterns[template].axes
            ]
            return parameters.resolve_switch(name, self.reader, other, found)

        common: dict[str, Any] = {
            "kind": block.kind,
            "patterns": tuple((key, layout.patterns[t].text) for t, key in keys.items()),
            "sizes": tuple(layout.sizes.items()),
            "use_scale": ask("align_scale"),
        }
        if isinstance(layout, ExpertLayout):
            return BlockSpec(
                **common,
                expert_groups=layout.groups,
                shifted=tuple(keys[t] for t in sorted(layout.shifted) if t in keys),
                use_experts=ask("align_experts"),
                use_neurons=ask("align_neurons", "f"),
            )
        if not isinstance(layout, AttentionLayout):
            return BlockSpec(**common, use_neurons=ask("align_neurons"))
        return BlockSpec(
            **common,
            query_key=layout.query_key,
            value_output=layout.value_output,
            shifted=tuple(keys[t] for t in sorted(layout.shifted) if t in keys),
            folded=tuple(keys[t] for t in sorted(layout.folded) if t in keys),
            use_query_key=ask("align_query_key", "qk"),
            use_value_output=ask("align_value_output", "vo"),
            use_heads=block.heads and ask("align_heads"),
        )

    # -- rewriting --------------------------------------------------------------------------

    def _rewrite(
        self,
        weight: WeightInfo,
        task: ExecuteMergeMethodTask,
        inputs: dict[tuple[str, ModelReference], Input],
        blocks: tuple[AlignBlock, ...],
    ) -> ExecuteMergeMethodTask:
        gather = unwrap(task)
        label = self.labels[weight.name]
        after = self._after(weight.name, label, blocks)
        if not any(name == weight.name for name, _ in inputs):
            waiting = GatherChecked(
                weight_info=gather.weight_info,
                dtype=gather.dtype,
                device=gather.device,
                after=after,
            )
            return rewrap(task, waiting)
        members = []
        for model in gather.weight_info.keys():
            moved = inputs.get((weight.name, model))
            if moved is None:
                load = self._load(weight.name, model)
                moved = Input(model=model, task=load, dtype=self._dtype(weight.name))
            members.append(moved)
        aligned = GatherAligned(
            weight_info=gather.weight_info,
            dtype=gather.dtype,
            device=gather.device,
            inputs=tuple(members),
            label=label,
            after=after,
        )
        return rewrap(task, aligned)

    def _after(
        self, name: str, label: str, blocks: tuple[AlignBlock, ...]
    ) -> tuple[AlignBlock, ...]:
        """Return the blocks whose first tensor mergekit merges before this one."""
        return tuple(
            block
            for block in blocks
            if block.label is not None
            and block.label < label <= max(self.labels[leg.name] for leg in block.legs)
            and all(leg.name != name for leg in block.legs)
        )


def unwrap(task: ExecuteMergeMethodTask) -> Any:
    """Return the gathering inside a planned task, below any handling of the vocabulary."""
    gather = task.gather_tensors
    if isinstance(gather, PermutedVocabulary | TruncatedVocabulary):
        return gather.gather_tensors
    return gather


def rewrap(task: ExecuteMergeMethodTask, gather: Any) -> ExecuteMergeMethodTask:
    """Return a planned task with another gathering in the place of `unwrap`'s."""
    outer = task.gather_tensors
    if isinstance(outer, PermutedVocabulary | TruncatedVocabulary):
        gather = outer.model_copy(update={"gather_tensors": gather})
    return task.model_copy(update={"gather_tensors": gather})
