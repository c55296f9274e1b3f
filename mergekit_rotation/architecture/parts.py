"""What a family's data says of one model configuration: the layers' blocks, the stream, tensors."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from mergekit_rotation.symmetry import AttentionLayout, ExpertLayout, NeuronLayout, StreamLayout

__all__ = ["Block", "Declared", "Layer", "Stream"]


@dataclass(frozen=True)
class Declared:
    """What is known of one tensor, whether it moves or not.

    Attributes
    ----------
    needed : bool
        Whether every model has it. One of an alternative block is not.
    moves : bool
        Whether it belongs to a block or to the residual stream.
    vocabulary_axis : int, optional
        Dimension that counts tokens.
    last : bool
        Whether it follows the last layer.
    """

    needed: bool
    moves: bool
    vocabulary_axis: int | None
    last: bool


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
        As in the data file.
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
    kind : str
        ``experts``, or the name of a block of heads or neurons.
    layout : AttentionLayout, NeuronLayout or ExpertLayout
        Its tensor names are templates with ``${layer_index}``.
    optional : frozenset of str
        Templates that a model may lack (biases).
    alternative : bool
        Whether layers without any of the tensors are to be expected.
    heads : bool
        Whether heads can be reordered.
    output_biases : mapping of str to str
        Biases of values, to the biases of the outputs that can take their place.
    """

    kind: str
    layout: AttentionLayout | NeuronLayout | ExpertLayout
    optional: frozenset[str]
    alternative: bool = False
    heads: bool = True
    output_biases: Mapping[str, str] = field(default_factory=dict)

    def missing(self, present: Container[str]) -> list[str]:
        """Return the templates that a layer which has this block must hold, but does not."""
        patterns = self.layout.patterns
        return [name for name in patterns if name not in self.optional and name not in present]

    def absent(self, present: Container[str]) -> bool:
        """Tell whether a layer has another block in the place of this one."""
        return self.alternative and not any(name in present for name in self.layout.patterns)


@dataclass(frozen=True)
class Layer:
    """The symmetric parts of one layer for one model configuration."""

    blocks: tuple[Block, ...]
    sizes: Mapping[str, int]
