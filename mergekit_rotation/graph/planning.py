"""Which tensors of a planned merge are aligned to which, and by what.

Works on what mergekit's planner has planned: for every output tensor a task that gathers its
inputs. The inputs of a layer's symmetric tensors are replaced by tasks that load, move and hand
on; then mergekit's stock method runs on them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mergekit.architecture import WeightInfo
from mergekit.common import ImmutableMap, ModelReference
from mergekit.config import ConfigReader, InputSliceDefinition
from mergekit.io.tasks import GatherTensors
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.plan import MergePlanner

from mergekit_rotation.graph import methods, parameters
from mergekit_rotation.graph.context import Context
from mergekit_rotation.graph.errors import RotationError
from mergekit_rotation.graph.inputs import (
    check_chat_template,
    check_depths,
    check_layer,
    check_shapes,
    check_tokenizers,
    warn_of_frequencies,
)
from mergekit_rotation.graph.layer import Entry, LayerPlan, rewrap, unwrap
from mergekit_rotation.graph.lost import warn_of_lost, warn_of_partial
from mergekit_rotation.graph.tasks import GatherChecked

if TYPE_CHECKING:
    from mergekit_rotation.graph.whole import WholeModels


class Alignment:
    """Alignment of one merge while it is planned.

    Parameters
    ----------
    planner : MergePlanner
        Of a ``rotation_*`` merge.
    """

    def __init__(self, planner: MergePlanner):
        self.planner = planner
        self.context = Context(planner)
        self.settings = parameters.WholeModel.of(planner.config.parameters)
        self.whole: WholeModels | None = None
        method = methods.aligned_method(planner.config.merge_method)
        assert method is not None
        self.method = method

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
            if self._explicit(config.parameters) is None and self.settings.load is None:
                raise RotationError(
                    "rotation_align needs align_reference (or align_load) under parameters:"
                )
        named = [self._explicit(config.parameters), *parameters.named_models(config)]
        for model in dict.fromkeys([*config.referenced_models(), *named]):
            if model is not None:
                checkpoint = self.context.checkpoint(model)
                checkpoint.check_stored()
                checkpoint.warn_of_two_formats()
        check_depths(self.context)
        if self.settings.used() or parameters.named_models(config):
            from mergekit_rotation.graph.output import Output
            from mergekit_rotation.graph.whole import WholeModels

            output = Output(self.context, self._one_reference())
            self.whole = WholeModels(output, self.settings)

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
            If a model lacks the layer, or does not fit the reference and ``align_unsupported`` is
            ``error``.
        """
        for source in sources:
            check_layer(self.context, source, layer_offset, module_name)
        models = [source.model for source in sources]
        reference = self._reference(models, reader)
        warn_of_frequencies(self.context, reference, models)
        if self.whole is not None:
            self.whole.output.add_layer(entries, sources, layer_offset, index, reader, module_name)
            return list(entries)
        others = [model for model in models if model != reference]
        plan = LayerPlan(self.context, entries, sources, layer_offset, index, reader, module_name)
        if len(models) == 1 and self.method.spec.name != methods.ALIGN:
            first = self._one_reference()
            if first is not None and first != models[0]:
                plan.leave(models[0], first, plan.name, "nothing else is merged into this layer")
            return list(entries)
        if not others:
            return list(entries)
        return plan.align(reference, others)

    def finish(self) -> None:
        """Hand every planned tensor to the stock method, with checked inputs.

        Raises
        ------
        RotationError
            If a tensor that mergekit needs is missing from a model or has another shape.
        """
        planned: list[tuple[WeightInfo, Any]] = self.planner._tensors
        for weight, task in planned:
            check_shapes(self.context, weight, task)
        tasks = [task for _, task in planned if isinstance(task, ExecuteMergeMethodTask)]
        warn_of_partial(self.context, [dict(unwrap(t).weight_info.items()) for t in tasks])
        if self.whole is not None:
            planned = self.whole.finish(list(planned))
        check_tokenizers(self.context)
        check_chat_template(self.context.planner.config)
        models = self.planner.config.referenced_models()
        warn_of_lost(self.context, models, (weight.name for weight, _ in planned))
        self.planner._tensors = [(weight, self._stock(weight, task)) for weight, task in planned]

    # -- details ------------------------------------------------------------------------------

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

    def _one_reference(self) -> ModelReference | None:
        """Return the reference of the whole merge; None if a lone model is moved by a file."""
        config = self.planner.config
        explicit = self._explicit(config.parameters)
        if explicit is not None or config.base_model is not None:
            return explicit or config.base_model
        if self.method.spec.name == methods.ALIGN:
            return None
        first: ModelReference = config.referenced_models()[0]
        return first

    def _stock(self, weight: WeightInfo, task: Any) -> Any:
        if not isinstance(task, ExecuteMergeMethodTask):
            return task
        unused = self.method.unused_parameters()
        per_input = {
            model: {**dict(values.items()), **unused}
            for model, values in task.input_parameters.items()
        }
        gather = unwrap(task)
        if type(gather) is GatherTensors:
            gather = GatherChecked(
                weight_info=gather.weight_info, dtype=gather.dtype, device=gather.device
            )
        if isinstance(gather, GatherChecked):
            for load in gather.loads().values():
                self.context.check_present(load)
        return rewrap(task, gather).model_copy(
            update={
                "method_name": self.method.plain.spec.name,
                "input_parameters": ImmutableMap(
                    {model: ImmutableMap(values) for model, values in per_input.items()}
                ),
            }
        )
