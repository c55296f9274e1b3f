"""The frozen models that read a family's JSON file."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import BaseModel, ConfigDict, field_validator

from mergekit_rotation.architecture.sizes import LayoutError, first, lookup
from mergekit_rotation.symmetry import (
    STREAM_AXES,
    AttentionLayout,
    DirectSum,
    Group,
    NeuronLayout,
    Orthogonal,
    Pattern,
    PlaneRotations,
    PlaneSigns,
    StreamLayout,
    Trivial,
    bias_of,
    rotary_pairs,
)

__all__ = [
    "Block",
    "Family",
    "Layer",
    "LayoutError",
    "Stream",
    "all_families",
    "find_family",
    "supported",
]


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HeadGroup(_Data):
    """The group that acts on one axis of the heads.

    Attributes
    ----------
    group : str
        ``orthogonal``; ``rotary``: a phase per frequency pair on the rotary dimensions and
        ``orthogonal`` on the rest; ``rotary_sign``: a sign per frequency pair, the rest fixed.
    pairing : str
        Which dimensions rotary embedding pairs.
    rotary_dims : tuple of str
        Size expressions of the number of rotary dimensions.
    unless : str, optional
        Path of a configuration switch under which the symmetry is not there.
    """

    group: Literal["orthogonal", "rotary", "rotary_sign"]
    pairing: Literal["half", "interleaved"] = "half"
    rotary_dims: tuple[str, ...] = ()
    unless: str | None = None

    def build(self, axis: str, config: object, sizes: Mapping[str, int]) -> Group:
        """Return the group for one configuration."""
        n = sizes[axis]
        if self.unless is not None and lookup(config, self.unless):
            return Trivial(n)
        if self.group == "orthogonal":
            return Orthogonal(n)
        rotary = first(self.rotary_dims, config, sizes, "rotary_dims")
        if rotary % 2 or rotary > n:
            raise LayoutError(f"{rotary} rotary dimensions in a head of {n}")
        pairs = rotary_pairs(rotary, self.pairing)
        planes = (PlaneRotations if self.group == "rotary" else PlaneSigns)(rotary, pairs)
        if rotary == n:
            return planes
        rest = Orthogonal(n - rotary) if self.group == "rotary" else Trivial(n - rotary)
        return DirectSum((planes, rest))


class AttentionData(_Data):
    """Heads of one attention layer: axes ``kv``, ``g``, ``qk``, ``vo`` (see `AttentionLayout`)."""

    query_key: HeadGroup
    value_output: HeadGroup
    tensors: Mapping[str, str]


class NeuronData(_Data):
    """Neurons of one feed-forward layer: axis ``f`` (see `NeuronLayout`)."""

    tensors: Mapping[str, str]


class StreamData(_Data):
    """The residual stream: axis ``e`` (see `mergekit_rotation.symmetry.stream`).

    Attributes
    ----------
    norm : str
        ``rms`` or ``layer``.
    offset : float
        What the model adds to a stored norm weight.
    maps : tuple of str
        Which maps of the stream leave the function unchanged.
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
    """

    norm: Literal["rms", "layer"]
    offset: float = 0.0
    maps: tuple[Literal["permutation", "orthogonal"], ...]
    tensors: Mapping[str, str]
    classes: Mapping[str, Mapping[str, str]] = {}
    norms: Mapping[str, tuple[str, ...]]
    tied: Mapping[str, str] = {}
    fixed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stream:
    """The residual stream of one model class.

    Attributes
    ----------
    layout : StreamLayout
        Its tensor names are templates; those of the blocks are included.
    known : frozenset of str
        Templates of all tensors that a model of the class may have.
    maps, tied
        As in `StreamData`.
    """

    layout: StreamLayout
    known: frozenset[str]
    maps: tuple[str, ...]
    tied: Mapping[str, str]


@dataclass(frozen=True)
class Block:
    """Tensors that one solve moves together.

    Attributes
    ----------
    kind : {"attention", "neurons"}
    layout : AttentionLayout or NeuronLayout
        Its tensor names are templates with ``${layer_index}``.
    optional : frozenset of str
        Templates that a model may lack (biases).
    """

    kind: Literal["attention", "neurons"]
    layout: AttentionLayout | NeuronLayout
    optional: frozenset[str]


@dataclass(frozen=True)
class Layer:
    """The symmetric parts of one layer for one model configuration."""

    blocks: tuple[Block, ...]
    sizes: Mapping[str, int]


class Family(_Data):
    """One architecture family, as read from its data file.

    Attributes
    ----------
    family : str
        Name, also that of the file.
    models : mapping of str to tuple of str
        ``model_type`` of the configuration to the model classes whose layers look like this.
    sizes : mapping of str to tuple of str
        Axis to size expressions, in the order in which they are evaluated.
    size_names : mapping of str to str
        Axis to the field's standard term, for messages.
    prefixes : tuple of str
        What may stand before the tensor names.
    attention, neurons
        The symmetric blocks of every layer. A tensor name that ends in ``?`` may be absent.
    stream
        The residual stream that the blocks read and write.
    notes : str
        What is left untouched in this family, and why; for the table of support.
    """

    family: str
    models: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, tuple[str, ...]]
    size_names: Mapping[str, str]
    prefixes: tuple[str, ...] = ("",)
    attention: AttentionData
    neurons: NeuronData
    stream: StreamData
    notes: str = ""

    @field_validator("sizes")
    @classmethod
    def _name_every_axis(
        cls, sizes: Mapping[str, tuple[str, ...]]
    ) -> Mapping[str, tuple[str, ...]]:
        missing = {"kv", "qk", "vo", "f", "e"} - set(sizes)
        if missing:
            raise ValueError(f"sizes of axes {sorted(missing)} are missing")
        return sizes

    def layer(self, config: object) -> Layer:
        """Return the layouts of a layer for a transformers configuration.

        Raises
        ------
        LayoutError
            If a size is missing from the configuration or does not divide.
        """
        sizes: dict[str, int] = {}
        for axis, expressions in self.sizes.items():
            sizes[axis] = first(expressions, config, sizes, axis)
        attention, absent = _patterns(self.attention.tensors)
        heads = AttentionLayout(
            patterns=attention,
            sizes=sizes,
            query_key=self.attention.query_key.build("qk", config, sizes),
            value_output=self.attention.value_output.build("vo", config, sizes),
        )
        neurons, missing = _patterns(self.neurons.tensors)
        return Layer(
            blocks=(
                Block("attention", heads, absent),
                Block("neurons", NeuronLayout(neurons, sizes), missing),
            ),
            sizes=sizes,
        )

    def stream_of(self, model_class: str) -> Stream:
        """Return the residual stream of a model class."""
        data = self.stream
        tensors = {**data.tensors, **data.classes.get(model_class, {})}
        blocks = {**self.attention.tensors, **self.neurons.tensors}
        every, _ = _patterns({**blocks, **tensors})
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


def find_family(model_type: str, model_class: str) -> Family | None:
    """Return the family that declares this model class for this ``model_type``, if any."""
    for family in all_families():
        if model_class in family.models.get(model_type, ()):
            return family
    return None


def supported() -> list[str]:
    """Names of the supported families, for messages."""
    return [family.family for family in all_families()]
