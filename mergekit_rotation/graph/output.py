"""What is known of a planned output: its layers, and how each input is used."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mergekit.common import ModelReference
from mergekit.config import ConfigReader, InputSliceDefinition

from mergekit_rotation.architecture import LAYER
from mergekit_rotation.graph import parameters
from mergekit_rotation.graph.context import Context
from mergekit_rotation.graph.errors import RotationError
from mergekit_rotation.graph.layer import Entry, LayerPlan
from mergekit_rotation.graph.moving import Fingerprints
from mergekit_rotation.graph.reading import ModelTensors
from mergekit_rotation.symmetry import ModelTransformation


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
    fingerprints: Mapping[ModelReference, Fingerprints]


@dataclass(frozen=True)
class OutputLayer:
    """One planned layer of the output."""

    plan: LayerPlan
    indices: Mapping[ModelReference, int]
    index: int


class Output:
    """The planned output of a merge that aligns whole models, and the models it is made of.

    Parameters
    ----------
    context : Context
    reference : ModelReference, optional
        None if a lone model is moved by a transformation from a file.
    """

    def __init__(self, context: Context, reference: ModelReference | None):
        self.context = context
        self.reference = reference
        self.layers: list[OutputLayer] = []
        self.uses: dict[ModelReference, Use] = {}
        self.module = ""
        self.read_models: dict[ModelReference, ModelTensors] = {}
        self._places: dict[str, tuple[OutputLayer | None, str]] = {}

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
                "models of several modules cannot be aligned as a whole; set align_residual: none, "
                "and remove align_save and align_load"
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

    def some(self) -> ModelTensors:
        """Return the tensors of a model of the merge's family: the reference's if there is one."""
        return self.tensors(self.reference or next(iter(self.uses)))

    def tensors(self, model: ModelReference) -> ModelTensors:
        """Return the (cached) tensors of a model."""
        if model not in self.read_models:
            self.read_models[model] = ModelTensors(self.context, model, self.module)
        return self.read_models[model]

    def locate(self, name: str) -> tuple[OutputLayer | None, str | None]:
        """Return the layer and the template of an output tensor."""
        if not self._places:
            some = self.some()
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

    def layer_pair(self, layer: OutputLayer, subject: ModelReference) -> tuple[int, int] | None:
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
