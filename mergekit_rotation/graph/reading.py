"""The tensors of one model by the templates of its family, whatever its files call them."""

from functools import cached_property
from typing import Any

import torch
from mergekit.architecture import WeightInfo
from mergekit.common import ModelReference

from mergekit_rotation.architecture import LAYER, Block, Family
from mergekit_rotation.graph.context import Context
from mergekit_rotation.graph.layout import Unsupported, layout_of
from mergekit_rotation.graph.tasks import CheckedLoad
from mergekit_rotation.symmetry import bias_of


class ModelTensors:
    """Loads of one model.

    Parameters
    ----------
    context : Context
    model : ModelReference
    module : str
        Name of mergekit's module.

    Raises
    ------
    Unsupported
        If the family of the model is not known.
    """

    def __init__(self, context: Context, model: ModelReference, module: str):
        self.context = context
        self.model = model
        self.module = module
        self.checkpoint = context.checkpoint(model)
        self.family, self.layer = layout_of(self.checkpoint)  # of the first layer
        self.stream = self.family.stream_of(self.checkpoint.model_class)
        self._infos: dict[int | None, dict[str, WeightInfo]] = {}
        self._blocks: dict[int, tuple[Block, ...]] = {}

    @cached_property
    def num_layers(self) -> int:
        """Number of layers."""
        return int(self._arch.num_layers())

    def blocks(self, index: int) -> tuple[Block, ...]:
        """Return the symmetric blocks of a layer."""
        if index not in self._blocks:  # asked for with every tensor of the layer
            self._blocks[index] = layout_of(self.checkpoint, index)[1].blocks
        return self._blocks[index]

    @property
    def _arch(self) -> Any:
        return self.context.planner._model_arch(self.model).get_module(self.module)

    def infos(self, index: int | None) -> dict[str, WeightInfo]:
        """Map templates to mergekit's descriptions of the tensors of a layer, or of the rest."""
        if index not in self._infos:
            arch = self._arch
            if index is None:
                weights = [*arch.pre_weights(), *arch.post_weights()]
            else:
                weights = arch.layer_weights(index=index)
            prefix = self.context.planner.arch_info.modules[self.module].weight_prefix or ""
            names = {weight.name: weight for weight in weights}
            found = {}
            for template in self.stream.known:
                if (LAYER in template) == (index is not None):
                    info = find(self.family, prefix, template, index, names)
                    if info is not None:
                        found[template] = info
            if index is None:
                self._add_tied_heads(found, prefix)
            self._infos[index] = found
        return self._infos[index]

    def _add_tied_heads(self, found: dict[str, WeightInfo], prefix: str) -> None:
        """Describe heads that mergekit's definition leaves out because they are always tied."""
        for head, embedding in self.stream.tied.items():
            if embedding in found and head not in found:
                source = found[embedding]
                found[head] = WeightInfo(
                    name=prefix + head,
                    optional=True,
                    vocabulary_axis=source.vocabulary_axis,
                    tied_names=(source.name, *(source.aliases or ())),
                )

    def load(
        self, template: str, index: int | None, label: str | None = None
    ) -> CheckedLoad | None:
        """Return the load of a tensor, or None where mergekit's definition has no such tensor."""
        info = self.infos(index).get(template)
        if info is None:
            return None
        options = self.context.planner.options
        load = CheckedLoad(
            model=self.model,
            tensor=info.name,
            device=options.device if options.read_to_gpu else None,
            optional=info.optional,
            aliases=info.aliases,
            tied_names=info.tied_names,
            label=label,
            leg=True,
        )
        self.context.check_present(load)
        return load

    def has(self, template: str, index: int | None) -> bool:
        """Tell whether the model holds a tensor, under its own name or tied to another."""
        load = self.load(template, index)
        return load is not None and self.checkpoint.has(load)

    def read(self, template: str, index: int | None) -> torch.Tensor | None:
        """Read a tensor at once, checked as every input is."""
        load = self.load(template, index)
        if load is None or not self.checkpoint.has(load):
            return None
        return load.execute()

    def reader_biases(self) -> list[str]:
        """Templates of the biases that take up what a norm's bias becomes (LayerNorm)."""
        layout = self.stream.layout
        readers = [reader for of in layout.readers.values() for reader in of]
        return [bias_of(reader) for reader in readers] if layout.layer_norm else []

    def check_complete(self) -> None:
        """Refuse a model with tensors of which the family does not say how they move.

        Raises
        ------
        Unsupported
        """
        known: set[str] = set()
        for index in (None, *range(self.num_layers)):
            for info in self.infos(index).values():
                known |= {info.name, *(info.aliases or ()), *(info.tied_names or ())}
        prefixes = {p for prefix in self.family.prefixes for p in (prefix, "")}
        for template in self.stream.known:
            layers = range(self.num_layers) if LAYER in template else [0]
            known |= {p + template.replace(LAYER, str(i)) for p in prefixes for i in layers}
        for name in self.checkpoint.index.tensor_paths:
            if name not in known and known.isdisjoint(self.checkpoint.converted(name)):
                raise Unsupported(
                    f"{self.model}: the family {self.family.family} does not say how {name} moves "
                    "with the residual stream; set align_residual: none"
                )


def find(
    family: Family, prefix: str, template: str, index: int | None, names: dict[str, WeightInfo]
) -> WeightInfo | None:
    """Return the entry of ``names`` that a template stands for, if any."""
    local = template if index is None else template.replace(LAYER, str(index))
    for family_prefix in family.prefixes:
        if prefix + family_prefix + local in names:
            return names[prefix + family_prefix + local]
    return None
