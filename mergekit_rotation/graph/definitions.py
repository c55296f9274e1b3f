"""Definitions of architectures that mergekit lacks, made of a family's data and a file's names.

mergekit's own definition is used where it fits the models of a merge: where the planner can work
with it, the models have every tensor that it demands, and it loses none that a model uses. Where a
data file does not tell of all tensors, only the depth of mergekit's is mended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mergekit.architecture import (
    ModelArchitecture,
    ModuleArchitecture,
    ModuleDefinition,
    WeightInfo,
    arch_info_for_config,
)
from mergekit.architecture.json_definitions import JsonModuleArchitecture
from mergekit.common import ModelReference, get_config_value
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache, LoadTensor
from mergekit.options import MergeOptions
from transformers import PretrainedConfig

from mergekit_rotation.architecture import LAYER, Declared, Family
from mergekit_rotation.architecture.sizes import lookup
from mergekit_rotation.graph.checkpoints import FLOATING, Checkpoint, read_config
from mergekit_rotation.graph.context import known_families
from mergekit_rotation.graph.errors import RotationError

#: what transformers still reads under another name, whatever the architecture
_FORMER = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


def definition(config: MergeConfiguration, options: MergeOptions) -> ModelArchitecture | None:
    """Return a definition for the models of a merge, or None where mergekit's own will do.

    Parameters
    ----------
    config : MergeConfiguration
        Of a ``rotation_*`` merge.
    options : MergeOptions
    """
    LoaderCache().setup(options=options)
    known = known_families(config.parameters)
    checkpoints = [
        Checkpoint(model, read_config(model, options.trust_remote_code), known)
        for model in config.referenced_models()
    ]
    if not checkpoints:
        return None
    model_class, family = checkpoints[0].model_class, checkpoints[0].family
    if any(c.model_class != model_class or c.family is not family for c in checkpoints):
        return None
    if family is None:
        return None
    stock = arch_info_for_config(checkpoints[0].config)
    if not family.stream.tensors:  # more of a model than the data file tells of
        return None if stock is None else _with_depth(stock, family, checkpoints[0].config)
    names = Names(family, model_class, checkpoints)
    if stock is not None and all(_fits(stock, names, c) for c in checkpoints):
        return None
    return ModelArchitecture(
        modules=names.modules(),
        architectures=[model_class],
        model_type=checkpoints[0].config.model_type,
        tagalong_files=stock.tagalong_files if stock is not None else None,
        vocab_size_config_key=stock.vocab_size_config_key if stock is not None else None,
    )


def _with_depth(
    stock: ModelArchitecture, family: Family, config: PretrainedConfig
) -> ModelArchitecture | None:
    """Return mergekit's definition with the depth where the data file has it; None if it is there.

    mergekit reads the depth of Qwen2-VL where transformers had it before version 5.
    """
    modules = {name: stock.modules[name] for name in family.modules if name in stock.modules}
    moved = {}
    for name, module in modules.items():
        architecture = module.architecture
        if isinstance(architecture, JsonModuleArchitecture):
            key = architecture.definition.num_layers_config_key
            if key is not None and lookup(config, key) is None:
                place = {"num_layers_config_key": family.layers[""]}
                found = architecture.definition.model_copy(update=place)
                moved[name] = module.model_copy(
                    update={"architecture": JsonModuleArchitecture(definition=found)}
                )
    return stock.model_copy(update={"modules": {**stock.modules, **moved}}) if moved else None


def _fits(stock: ModelArchitecture, names: "Names", checkpoint: Checkpoint) -> bool:
    """Tell whether mergekit can plan and merge a model, and loses no tensor of it that moves."""
    planned: set[str] = set()
    for weight in stock.all_weights(checkpoint.config):
        planned |= {weight.name, *(weight.aliases or ()), *(weight.tied_names or ())}
        if weight.optional and weight.aliases:  # mergekit.plan adds a tuple to a list
            return False
        load = LoadTensor(
            model=checkpoint.model,
            tensor=weight.name,
            aliases=weight.aliases,
            tied_names=weight.tied_names,
        )
        if not weight.optional and checkpoint.resolve(load) is None:
            if names.loadable(checkpoint).isdisjoint((load.tensor, *(load.aliases or ()))):
                return False
    tied = names.family.stream.tied
    moving = (t for t, declared in names.declared.items() if declared.moves and t not in tied)
    used = {name for t in moving for i in names.indices(t) for name in names.spellings(t, i)}
    return planned >= used & set(checkpoint.index.tensor_paths)


class Names:
    """Which tensors of a family the models of a merge have, and what they call them.

    Parameters
    ----------
    family : Family
    model_class : str
    checkpoints : sequence of Checkpoint
        The first one's names are those of the output.
    """

    def __init__(self, family: Family, model_class: str, checkpoints: Sequence[Checkpoint]):
        self.family = family
        self.declared: Mapping[str, Declared] = family.declared(model_class)
        self.checkpoints = checkpoints
        config = checkpoints[0].config
        self._loadable: dict[ModelReference, frozenset[str]] = {}
        self.depths = {s: int(get_config_value(config, key)) for s, key in family.layers.items()}

    def loadable(self, checkpoint: Checkpoint) -> frozenset[str]:
        """Return every name that mergekit may load a tensor of a model by, converting its files."""
        if checkpoint.model not in self._loadable:
            stored = checkpoint.index.tensor_paths
            every = frozenset(name for one in stored for name in checkpoint.converted(one))
            self._loadable[checkpoint.model] = every
        return self._loadable[checkpoint.model]

    def stack(self, template: str) -> str:
        """Return how the names of the layers begin that a template stands for."""
        return next(start for start in self.family.layers if template.startswith(start))

    def indices(self, template: str) -> Sequence[int]:
        """Return the layers that a template stands for; 0 for a tensor outside of the layers."""
        return range(self.depths[self.stack(template)]) if LAYER in template else (0,)

    def spellings(
        self, template: str, index: int | str, prefixes: Sequence[str] | None = None
    ) -> list[str]:
        """Return every name that a tensor may have in a file."""
        local = template.replace(LAYER, str(index))
        former = [local.removesuffix(n) + old for n, old in _FORMER.items() if local.endswith(n)]
        return [
            prefix + name
            for prefix in prefixes or self.family.prefixes
            for name in (local, *former)
        ]

    def holds(self, checkpoint: Checkpoint, template: str, index: int) -> bool:
        """Tell whether a model holds a tensor that can be averaged."""
        names = self.spellings(template, index)
        for name in names:
            if name in checkpoint.index.tensor_paths:
                header = checkpoint.header(name)
                return header is None or header[1] in FLOATING or self.declared[template].moves
        return not self.loadable(checkpoint).isdisjoint(names)

    # -- mergekit's objects -------------------------------------------------------------------

    def modules(self) -> dict[str, ModuleDefinition]:
        """Return one module for each stack of layers; the first has all that is in none."""
        weights = {t: self._weight(t) for t in self.declared}
        present = {template: weight for template, weight in weights.items() if weight is not None}
        loose = [template for template in present if LAYER not in template]
        modules = {}
        for number, (start, key) in enumerate(self.family.layers.items()):
            mine = [] if number else loose
            layers = [t for t in present if LAYER in t and self.stack(t) == start]
            module = Module(
                before=tuple(present[t].info for t in mine if not self.declared[t].last),
                layers=tuple(present[t] for t in layers),
                behind=tuple(present[t].info for t in mine if self.declared[t].last),
                depth=self.depths[start],
                depth_key=key,
            )
            name = start.rstrip(".").rpartition(".")[2] or "default"
            modules[name] = ModuleDefinition(architecture=module)
        return modules

    def _weight(self, template: str) -> "LayerWeight | None":
        """Return what mergekit needs to know of a tensor; None where no model has it."""
        declared, indices = self.declared[template], self.indices(template)
        found = {i: [self.holds(c, template, i) for c in self.checkpoints] for i in indices}
        some = frozenset(i for i, held in found.items() if any(held))
        if not some and not declared.needed:
            return None
        every = declared.needed or all(all(found[i]) for i in some)
        name = self._name(template, min(some, default=0))
        names = self.spellings(template, LAYER)
        embedding = self.family.stream.tied.get(template)
        info = WeightInfo(
            name=name,
            optional=not every,
            aliases=tuple(n for n in names if n != name) if every and len(names) > 1 else None,
            vocabulary_axis=declared.vocabulary_axis,
            tied_names=tuple(self.spellings(embedding, 0)) if embedding is not None else None,
        )
        whole = declared.needed or len(some) == len(indices)
        return LayerWeight(info, None if whole else some)

    def _name(self, template: str, index: int) -> str:
        """Return the name in the output, with the prefix that the first model has there."""
        first = self.checkpoints[0]
        stored = set(first.index.tensor_paths)
        for prefix in self.family.prefixes:
            if stored.intersection(self.spellings(template, index, (prefix,))):
                return prefix + template
        for prefix in self.family.prefixes:
            name = prefix + template.replace(LAYER, str(index))
            if name in self.loadable(first):
                return prefix + template
        return self.family.prefixes[0] + template


@dataclass(frozen=True)
class LayerWeight:
    """One tensor of a layer, or outside of the layers.

    Attributes
    ----------
    info : WeightInfo
        Its names are templates.
    layers : frozenset of int, optional
        The layers that have it; None if all have.
    """

    info: WeightInfo
    layers: frozenset[int] | None = None

    def at(self, index: int, depth: int) -> WeightInfo:
        """Return mergekit's description of the tensor of one layer.

        Raises
        ------
        RotationError
            If the layers of the models differ in kind and this one is beyond them.
        """
        if self.layers is not None and index >= depth:
            raise RotationError(
                f"{self.info.name}: not every layer has it, so layers cannot be added to such a "
                f"model; make an output of at most {depth} layers"
            )
        change = {
            "name": self.info.name.replace(LAYER, str(index)),
            "aliases": tuple(a.replace(LAYER, str(index)) for a in self.info.aliases or ()) or None,
        }
        if self.layers is not None and index not in self.layers:
            change |= {"optional": True, "aliases": None}
        return self.info.model_copy(update=change)


@dataclass(frozen=True)
class Module(ModuleArchitecture):
    """One stack of layers, as mergekit asks for it.

    Attributes
    ----------
    before, behind : tuple of WeightInfo
    layers : tuple of LayerWeight
    depth : int
    depth_key : str
        Name of the depth in the configuration.
    """

    before: tuple[WeightInfo, ...]
    layers: tuple[LayerWeight, ...]
    behind: tuple[WeightInfo, ...]
    depth: int
    depth_key: str

    def pre_weights(self, config: PretrainedConfig) -> list[WeightInfo]:
        """Return the tensors before the first layer."""
        return list(self.before)

    def layer_weights(self, index: int, config: PretrainedConfig) -> list[WeightInfo]:
        """Return the tensors of a layer."""
        return [weight.at(index, self.depth) for weight in self.layers]

    def post_weights(self, config: PretrainedConfig) -> list[WeightInfo]:
        """Return the tensors after the last layer."""
        return list(self.behind)

    def num_layers_config_key(self) -> str:
        """Return the name of the depth in the configuration."""
        return self.depth_key
