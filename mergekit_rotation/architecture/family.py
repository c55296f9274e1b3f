"""The frozen models that read a family's JSON file."""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from mergekit_rotation.architecture.parts import Block, Declared, Layer, Stream
from mergekit_rotation.architecture.sizes import LayoutError, first, lookup
from mergekit_rotation.symmetry import (
    STREAM_AXES,
    AttentionLayout,
    DirectSum,
    ExpertLayout,
    Group,
    NeuronLayout,
    Orthogonal,
    Pattern,
    PlaneRotations,
    PlaneSigns,
    Signs,
    StreamLayout,
    Trivial,
    bias_of,
    rotary_pairs,
)

__all__ = [
    "LAYER",
    "Conditions",
    "Family",
    "LayoutError",
    "all_families",
    "find_family",
    "holds",
    "supported",
]


#: stands for the index of a layer in the names of tensors
LAYER = "${layer_index}"

#: paths into a configuration, with the values under which something holds
Conditions = Mapping[str, tuple[Any, ...]]


_ONE_OR_MORE = BeforeValidator(lambda x: x if isinstance(x, list | tuple) else (x,))


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def holds(when: Conditions, config: object, layer: int = 0) -> bool:
    """Tell whether a configuration has one of the given values at every path."""
    return all(lookup(config, path, layer) in values for path, values in when.items())


class HeadGroup(_Data):
    """The group that acts on one axis of the heads.

    Attributes
    ----------
    group : str
        ``orthogonal``; ``rotary``: a phase per frequency pair on the rotary dimensions and
        ``orthogonal`` on the rest; ``rotary_sign``: a sign per frequency pair, and ``sign`` on
        the rest; ``sign``: a sign per dimension; ``none``.
    pairing : str
        Which dimensions rotary embedding pairs.
    rotary_dims : tuple of str
        Size expressions of the number of rotary dimensions.
    when : mapping of str to tuple
        Under which configurations it is this group; ``[layer]`` in a path is the layer's entry.
    """

    group: Literal["orthogonal", "rotary", "rotary_sign", "sign", "none"]
    pairing: Literal["half", "interleaved"] = "half"
    rotary_dims: tuple[str, ...] = ()
    when: Conditions = {}

    def build(self, axis: str, config: object, sizes: Mapping[str, int]) -> Group:
        """Return the group for one configuration."""
        n = sizes[axis]
        if self.group == "none":
            return Trivial(n)
        if self.group == "orthogonal":
            return Orthogonal(n)
        if self.group == "sign":
            return Signs(n)
        rotary = first(self.rotary_dims, config, sizes, "rotary_dims")
        if rotary % 2 or rotary > n:
            raise LayoutError(f"{rotary} rotary dimensions in a head of {n}")
        pairs = rotary_pairs(rotary, self.pairing)
        planes = (PlaneRotations if self.group == "rotary" else PlaneSigns)(rotary, pairs)
        if rotary == n:
            return planes
        rest = Orthogonal(n - rotary) if self.group == "rotary" else Signs(n - rotary)
        return DirectSum((planes, rest))


class AttentionData(_Data):
    """Heads of one attention layer: axes ``kv``, ``g``, ``qk``, ``vo`` (see `AttentionLayout`).

    Attributes
    ----------
    name : str
    query_key : tuple of HeadGroup
        The first whose conditions hold counts; without one, queries and keys are left alone.
    value_output : HeadGroup
    heads : bool
        Whether heads can be reordered.
    optional : bool
        Whether layers without any of the tensors are to be expected.
    shifted : tuple of str
        Biases of keys to which any vector can be added where position does not turn it (softmax).
    folded : mapping of str to str
        Biases of values, to the biases of the outputs that can take their place.
    tensors : mapping of str to str
    """

    name: str = "attention"
    query_key: Annotated[tuple[HeadGroup, ...], _ONE_OR_MORE]
    value_output: HeadGroup
    heads: bool = True
    optional: bool = False
    shifted: tuple[str, ...] = ()
    folded: Mapping[str, str] = {}
    tensors: Mapping[str, str]

    @model_validator(mode="after")
    def _know_free_biases(self) -> "AttentionData":
        """Refuse free biases that are no tensors of the block."""
        strangers = {*self.shifted, *self.folded} - {n.removesuffix("?") for n in self.tensors}
        if strangers:
            raise ValueError(f"shifted or folded {sorted(strangers)} are no tensors")
        return self

    def build(
        self, config: object, sizes: Mapping[str, int], layer: int, alternative: bool
    ) -> Block:
        """Return the block of one layer; `alternative` to others, see `Block`."""
        patterns, absent = _patterns(self.tensors)
        chosen = next((g for g in self.query_key if holds(g.when, config, layer)), None)
        layout = AttentionLayout(
            patterns=patterns,
            sizes=sizes,
            query_key=(chosen or HeadGroup(group="none")).build("qk", config, sizes),
            value_output=self.value_output.build("vo", config, sizes),
            shifted=frozenset(self.shifted),
            folded=frozenset(self.folded),
        )
        return Block(self.name, layout, absent, alternative, self.heads, self.folded)


class NeuronData(_Data):
    """Neurons of one feed-forward layer: axis ``f`` (see `NeuronLayout`).

    Attributes
    ----------
    name : str
    axis : str
        What the tensors call the axis of the neurons, where a family has several.
    scaled_when : mapping of str to tuple
        Under which configurations the exponents of neurons hold.
    tensors : mapping of str to str
    """

    name: str = "neurons"
    axis: str = "f"
    scaled_when: Conditions = {}
    tensors: Mapping[str, str]

    def build(
        self, config: object, sizes: Mapping[str, int], layer: int, alternative: bool
    ) -> Block:
        """Return the block of one layer, in which ``f`` stands for the neurons."""
        tensors = _as_neurons(self.tensors, self.axis)
        if not holds(self.scaled_when, config):
            tensors = {name: re.sub(r"\^-?\d", "", text) for name, text in tensors.items()}
        patterns, absent = _patterns(tensors)
        layout = NeuronLayout(patterns, {**sizes, "f": sizes[self.axis]})
        return Block(self.name, layout, absent, alternative)


class ExpertData(_Data):
    """Experts of one layer: axis ``x``, and ``xf``, the neurons of each (see `ExpertLayout`).

    Attributes
    ----------
    groups : tuple of str
        Size expressions of the number of groups that a router chooses first; one without any.
    shifted : tuple of str
        Tensors to whose entries along ``x`` a common vector can be added (softmax routers).
    tensors : mapping of str to str
    """

    groups: tuple[str, ...] = ()
    shifted: tuple[str, ...] = ()
    tensors: Mapping[str, str]

    def build(
        self, config: object, sizes: Mapping[str, int], layer: int, alternative: bool
    ) -> Block:
        """Return the block of one layer, in which ``f`` stands for the neurons of an expert."""
        patterns, absent = _patterns(_as_neurons(self.tensors, "xf"))
        groups = first((*self.groups, "1"), config, sizes, "groups")
        mine = {**sizes, "f": sizes["xf"]}
        layout = ExpertLayout(patterns, mine, groups, frozenset(self.shifted))
        return Block("experts", layout, absent, alternative)


class StreamData(_Data):
    """The residual stream: axis ``e`` (see `mergekit_rotation.symmetry.stream`).

    Attributes
    ----------
    norm : str
        ``rms`` or ``layer``.
    offset : float
        What the model adds to a stored norm weight.
    maps : tuple of str
        Which maps of the stream leave the function unchanged. Without any, the stream stays as it
        is, and nothing else needs to be said of it.
    tensors : mapping of str to str
        The tensors of the stream that belong to no block.
    classes : mapping of str to mapping
        More of them, for single model classes.
    norms : mapping of str to tuple of str
        Weights of the norms that stand before a branch or a head, and the weights that read them.
        Their biases, and those of the readers, are named alike.
    tied : mapping of str to str
        Output heads, and the embeddings that stand in for them where a model has none.
    fixed : tuple of str
        Tensors that a model may have and that lie outside of the stream.
    last : tuple of str
        Those of ``tensors`` that follow the last layer, beyond the heads and the norms before them.
    """

    norm: Literal["rms", "layer"]
    offset: float = 0.0
    maps: tuple[Literal["permutation", "orthogonal"], ...]
    tensors: Mapping[str, str] = {}
    classes: Mapping[str, Mapping[str, str]] = {}
    norms: Mapping[str, tuple[str, ...]] = {}
    tied: Mapping[str, str] = {}
    fixed: tuple[str, ...] = ()
    last: tuple[str, ...] = ()


class Family(_Data):
    """One architecture family, as read from its data file.

    Attributes
    ----------
    family : str
        Name, also that of the file.
    models : mapping of str to tuple of str
        ``model_type`` of the configuration to the model classes whose layers look like this.
    when : mapping of str to tuple
        Under which configurations the file holds.
    unless : mapping of str to tuple
        Under which of these it does not.
    sizes : mapping of str to tuple of str
        Axis to size expressions, in the order in which they are evaluated.
    size_names : mapping of str to str
        Axis to the field's standard term, for messages.
    prefixes : tuple of str
        What may stand before the tensor names.
    modules : tuple of str
        Which of mergekit's modules the layers belong to; without any, the model has just one.
    layers : mapping of str to str
        How the tensor names of each stack of layers begin, to the stack's depth in the
        configuration.
    attention, neurons, experts
        The symmetric blocks of the layers. A tensor name that ends in ``?`` may be absent. With
        experts or several blocks of neurons, a layer may have any of them; so too with several
        blocks of heads.
    stream
        The residual stream that the blocks read and write.
    checked : str
        ``run``: transformers has the code, and random elements were applied to a model of it;
        ``read``: the code belongs to the checkpoint, and was read only.
    example : mapping
        Dotted paths to the entries of the configuration of a small model that has all that the file
        declares, where they do not follow from sizes and conditions; for ``mergekit-rotation
        check-architecture``.
    notes : str
        What is left untouched in this family, and why; for the table of support.
    """

    family: str
    models: Mapping[str, tuple[str, ...]]
    when: Conditions = {}
    unless: Conditions = {}
    sizes: Mapping[str, tuple[str, ...]]
    size_names: Mapping[str, str]
    prefixes: tuple[str, ...] = ("",)
    modules: tuple[str, ...] = ()
    layers: Mapping[str, str] = {"": "num_hidden_layers"}
    attention: Annotated[tuple[AttentionData, ...], _ONE_OR_MORE] = ()
    neurons: Annotated[tuple[NeuronData, ...], _ONE_OR_MORE] = ()
    experts: ExpertData | None = None
    stream: StreamData
    checked: Literal["run", "read"] = "run"
    example: Mapping[str, Any] = {}
    notes: str = ""

    @model_validator(mode="after")
    def _know_every_name(self) -> "Family":
        """Refuse axes without a size or a name, and norms whose readers are no tensors."""
        unnamed = set(self.sizes) - set(self.size_names)
        if unnamed:
            raise ValueError(f"size_names of axes {sorted(unnamed)} are missing")
        blocks = self.block_tensors()
        for name, text in blocks.items():
            unknown = Pattern.parse(text).axes - set(self.sizes)
            if unknown:
                raise ValueError(f"{name}: sizes of axes {sorted(unknown)} are missing")
        per_class = self.stream.classes.values()
        others = [self.stream.tensors, *per_class]
        for text in (text for tensors in others for text in tensors.values()):
            Pattern.parse(text)
        tensors = {name.removesuffix("?") for part in (blocks, *others) for name in part}
        for norm, readers in self.stream.norms.items():
            strangers = set(readers) - tensors
            if strangers:
                raise ValueError(f"{norm}: its readers {sorted(strangers)} are no tensors")
        return self

    def layer(self, config: object, index: int = 0) -> Layer:
        """Return the layouts of a layer for a transformers configuration.

        Parameters
        ----------
        config : PretrainedConfig
        index : int
            Which layer; all have the same sizes.

        Raises
        ------
        LayoutError
            If a size is missing from the configuration or does not divide.
        """
        sizes: dict[str, int] = {}
        for axis, expressions in self.sizes.items():
            sizes[axis] = first(expressions, config, sizes, axis)
        blocks = (data.build(config, sizes, index, some) for data, some in self._blocks())
        return Layer(tuple(blocks), sizes)

    def _blocks(self) -> Iterator[tuple[AttentionData | NeuronData | ExpertData, bool]]:
        """Yield every block, and whether layers without any of its tensors are to be expected."""
        for heads in self.attention:
            yield heads, heads.optional or len(self.attention) > 1
        experts = () if self.experts is None else (self.experts,)
        feed_forward = (*self.neurons, *experts)
        for units in feed_forward:
            yield units, len(feed_forward) > 1 or units is self.experts

    def block_tensors(self) -> dict[str, str]:
        """Return name and pattern of the tensors of all blocks, as the data file has them."""
        return {n: text for data, _ in self._blocks() for n, text in data.tensors.items()}

    def declared(self, model_class: str) -> dict[str, Declared]:
        """Return what is known of every tensor that models of a class may have, by template."""
        data = self.stream
        alternative = {name for block, some in self._blocks() if some for name in block.tensors}
        of_class = data.classes.get(model_class, {})
        texts = {
            **self.block_tensors(),
            **data.tensors,
            **of_class,
            **dict.fromkeys(data.norms, "e"),
        }
        behind = {name.removesuffix("?") for name in (*of_class, *data.last)}
        for norm, readers in data.norms.items():
            behind |= {norm, *readers}
        behind |= {*data.tied, *map(bias_of, behind | set(data.tied)), *data.fixed}
        result = {
            name.removesuffix("?"): Declared(
                needed=not name.endswith("?") and name not in alternative,
                moves=True,
                vocabulary_axis=Pattern.parse(text).dim_of("v"),
                last=name.removesuffix("?") in behind,
            )
            for name, text in texts.items()
        }
        for name in data.fixed:
            result.setdefault(name, Declared(False, False, None, name in behind))
        for norm, readers in data.norms.items():
            for bias in map(bias_of, (norm, *readers)):
                result.setdefault(bias, Declared(False, True, None, bias in behind))
        return result

    def stream_of(self, model_class: str) -> Stream:
        """Return the residual stream of a model class."""
        data = self.stream
        tensors = {**data.tensors, **data.classes.get(model_class, {})}
        every, _ = _patterns({**self.block_tensors(), **tensors})
        patterns = {name: p for name, p in every.items() if p.axes & set(STREAM_AXES)}
        norms: dict[str, Pattern] = {}
        biases: list[str] = []
        for norm, readers in data.norms.items():
            norms[norm] = Pattern.parse("e")
            if data.norm == "layer":
                norms[bias_of(norm)] = Pattern.parse("~e")
            biases += [bias_of(reader) for reader in readers]
        layout = StreamLayout(
            patterns={**patterns, **norms},
            readers=data.norms,
            layer_norm=data.norm == "layer",
            offset=data.offset,
        )
        known = {*every, *norms, *biases, *data.fixed}
        return Stream(layout, frozenset(known), data.maps, data.tied)


def _as_neurons(tensors: Mapping[str, str], axis: str) -> dict[str, str]:
    return {name: re.sub(rf"\b{axis}\b", "f", text) for name, text in tensors.items()}


def _patterns(tensors: Mapping[str, str]) -> tuple[dict[str, Pattern], frozenset[str]]:
    patterns = {name.removesuffix("?"): Pattern.parse(text) for name, text in tensors.items()}
    return patterns, frozenset(name[:-1] for name in tensors if name.endswith("?"))


@cache
def all_families() -> tuple[Family, ...]:
    """Read every data file, sorted by name."""
    folder = files("mergekit_rotation.architecture") / "data"
    texts = {f.name: f.read_text(encoding="utf-8") for f in folder.iterdir()}
    return tuple(
        Family.model_validate_json(texts[name]) for name in sorted(texts) if name.endswith(".json")
    )


def find_family(
    config: Any, model_class: str, families: Iterable[Family] | None = None
) -> Family | None:
    """Return the first family that declares a model class under a configuration, if any.

    Parameters
    ----------
    config : PretrainedConfig
    model_class : str
    families : iterable of Family, optional
        Ours if not given.
    """
    for family in all_families() if families is None else families:
        if model_class in family.models.get(config.model_type, ()):
            excluded = family.unless and holds(family.unless, config)
            if holds(family.when, config) and not excluded:
                return family
    return None


def supported() -> list[str]:
    """Names of the supported families, for messages."""
    return [family.family for family in all_families()]
