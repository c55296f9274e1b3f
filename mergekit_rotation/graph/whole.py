"""Alignment of whole models: solved while the merge is planned, applied while it runs.

The residual stream is one map for all layers, so both models are read once to find it before any
output is written; then every tensor is moved on its way to mergekit's method, as it streams by.
Transformations that are saved, loaded or applied to other models take the same way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from mergekit.architecture import WeightInfo
from mergekit.common import ModelReference, dtype_from_name
from mergekit.io.tasks import LoaderCache
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask

from mergekit_rotation.architecture import Block, Layer
from mergekit_rotation.graph import parameters, run, saved
from mergekit_rotation.graph.block import BlockSpec
from mergekit_rotation.graph.errors import RotationError
from mergekit_rotation.graph.layer import LayerPlan
from mergekit_rotation.graph.layout import (
    Unsupported,
    check_header,
    check_same_layout,
    present_blocks,
)
from mergekit_rotation.graph.output import Output, OutputLayer, Solution
from mergekit_rotation.graph.reading import ModelTensors
from mergekit_rotation.graph.rewriting import Rewriter
from mergekit_rotation.graph.sides import LayerPair
from mergekit_rotation.graph.solving import ModelSolver
from mergekit_rotation.symmetry import (
    ModelTransformation,
    OrthogonalMap,
)


class WholeModels:
    """Alignment of all models of one merge to one reference.

    Parameters
    ----------
    output : Output
    settings : parameters.WholeModel
    """

    def __init__(self, output: Output, settings: parameters.WholeModel):
        self.output = output
        self.settings = settings
        self.context = output.context
        self.reference = output.reference
        #: what was solved, once it is
        self.rewriter: Rewriter | None = None

    def finish(self, planned: list[tuple[WeightInfo, Any]]) -> list[tuple[WeightInfo, Any]]:
        """Solve, and return the planned tensors with their inputs moved.

        Raises
        ------
        RotationError
        """
        for use in self.output.uses.values():
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
        rewriter = Rewriter(
            self.output, self.settings, replace(solution, templates=self._templates(planned))
        )
        self.rewriter = rewriter
        return [
            (weight, rewriter.rewrite(weight, task))
            if isinstance(task, ExecuteMergeMethodTask)
            else (weight, task)
            for weight, task in planned
        ]

    def _solve(self, templates: frozenset[str]) -> Solution:
        """Return a transformation for every model that one is asked for."""
        solved_for = dict.fromkeys(use.solved_for for use in self.output.uses.values())
        wanted = [model for model in solved_for if model != self.reference]
        for model, use in self.output.uses.items():
            if use.solved_for != model:
                check_same_layout(
                    self.context.checkpoint(use.solved_for), self.context.checkpoint(model)
                )
        if self.settings.load is not None:
            return self._loaded(self.settings.load, wanted, templates)
        result: dict[ModelReference, ModelTransformation] = {}
        fingerprints = {}
        for model in wanted:
            try:
                solver = self._solver(model, templates)
            except Unsupported as problem:
                self._refuse_or_skip(model, problem)
                LayerPlan.leave(model, self._reference(), "all layers", str(problem))
                continue
            if run.current().dry:
                result[model] = self._outlined(model, solver)
                continue
            result[model] = solver.solve(self._meet(model))
            fingerprints[model] = solver.sides.fingerprints
        LoaderCache().flush_all()  # files are mapped, and every page of them was touched
        if self.settings.save is not None and run.current().dry:
            saved.check_writable(self.settings.save)
        elif self.settings.save is not None:
            reference = self.output.tensors(self._reference())
            saved.write(
                self.settings.save, reference, result, fingerprints, self.output.read_models
            )
        return Solution(result, templates, {})

    def _outlined(self, model: ModelReference, solver: ModelSolver) -> ModelTransformation:
        """Check what would be solved, and take note of it for `run.Run.foreseen`."""
        this, reference = run.current(), str(self._reference())
        this.solvers[str(model)] = solver
        this.foreseen += [
            run.Foreseen(str(model), reference, pair.label, pair.indices, spec)
            for pair in solver.pairs
            for spec in pair.blocks
            if spec.used()
        ]
        return solver.outline(self._meet(model))

    def _loaded(
        self, path: str, models: Sequence[ModelReference], templates: frozenset[str]
    ) -> Solution:
        """Read the transformations from a file, checked against the models."""
        entries, unchecked = saved.read(path), self.settings.unchecked
        chosen = {m: saved.choose(path, entries, self.output.tensors(m), unchecked) for m in models}
        for model in models:
            run.current().note(str(model), f"moved by the transformation in {path}")
        if self.reference is not None and not unchecked:
            for entry in chosen.values():
                for (template, index), digest in entry.reference.items():
                    if index in (None, 0):
                        reference = self.output.tensors(self.reference)
                        saved.check_fingerprint(path, reference, template, index, digest)
        return Solution(
            {model: entry.transformation for model, entry in chosen.items()},
            templates,
            {} if unchecked else {model: entry.own for model, entry in chosen.items()},
        )

    def _refuse_or_skip(self, model: ModelReference, problem: Unsupported) -> None:
        plan = self.output.layers[0].plan
        first = plan.order[0][0].name if plan.order else ""
        choice = parameters.resolve_choice("align_unsupported", plan.reader, model, first)
        if choice != "skip":
            raise RotationError(f"{problem}, or set align_unsupported: skip to merge it unaligned")
        self.context.warn_once(f"not aligned: {problem}")

    def _solver(self, model: ModelReference, templates: frozenset[str]) -> ModelSolver:
        assert self.reference is not None
        context = self.context
        check_same_layout(context.checkpoint(self.reference), context.checkpoint(model))
        reference, other = self.output.tensors(self.reference), self.output.tensors(model)
        residual = self.settings.residual
        if residual != "none":
            if residual not in reference.stream.maps:
                raise RotationError(
                    f"{reference.model}: {reference.family.family} models allow no {residual} map "
                    "of the residual stream; set align_residual: "
                    f"{' or '.join(reference.stream.maps) or 'none'}"
                )
            for side in (reference, other):
                side.check_complete()
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

    def _templates(self, planned: Sequence[tuple[WeightInfo, Any]]) -> frozenset[str]:
        """Return the templates of the planned tensors (of any layer)."""
        found = {self.output.locate(weight.name)[1] for weight, _ in planned}
        return frozenset(template for template in found if template is not None)

    def _meet(self, model: ModelReference) -> bool:
        """Tell whether any layer is aligned by the transformation solved for a model."""
        subjects = [m for m, use in self.output.uses.items() if use.solved_for == model]
        return any(
            self.output.layer_pair(layer, s) is not None
            for layer in self.output.layers
            for s in subjects
        )

    def _pairs(self, model: ModelReference) -> Iterator[LayerPair]:
        """Yield the layers of the reference and of another model that meet in the output.

        If they never meet (a frankenmerge), layers of the same index are compared.
        """
        subjects = [m for m, use in self.output.uses.items() if use.solved_for == model]
        seen = set()
        for layer in self.output.layers:
            for subject in subjects:
                pair = self.output.layer_pair(layer, subject)
                if pair is not None and pair not in seen:
                    seen.add(pair)
                    yield self._paired(layer, subject, model, *pair)
        if not seen:
            assert self.reference is not None
            count = min(self.output.tensors(m).num_layers for m in (self.reference, model))
            for index in range(count):
                yield self._paired(self.output.layers[0], subjects[0], model, index, index)

    def _paired(
        self, layer: OutputLayer, subject: ModelReference, model: ModelReference, a: int, b: int
    ) -> LayerPair:
        tensors = self.output.tensors(model)
        checkpoint = self.context.checkpoint
        _, kinds = check_same_layout(checkpoint(self._reference()), checkpoint(model), (a, b))
        specs = tuple(
            self._spec(block, layer, subject, b) for block in self._present(kinds, subject, b)
        )
        for spec in specs:
            if not spec.used():
                place = f"{layer.plan.name} {spec.kind}"
                layer.plan.leave(model, self._reference(), place, "switched off")
        for reader, index in ((self.output.tensors(self._reference()), a), (tensors, b)):
            for spec in specs:
                for template, _ in spec.patterns:
                    load = reader.load(template, index)
                    if load is not None:
                        shape = spec.pattern(template).shape(dict(spec.sizes))
                        check_header(reader.checkpoint, load, shape)
        return LayerPair(a, b, specs, layer.plan.name)

    def _reference(self) -> ModelReference:
        assert self.reference is not None
        return self.reference

    def _present(self, layer: Layer, subject: ModelReference, index: int) -> list[Block]:
        """Return the blocks that a layer of a model has."""
        tensors = self.output.tensors(subject)
        templates = (t for block in layer.blocks for t in block.layout.patterns)
        return present_blocks(layer, {t for t in templates if tensors.has(t, index)}, subject)

    def _spec(
        self, block: Block, layer: OutputLayer, subject: ModelReference, index: int
    ) -> BlockSpec:
        """Return a block with its legs named by template."""
        tensors = self.output.tensors(subject)
        names = {}
        for template in block.layout.patterns:
            info = tensors.infos(index).get(template)
            if info is not None and tensors.has(template, index):
                names[template] = info.name
        return layer.plan.spec(block, {name: name for name in names}, names, subject)

    # -- heads and names --------------------------------------------------------------------------

    def _add_heads(
        self, planned: list[tuple[WeightInfo, Any]], rotated: ModelReference | None
    ) -> list[tuple[WeightInfo, Any]]:
        """Plan an output head of its own where mergekit plans none.

        Tied embeddings cannot stay tied where a model is rotated, and a model that stores a head
        which mergekit's definition does not know would lose it.
        """
        planner = self.context.planner
        some = self.output.some()
        names = {weight.name for weight, _ in planned}
        templates = self._templates(planned)
        for head in some.stream.tied:
            info = some.infos(None).get(head)
            if info is None or not self._has_head(some, head, templates):
                continue
            models = list(self.output.layers[-1].indices)
            stored = [
                m
                for m in models
                if info.name in self.output.tensors(m).checkpoint.index.tensor_paths
            ]
            if info.name not in names and (rotated is not None or stored):
                weight = info.model_copy(update={"optional": False})
                start = len(planner._tensors)
                reader = self.output.layers[-1].plan.reader
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
        layout = model.stream.layout
        return layout.norm_of(head) is not None and layout.reads_alone(head, templates)


def untie(config: Any) -> None:
    """Set ``tie_word_embeddings: false`` in a configuration and in those nested in it."""
    for part in (config, *(getattr(config, name, None) for name in ("text_config", "decoder"))):
        if getattr(part, "tie_word_embeddings", None) is not None:
            part.tie_word_embeddings = False
