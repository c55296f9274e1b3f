"""Which tensors of a planned merge are aligned to which, and by what.

Works on what mergekit's planner has planned: for every output tensor a task that gathers its
inputs. The inputs of a layer's symmetric tensors are replaced by tasks that load, move and hand
on; then mergekit's stock method runs on them.
"""

import logging
from collections.abc import Sequence
from typing import Any

from mergekit.architecture import WeightInfo
from mergekit.common import ImmutableMap, ModelReference
from mergekit.config import ConfigReader, InputSliceDefinition
from mergekit.io.tasks import GatherTensors, LoadTensor
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.plan import MergePlanner
from mergekit.tokenizer import PermutedVocabulary
from mergekit.tokenizer.truncate import TruncatedVocabulary

from mergekit_rotation.architecture import Block, Family, Layer, LayoutError, find_family, supported
from mergekit_rotation.graph import methods, parameters
from mergekit_rotation.graph.checkpoints import FLOATING, Checkpoint
from mergekit_rotation.graph.errors import RotationError
from mergekit_rotation.graph.tasks import (
    AlignBlock,
    CheckedLoad,
    GatherAligned,
    GatherChecked,
    Input,
    Leg,
    checked,
)
from mergekit_rotation.symmetry import AttentionLayout

LOG = logging.getLogger(__name__)

Entry = tuple[WeightInfo, ExecuteMergeMethodTask]


class Alignment:
    """Alignment of one merge while it is planned.

    Parameters
    ----------
    planner : MergePlanner
        Of a ``rotation_*`` merge.
    """

    def __init__(self, planner: MergePlanner):
        self.planner = planner
        method = methods.aligned_method(planner.config.merge_method)
        assert method is not None
        self.method = method
        self._checkpoints: dict[ModelReference, Checkpoint] = {}
        self._warned: set[str] = set()

    # -- entry points, called by the seams --------------------------------------------------

    def check_inputs(self) -> None:
        """Refuse inputs that no merge should take, before anything is planned.

        Raises
        ------
        RotationError
        """
        config = self.planner.config
        if self.method.spec.name == methods.ALIGN:
            if config.base_model is not None or len(config.referenced_models()) != 1:
                raise RotationError(
                    "rotation_align moves one model: list it alone under models: without "
                    "base_model, and name the other as align_reference under parameters:"
                )
            if self._explicit(config.parameters) is None:
                raise RotationError("rotation_align needs align_reference under parameters:")
        for model in config.referenced_models():
            self.checkpoint(model).check_not_quantised()

    def align_layer(
        self,
        entries: Sequence[Entry],
        sources: Sequence[InputSliceDefinition],
        layer_offset: int,
        index: int,
        reader: ConfigReader,
        module_name: str,
    ) -> list[Entry]:
        """Return the entries of one planned layer with their inputs aligned.

        Parameters
        ----------
        entries : sequence of (WeightInfo, ExecuteMergeMethodTask)
            What mergekit planned for the layer.
        sources : sequence of InputSliceDefinition
        layer_offset : int
            Position inside the slice.
        index : int
            Index of the layer in the output.
        reader : ConfigReader
        module_name : str

        Raises
        ------
        RotationError
            If a model does not fit the reference and ``align_unsupported`` is ``error``.
        """
        models = [source.model for source in sources]
        reference = self._reference(models, reader)
        others = [model for model in models if model != reference]
        if not others or (len(models) == 1 and self.method.spec.name != methods.ALIGN):
            return list(entries)
        plan = _LayerPlan(self, entries, sources, layer_offset, index, reader, module_name)
        return plan.align(reference, others)

    def finish(self) -> None:
        """Hand every planned tensor to the stock method, with checked inputs.

        Raises
        ------
        RotationError
            If a tensor that mergekit needs is missing from a model.
        """
        planned: list[tuple[WeightInfo, Any]] = self.planner._tensors
        self.planner._tensors = [(weight, self._stock(weight, task)) for weight, task in planned]

    # -- shared by the layers ---------------------------------------------------------------

    def checkpoint(self, model: ModelReference) -> Checkpoint:
        """Return the (cached) checkpoint of a model."""
        if model not in self._checkpoints:
            trust = self.planner.options.trust_remote_code
            self._checkpoints[model] = Checkpoint(model, model.config(trust_remote_code=trust))
        return self._checkpoints[model]

    def warn_once(self, message: str) -> None:
        """Show one warning, the first time only."""
        if message not in self._warned:
            self._warned.add(message)
            LOG.warning(message)

    def _explicit(self, *settings: Any) -> ModelReference | None:
        return parameters.explicit_reference(settings)

    def _reference(self, models: Sequence[ModelReference], reader: ConfigReader) -> ModelReference:
        explicit = self._explicit(*reader.parameter_sources(None))
        inputs = self.planner.config.referenced_models()
        if explicit is not None and (explicit in models or explicit not in inputs):
            return explicit
        if reader.base_model in models:
            return reader.base_model
        return models[0]

    def _stock(self, weight: WeightInfo, task: Any) -> Any:
        if not isinstance(task, ExecuteMergeMethodTask):
            return task
        unused = self.method.unused_parameters()
        per_input = {
            model: {**dict(values.items()), **unused} for model, values in task.input_parameters.items()
        }
        gather = unwrap(task)
        if type(gather) is GatherTensors:
            gather = GatherChecked(
                weight_info=gather.weight_info, dtype=gather.dtype, device=gather.device
            )
        if isinstance(gather, GatherChecked):
            for load in gather.loads().values():
                self.check_present(load)
        return rewrap(task, gather).model_copy(
            update={
                "method_name": self.method.plain.spec.name,
                "input_parameters": ImmutableMap(
                    {model: ImmutableMap(values) for model, values in per_input.items()}
                ),
            }
        )

    def check_present(self, load: LoadTensor) -> None:
        """Refuse a required tensor that the model lacks.

        Raises
        ------
        RotationError
        """
        if not load.optional and not self.checkpoint(load.model).has(load):
            raise RotationError(
                f"{load.model}: tensor {load.tensor} is missing; the checkpoint is incomplete, "
                "fetch or save the model again"
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


class _Unsupported(Exception):
    """A model or layer that does not fit the reference; the message names the remedy."""


class _LayerPlan:
    """Alignment of one output layer."""

    def __init__(
        self,
        alignment: Alignment,
        entries: Sequence[Entry],
        sources: Sequence[InputSliceDefinition],
        layer_offset: int,
        index: int,
        reader: ConfigReader,
        module_name: str,
    ):
        self.alignment = alignment
        self.entries = {weight.name: (weight, task) for weight, task in entries}
        self.order = list(entries)
        self.sources = sources
        self.offset = layer_offset
        self.index = index
        self.reader = reader
        self.module = module_name
        definition = alignment.planner.arch_info.modules[module_name]
        self.prefix = definition.weight_prefix or ""

    def align(self, reference: ModelReference, others: Sequence[ModelReference]) -> list[Entry]:
        inputs: dict[tuple[str, ModelReference], Input] = {}
        for other in others:
            try:
                inputs |= self._pair(reference, other)
            except _Unsupported as problem:
                self._refuse_or_skip(other, problem)
        return [
            (weight, self._rewrite(weight, task, reference, inputs)) for weight, task in self.order
        ]

    def _refuse_or_skip(self, other: ModelReference, problem: _Unsupported) -> None:
        first = self.order[0][0].name if self.order else ""
        choice = parameters.resolve_choice("align_unsupported", self.reader, other, first)
        if choice != "skip":
            raise RotationError(f"{problem}, or set align_unsupported: skip to merge it unaligned")
        self.alignment.warn_once(f"not aligned: {problem}")

    # -- one pair of models -----------------------------------------------------------------

    def _pair(
        self, reference: ModelReference, other: ModelReference
    ) -> dict[tuple[str, ModelReference], Input]:
        family, ours = self._layout(reference)
        _, theirs = self._layout(other)
        self._check_same_layout(family, reference, ours, other, theirs)
        inputs: dict[tuple[str, ModelReference], Input] = {}
        for block in ours.blocks:
            names = self._leg_names(family, block, (reference, other))
            legs = tuple(
                Leg(
                    name=name,
                    pattern=block.layout.patterns[template].text,
                    reference=self._load(name, reference),
                    other=self._load(name, other),
                    dtype=self._dtype(name),
                )
                for template, name in names.items()
            )
            task = self._block(block, legs, other)
            if task is None:
                continue
            for leg in legs:
                for load in (leg.reference, leg.other):
                    self._check_leg(leg, load, ours, family)
                inputs[leg.name, other] = Input(model=other, task=task, leg=leg.name)
        return inputs

    def _layout(self, model: ModelReference) -> tuple[Family, Layer]:
        config = self.alignment.checkpoint(model).config
        classes = list(getattr(config, "architectures", None) or ["?"])
        family = find_family(config.model_type, classes[0])
        if family is None:
            raise _Unsupported(
                f"{model}: no symmetries are known for {classes[0]} ({config.model_type}); "
                f"supported are {', '.join(supported())}; use the method without rotation_"
            )
        try:
            return family, family.layer(config)
        except LayoutError as problem:
            raise _Unsupported(f"{model}: {problem}; repair its config.json") from problem

    def _check_same_layout(
        self,
        family: Family,
        reference: ModelReference,
        ours: Layer,
        other: ModelReference,
        theirs: Layer,
    ) -> None:
        for axis, size in ours.sizes.items():
            if theirs.sizes.get(axis) != size:
                raise _Unsupported(
                    f"{other}: {family.size_names[axis]} is {theirs.sizes.get(axis)}, but {size} "
                    f"in the reference {reference}, and layers of different shape cannot be "
                    "aligned; remove the model"
                )
        for a, b in zip(ours.blocks, theirs.blocks, strict=True):
            if a.layout != b.layout:
                raise _Unsupported(
                    f"{other}: its {a.kind} are laid out differently from those of the reference "
                    f"{reference}; remove the model"
                )

    def _leg_names(
        self, family: Family, block: Block, models: Sequence[ModelReference]
    ) -> dict[str, str]:
        """Map the block's templates to the planned output tensors, prefixed as planned."""
        names: dict[str, str] = {}
        for template in block.layout.patterns:
            local = template.replace("${layer_index}", str(self.index))
            found = [
                name
                for prefix in family.prefixes
                if (name := self.prefix + prefix + local) in self.entries
            ]
            if found:
                names[template] = found[0]
            elif template not in block.optional:
                raise _Unsupported(
                    f"{models[1]}: mergekit does not plan the tensor {local}, which moves with "
                    "the rest of its layer; use the method without rotation_"
                )
            else:
                self._warn_if_lost(family, template, models)
        return names

    def _warn_if_lost(
        self, family: Family, template: str, models: Sequence[ModelReference]
    ) -> None:
        for model in models:
            stored = self.alignment.checkpoint(model).index.tensor_paths
            for prefix in family.prefixes:
                name = self.prefix + prefix + template.replace("${layer_index}", "0")
                if name in stored:
                    self.alignment.warn_once(
                        f"{model}: mergekit's definition of this architecture has no "
                        f"{prefix + template}; these tensors will be lost in the output, with or "
                        "without alignment"
                    )

    def _load(self, name: str, model: ModelReference) -> CheckedLoad:
        """Load a leg in its own dtype: it is cast once, after it has been moved."""
        info = self._weight(name, model)
        options = self.alignment.planner.options
        load = CheckedLoad(
            model=model,
            tensor=info.name,
            device=options.device if options.read_to_gpu else None,
            optional=info.optional,
            aliases=info.aliases,
            tied_names=info.tied_names,
            label=self._label(name),
            leg=True,
        )
        self.alignment.check_present(load)
        return load

    def _weight(self, name: str, model: ModelReference) -> WeightInfo:
        """Return mergekit's description of a model's input to an output tensor."""
        weight, task = self.entries[name]
        gather = unwrap(task)
        if model in gather.weight_info.keys():
            info: WeightInfo = gather.weight_info[model]
            return info
        # A reference that is no input of the merge: the same layer as the first source.
        position = [entry[0].name for entry in self.order].index(name)
        weights = self._layer_weights(model)
        return weights[position]

    def _layer_weights(self, model: ModelReference) -> list[WeightInfo]:
        module = self.alignment.planner._model_arch(model).get_module(self.module)
        index = self.sources[0].layer_range[0] + self.offset
        if index >= module.num_layers():
            raise _Unsupported(
                f"{model}: has {module.num_layers()} layers, but layer {index} is asked for; "
                "choose another align_reference"
            )
        planned = {weight.name for weight, _ in self.order}
        every = self.alignment.planner._out_module_arch(self.module).layer_weights(index=self.index)
        mine = module.layer_weights(index=index)
        return [m for m, out in zip(mine, every, strict=True) if out.name in planned]

    def _dtype(self, name: str) -> str | None:
        weight, task = self.entries[name]
        dtype: str | None = weight.force_dtype or unwrap(task).dtype
        return dtype

    def _label(self, name: str) -> str:
        """Label of everything that belongs to one output tensor: what stock would use."""
        _, task = self.entries[name]
        return str(unwrap(task).group_label())

    def _block(
        self, block: Block, legs: Sequence[Leg], other: ModelReference
    ) -> AlignBlock | None:
        """Return the task that moves a block, or None where all its symmetries are off."""
        layout = block.layout
        patterns = {leg.name: leg for leg in legs}

        def ask(name: str, axis: str | None = None) -> bool:
            tensors = [
                leg.other.tensor
                for leg in patterns.values()
                if axis is None or f"{axis}" in leg.pattern.replace("(", " ").replace(")", " ").split()
            ]
            return parameters.resolve_switch(name, self.reader, other, tensors)

        common: dict[str, Any] = {
            "block": block.kind,
            "layer": f"{self.module}.{self.index}",
            "label": min(self._label(leg.name) for leg in legs),
            "legs": tuple(legs),
            "sizes": tuple(layout.sizes.items()),
        }
        if not isinstance(layout, AttentionLayout):
            return AlignBlock(**common) if ask("align_neurons") else None
        switches = {
            "use_query_key": ask("align_query_key", "qk"),
            "use_value_output": ask("align_value_output", "vo"),
            "use_heads": ask("align_heads"),
        }
        if not any(switches.values()):
            return None
        return AlignBlock(
            **common, **switches, query_key=layout.query_key, value_output=layout.value_output
        )

    def _check_leg(self, leg: Leg, load: CheckedLoad, layer: Layer, family: Family) -> None:
        """Check what a file header tells of a leg: dtype and shape."""
        checkpoint = self.alignment.checkpoint(load.model)
        name = checkpoint.resolve(load)
        header = checkpoint.header(name) if name is not None else None
        if header is None:
            return
        shape, dtype = header
        if dtype not in FLOATING:
            raise RotationError(
                f"{load.model}: {name} is stored as {dtype}; quantised weights cannot be aligned "
                "or merged, use the unquantised model"
            )
        from mergekit_rotation.symmetry import Pattern

        expected = Pattern.parse(leg.pattern).shape(layer.sizes)
        if shape != expected:
            raise _Unsupported(
                f"{load.model}: {name} has shape {list(shape)} where its config demands "
                f"{list(expected)}; repair or remove the model"
            )

    # -- rewriting --------------------------------------------------------------------------

    def _rewrite(
        self,
        weight: WeightInfo,
        task: ExecuteMergeMethodTask,
        reference: ModelReference,
        inputs: dict[tuple[str, ModelReference], Input],
    ) -> ExecuteMergeMethodTask:
        gather = unwrap(task)
        label = self._label(weight.name)
        after = self._after(weight.name, label, inputs)
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
        self, name: str, label: str, inputs: dict[tuple[str, ModelReference], Input]
    ) -> tuple[AlignBlock, ...]:
        """Return the blocks whose first tensor mergekit merges before this one."""
        blocks = dict.fromkeys(i.task for i in inputs.values() if isinstance(i.task, AlignBlock))
        return tuple(
            block
            for block in blocks
            if block.label is not None
            and block.label < label <= max(self._label(leg.name) for leg in block.legs)
            and all(leg.name != name for leg in block.legs)
        )
