"""Alignment of whole models: solved while the merge is planned, applied while it runs.

The residual stream is one map for all layers, so both models are read once to find it before any
output is written; then every tensor is moved on its way to mergekit's method, as it streams by.
Transformations that are saved, loaded or applied to other models take the same way.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mergekit.architecture import WeightInfo
from mergekit.common import ModelReference, dtype_from_name
from mergekit.config import ConfigReader, InputSliceDefinition
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask

from mergekit_rotation.architecture import Block
from mergekit_rotation.graph import parameters, run, saved
from mergekit_rotation.graph.block import BlockSpec
from mergekit_rotation.graph.context import Context
from mergekit_rotation.graph.errors import RotationError
from mergekit_rotation.graph.layer import Entry, LayerPlan, rewrap, unwrap
from mergekit_rotation.graph.layout import Unsupported, check_header, check_same_layout
from mergekit_rotation.graph.moving import Move, MoveTensor
from mergekit_rotation.graph.reading import LAYER, ModelTensors
from mergekit_rotation.graph.solving import (
    OUTER,
    LayerPair,
    ModelSolver,
    layout_for,
    outer_templates,
)
from mergekit_rotation.graph.tasks import CheckedLoad, GatherAligned, Input, checked
from mergekit_rotation.symmetry import (
    ModelTransformation,
    OrthogonalMap,
    Transformation,
    moves,
)


@dataclass(frozen=True)
class Use:
    """How one input is transformed.

    Attributes
    ----------
    solved_for : ModelReference
        Whose transformation is applied.
    task_base : ModelReference, optional
        The model whose moved tensors are replaced by the reference's.
    """

    solved_for: ModelReference
    task_base: ModelReference | None = None


@dataclass(frozen=True)
class Solution:
    """What was solved or loaded, and which tensors will be written.

    Attributes
    ----------
    transformations : mapping of model to ModelTransformation
    templates : frozenset of str
        Of the planned tensors.
    fingerprints : mapping of model to Fingerprints
        What the tensors of a model have to be, if its transformation was loaded.
    """

    transformations: Mapping[ModelReference, ModelTransformation]
    templates: frozenset[str]
    fingerprints: Mapping[ModelReference, saved.Fingerprints]


@dataclass(frozen=True)
class OutputLayer:
    """One planned layer of the output."""

    plan: LayerPlan
    indices: Mapping[ModelReference, int]
    index: int


class WholeModels:
    """Alignment of all models of one merge to one reference.

    Parameters
    ----------
    context : Context
    settings : parameters.WholeModel
    reference : ModelReference, optional
        None if every transformation is loaded.
    """

    def __init__(
        self,
        context: Context,
        settings: parameters.WholeModel,
        reference: ModelReference | None,
    ):
        self.context = context
        self.settings = settings
        self.reference = reference
        self.layers: list[OutputLayer] = []
        self.uses: dict[ModelReference, Use] = {}
        self.module = ""
        self._tensors: dict[ModelReference, ModelTensors] = {}
        self._places: dict[str, tuple[OutputLayer | None, str]] = {}

    # -- while mergekit plans -----------------------------------------------------------------

    def add_layer(
        self,
        entries: Sequence[Entry],
        sources: Sequence[InputSliceDefinition],
        layer_offset: int,
        index: int,
        reader: ConfigReader,
        module_name: str,
    ) -> None:
        """Take note of one planned layer.

        Raises
        ------
        RotationError
            If a slice has a reference of its own, or an input is used in two ways.
        """
        if self.module not in ("", module_name):
            raise RotationError(
                "models of several modules cannot be aligned as a whole; set align_residual: none"
            )
        self.module = module_name
        base = reader.base_model
        if base is not None and base != self.context.planner.config.base_model:
            raise RotationError(
                f"a slice has {base} as its own base model, but the residual stream needs one "
                "reference for the whole merge; remove base_model from the slice"
            )
        explicit = parameters.explicit_reference(reader.parameter_sources(None))
        if explicit is not None and explicit != self.reference:
            raise RotationError(
                f"a slice has {explicit} as its own align_reference, but one reference for the "
                "whole merge is needed; write it under the top-level parameters:"
            )
        plan = LayerPlan(self.context, entries, sources, layer_offset, index, reader, module_name)
        indices = {s.model: s.layer_range[0] + layer_offset for s in sources}
        self.layers.append(OutputLayer(plan, indices, index))
        for source in sources:
            self._add_use(source.model, reader)

    def _add_use(self, model: ModelReference, reader: ConfigReader) -> None:
        own = tuple(reader.parameter_sources(model))
        solved_for = parameters.named_model("align_as", own)
        task_base = parameters.named_model("align_task_base", own)
        if solved_for is not None and task_base is not None:
            raise RotationError(
                f"{model}: align_as and align_task_base both name the model whose transformation "
                "is used; write one of them"
            )
        use = Use(solved_for or task_base or model, task_base)
        if self.uses.setdefault(model, use) != use:
            raise RotationError(
                f"{model}: align_as and align_task_base must be the same wherever it is used"
            )

    # -- afterwards ---------------------------------------------------------------------------

    def finish(self, planned: list[tuple[WeightInfo, Any]]) -> list[tuple[WeightInfo, Any]]:
        """Solve, and return the planned tensors with their inputs moved.

        Raises
        ------
        RotationError
        """
        for use in self.uses.values():
            if use.task_base is not None and self.context.planner._tokenizer_task is not None:
                raise RotationError(
                    "align_task_base cannot be combined with tokenizer: or tokenizer_source:, "
                    "because the models' rows are only brought together afterwards; merge in two "
                    "steps"
                )
        try:
            return self._finish(planned)
        except Unsupported as problem:
            raise RotationError(str(problem)) from problem

    def _finish(self, planned: list[tuple[WeightInfo, Any]]) -> list[tuple[WeightInfo, Any]]:
        if self.settings.residual != "none":
            planned = self._add_heads(planned, None)
        solution = self._solve(self._templates(planned))
        for model, transformation in solution.transformations.items():
            if isinstance(transformation.stream, OrthogonalMap):
                planned = self._add_heads(planned, model)
        solution = replace(solution, templates=self._templates(planned))
        return [
            (weight, self._rewrite(weight, task, solution))
            if isinstance(task, ExecuteMergeMethodTask)
            else (weight, task)
            for weight, task in planned
        ]

    def _solve(self, templates: frozenset[str]) -> Solution:
        """Return a transformation for every model that one is asked for."""
        wanted = dict.fromkeys(
            use.solved_for
            for model, use in self.uses.items()
            if model != self.reference or use.solved_for != model
        )
        for model, use in self.uses.items():
            if use.solved_for != model:
                check_same_layout(
                    self.context.checkpoint(use.solved_for), self.context.checkpoint(model)
                )
        wanted.pop(self.reference, None)  # type: ignore[call-overload]  # None if all are loaded
        if self.settings.load is not None:
            return self._loaded(self.settings.load, list(wanted), templates)
        result: dict[ModelReference, ModelTransformation] = {}
        fingerprints = {}
        for model in wanted:
            try:
                solver = self._solver(model, templates)
            except Unsupported as problem:
                self._refuse_or_skip(model, problem)
                continue
            result[model] = solver.solve()
            if not self._meet(model):  # the layers were compared only to judge the map
                outer = {key: n for key, n in result[model].norms.items() if key[1:] == OUTER}
                result[model] = replace(result[model], blocks={}, norms=outer)
            fingerprints[model] = solver.fingerprints
        if self.settings.save is not None:
            reference = self.tensors(self._reference())
            saved.write(self.settings.save, reference, result, fingerprints, self._tensors)
        return Solution(result, templates, {})

    def _loaded(
        self, path: str, models: Sequence[ModelReference], templates: frozenset[str]
    ) -> Solution:
        """Read the transformations from a file, checked against the models."""
        entries, unchecked = saved.read(path), self.settings.unchecked
        chosen = {m: saved.choose(path, entries, self.tensors(m), unchecked) for m in models}
        for model in models:
            run.current().note(str(model), f"moved by the transformation in {path}")
        if self.reference is not None and not unchecked:
            for entry in chosen.values():
                for (template, index), digest in entry.reference.items():
                    if index in (None, 0):
                        reference = self.tensors(self.reference)
                        saved.check_fingerprint(path, reference, template, index, digest)
        return Solution(
            {model: entry.transformation for model, entry in chosen.items()},
            templates,
            {} if unchecked else {model: entry.own for model, entry in chosen.items()},
        )

    def _refuse_or_skip(self, model: ModelReference, problem: Unsupported) -> None:
        plan = self.layers[0].plan
        first = plan.order[0][0].name if plan.order else ""
        choice = parameters.resolve_choice("align_unsupported", plan.reader, model, first)
        if choice != "skip":
            raise RotationError(f"{problem}, or set align_unsupported: skip to merge it unaligned")
        self.context.warn_once(f"not aligned: {problem}")

    def _some(self) -> ModelTensors:
        """Return the tensors of a model of the merge's family: the reference's if there is one."""
        return self.tensors(self.reference or next(iter(self.uses)))

    def tensors(self, model: ModelReference) -> ModelTensors:
        """Return the (cached) tensors of a model."""
        if model not in self._tensors:
            self._tensors[model] = ModelTensors(self.context, model, self.module)
        return self._tensors[model]

    def _solver(self, model: ModelReference, templates: frozenset[str]) -> ModelSolver:
        assert self.reference is not None
        context = self.context
        check_same_layout(context.checkpoint(self.reference), context.checkpoint(model))
        reference, other = self.tensors(self.reference), self.tensors(model)
        residual = self.settings.residual
        if residual != "none":
            if residual not in reference.stream.maps:
                raise RotationError(
                    f"{reference.model}: the norms of {reference.family.family} models allow no "
                    f"{residual} map of the residual stream; set align_residual: "
                    f"{' or '.join(reference.stream.maps)}"
                )
            for side in (reference, other):
                side.check_complete()
                self._warn_if_lost(side, templates)
        if residual == "orthogonal":  # a tied head will be untied
            templates |= {h for h in other.stream.tied if self._has_head(other, h, templates)}
        options = context.planner.options
        return ModelSolver(
            reference,
            other,
            list(self._pairs(model)),
            templates,
            residual,
            self.settings.rounds,
            dtype_from_name(context.planner.config.dtype),
            options.device or "cpu",
        )

    def _warn_if_lost(self, model: ModelTensors, templates: frozenset[str]) -> None:
        """Say which tensors of the stream mergekit will not write, with or without alignment."""
        for template in model.stream.layout.patterns:
            for prefix in model.family.prefixes:
                name = prefix + template.replace(LAYER, "0")
                if template not in templates and name not in tied_names(model):
                    if name in model.checkpoint.index.tensor_paths:
                        self.context.warn_once(
                            f"{model.model}: mergekit's definition of this architecture has no "
                            f"{prefix + template}; these tensors will be lost in the output, with "
                            "or without alignment; those of the reference fit the merge"
                        )

    def _templates(self, planned: Sequence[tuple[WeightInfo, Any]]) -> frozenset[str]:
        """Return the templates of the planned tensors (of any layer)."""
        found = {self._locate(weight.name)[1] for weight, _ in planned}
        return frozenset(template for template in found if template is not None)

    def _meet(self, model: ModelReference) -> bool:
        """Tell whether any layer is aligned by the transformation solved for a model."""
        subjects = [m for m, use in self.uses.items() if use.solved_for == model]
        return any(
            self._layer_pair(layer, s) is not None for layer in self.layers for s in subjects
        )

    def _pairs(self, model: ModelReference) -> Iterator[LayerPair]:
        """Yield the layers of the reference and of another model that meet in the output.

        If they never meet (a frankenmerge), layers of the same index are compared.
        """
        subjects = [m for m, use in self.uses.items() if use.solved_for == model]
        seen = set()
        for layer in self.layers:
            for subject in subjects:
                pair = self._layer_pair(layer, subject)
                if pair is not None and pair not in seen:
                    seen.add(pair)
                    yield self._paired(layer, subject, model, *pair)
        if not seen:
            assert self.reference is not None
            count = min(self.tensors(m).num_layers for m in (self.reference, model))
            for index in range(count):
                yield self._paired(self.layers[0], subjects[0], model, index, index)

    def _layer_pair(self, layer: OutputLayer, subject: ModelReference) -> tuple[int, int] | None:
        """Return the layer of the reference and of the subject, or None for a lone source."""
        if subject not in layer.indices or self.reference is None:
            return None
        if len(layer.indices) == 1 and not self._aligns_alone(subject):
            return None
        own = layer.indices[subject]
        if self.reference in layer.indices:
            return layer.indices[self.reference], own
        index = next(iter(layer.indices.values()))
        if index >= self.tensors(self.reference).num_layers:
            raise RotationError(
                f"{self.reference}: has {self.tensors(self.reference).num_layers} layers, but "
                f"layer {index} is asked for; choose another align_reference"
            )
        return index, own

    def _aligns_alone(self, subject: ModelReference) -> bool:
        """Tell whether a single source is aligned to the same layer of the reference."""
        method = self.context.planner.config.merge_method
        return method == "rotation_align" or self.uses[subject].solved_for != subject

    def _paired(
        self, layer: OutputLayer, subject: ModelReference, model: ModelReference, a: int, b: int
    ) -> LayerPair:
        tensors = self.tensors(model)
        specs = tuple(self._spec(block, layer, subject, b) for block in tensors.layer.blocks)
        for reader, index in ((self.tensors(self._reference()), a), (tensors, b)):
            for spec in specs:
                for template, _ in spec.patterns:
                    load = reader.load(template, index)
                    if load is not None:
                        shape = spec.pattern(template).shape(dict(spec.sizes))
                        check_header(reader.checkpoint, load, shape)
        return LayerPair(a, b, specs, f"{self.module}.{layer.index}")

    def _reference(self) -> ModelReference:
        assert self.reference is not None
        return self.reference

    def _spec(
        self, block: Block, layer: OutputLayer, subject: ModelReference, index: int
    ) -> BlockSpec:
        """Return a block with its legs named by template."""
        tensors = self.tensors(subject)
        names = {}
        for template in block.layout.patterns:
            info = tensors.infos(index).get(template)
            if info is not None and tensors.has(template, index):
                names[template] = info.name
            elif template not in block.optional:
                raise Unsupported(
                    f"{subject}: mergekit does not plan {template}, which moves with the rest of "
                    "its layer; use the method without rotation_"
                )
        return layer.plan.spec(block, {name: name for name in names}, names, subject)

    # -- rewriting ------------------------------------------------------------------------------

    def _add_heads(
        self, planned: list[tuple[WeightInfo, Any]], rotated: ModelReference | None
    ) -> list[tuple[WeightInfo, Any]]:
        """Plan an output head of its own where mergekit plans none.

        Tied embeddings cannot stay tied where a model is rotated, and a model that stores a head
        which mergekit's definition does not know would lose it.
        """
        planner = self.context.planner
        some = self._some()
        names = {weight.name for weight, _ in planned}
        templates = self._templates(planned)
        for head in some.stream.tied:
            info = some.infos(None).get(head)
            if info is None or not self._has_head(some, head, templates):
                continue
            models = list(self.layers[-1].indices)
            stored = [
                m for m in models if info.name in self.tensors(m).checkpoint.index.tensor_paths
            ]
            if info.name not in names and (rotated is not None or stored):
                weight = info.model_copy(update={"optional": False})
                start = len(planner._tensors)
                reader = self.layers[-1].plan.reader
                planner.plan_tensor(weight, [weight] * len(models), models, reader)
                planned = planned + planner._tensors[start:]
                why = (
                    f"{rotated}: its tied embeddings cannot stay tied in the coordinates of "
                    f"{self.reference or 'the reference'}"
                    if rotated is not None
                    else f"{stored[0]}: has an output head that is not tied to its embeddings"
                )
                self.context.warn_once(
                    f"{why}; the output gets {info.name} and tie_word_embeddings: false"
                )
            elif info.name not in names:
                continue
            untie(planner.out_model_config)
        return planned

    @staticmethod
    def _has_head(model: ModelTensors, head: str, templates: frozenset[str]) -> bool:
        """Tell whether a model ends in this head, of its own or tied to the embeddings."""
        norm = model.stream.layout.norm_of(head)
        if norm is None:
            return False
        others = [r for r in model.stream.layout.readers[norm] if r != head]
        return not any(reader in templates for reader in others)

    def _rewrite(
        self,
        weight: WeightInfo,
        task: ExecuteMergeMethodTask,
        solution: Solution,
    ) -> ExecuteMergeMethodTask:
        """Return a planned task with its inputs moved; the task itself if none has to be."""
        gather = unwrap(task)
        label = str(gather.group_label())
        layer, template = self._locate(weight.name)
        stock = {load.model: load for load in gather.arguments().values()}
        inputs, anything = [], False
        for model, info in gather.weight_info.items():
            dtype = info.force_dtype or gather.dtype
            move = self._moving(model, template, layer, solution, label, dtype)
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

    def _locate(self, name: str) -> tuple[OutputLayer | None, str | None]:
        """Return the layer and the template of an output tensor."""
        if not self._places:
            some = self._some()
            prefix = self.layers[0].plan.prefix
            for template in some.stream.known:
                for family_prefix in some.family.prefixes:
                    stem = prefix + family_prefix + template
                    if LAYER not in template:
                        self._places[stem] = (None, template)
                        continue
                    for layer in self.layers:
                        self._places[stem.replace(LAYER, str(layer.index))] = (layer, template)
        return self._places.get(name, (None, None))

    def _moving(
        self,
        model: ModelReference,
        template: str | None,
        layer: OutputLayer | None,
        solution: Solution,
        label: str,
        dtype: str | None,
    ) -> MoveTensor | None:
        """Return the task that moves one input, or None where it is taken as it is."""
        use = self.uses[model]
        transformation = solution.transformations.get(use.solved_for)
        if transformation is None and use.task_base is None:  # the reference, or left unaligned
            return None
        if template is None:
            if use.task_base is None:
                return None
            raise RotationError(
                f"{model}: align_task_base: a tensor ({label}) that the family does not know"
            )
        own = self.tensors(model)
        index = None if layer is None else layer.indices[model]
        pair = OUTER if layer is None else self._pair(layer, model, solution)
        move = self._move(template, pair, own, transformation, solution.templates)
        if move is None and use.task_base is None:
            return None
        if move is None:
            move = Move(template, own.stream.layout, None, None, (), {})
        digest = solution.fingerprints.get(use.solved_for, {}).get((template, index))
        move = replace(move, fingerprint=digest if use.solved_for == model else None)
        more: dict[str, Any] = {}
        if use.task_base is not None:
            assert self.reference is not None
            at = None if layer is None else (pair or (index, index))[0]
            more["base"] = self._loads(self.tensors(use.task_base), move, index, label)
            more["reference"] = self.tensors(self.reference).load(template, at, label)
        return MoveTensor(
            model=model,
            move=move,
            own=self._loads(own, move, index, label),
            dtype=dtype,
            label=label,
            **more,
        )

    def _move(
        self,
        template: str,
        pair: tuple[int, int] | None,
        own: ModelTensors,
        transformation: ModelTransformation | None,
        templates: frozenset[str],
    ) -> Move | None:
        """Return what a transformation does to one tensor, or None if nothing."""
        if transformation is None:
            return None
        spec: BlockSpec | None = None
        elements: Transformation = ()
        for block in own.layer.blocks:
            if pair is not None and template in block.layout.patterns:
                elements = transformation.blocks.get((block.kind, *pair), ())
                if moves(elements, block.layout.patterns[template]):
                    spec = plain_spec(block)
        inside = transformation.stream is not None and template in (
            *own.stream.layout.patterns,
            *outer_templates(own),
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
            layout=layout_for(own, templates),
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

    def _pair(
        self, layer: OutputLayer, model: ModelReference, solution: Solution
    ) -> tuple[int, int] | None:
        """Return the layers of the reference and of a model whose alignment applies."""
        if self.settings.load is None:
            return self._layer_pair(layer, model)
        transformation = solution.transformations.get(self.uses[model].solved_for)
        own = layer.indices[model]
        known = {} if transformation is None else transformation.blocks
        found = {a for _, a, b in known if b == own}
        wanted = layer.indices.get(self.reference) if self.reference is not None else None
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


def tied_names(model: ModelTensors) -> set[str]:
    """Names under which a model may hold its embeddings a second time."""
    return {prefix + head for prefix in model.family.prefixes for head in model.stream.tied}


def untie(config: Any) -> None:
    """Set ``tie_word_embeddings: false`` in a configuration and in those nested in it."""
    for part in (config, *(getattr(config, name, None) for name in ("text_config", "decoder"))):
        if getattr(part, "tie_word_embeddings", None) is not None:
            part.tie_word_embeddings = False
