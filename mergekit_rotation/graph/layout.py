"""Whether two checkpoints have layers that can be aligned: families, sizes, file headers."""

from collections.abc import Container

from mergekit.io.tasks import LoadTensor

from mergekit_rotation.architecture import (
    Block,
    Family,
    Layer,
    LayoutError,
    supported,
)
from mergekit_rotation.graph.checkpoints import FLOATING, Checkpoint
from mergekit_rotation.graph.errors import RotationError
from mergekit_rotation.symmetry import AttentionLayout


class Unsupported(Exception):
    """A model or layer that does not fit the reference; the message names the remedy."""


def layout_of(checkpoint: Checkpoint, index: int = 0) -> tuple[Family, Layer]:
    """Return the family of a model and the layout of one of its layers.

    Raises
    ------
    Unsupported
        If there is no data file for its class, or its configuration contradicts itself.
    """
    config, family = checkpoint.config, checkpoint.family
    if family is None:
        raise Unsupported(
            f"{checkpoint.model}: no symmetries are known for {checkpoint.model_class} "
            f"({config.model_type}); supported are {', '.join(supported())}; use the method "
            "without rotation_, or declare them in a file of your own (align_architecture)"
        )
    try:
        return family, family.layer(config, index)
    except LayoutError as problem:
        raise Unsupported(f"{checkpoint.model}: {problem}; repair its config.json") from problem


def check_same_layout(
    reference: Checkpoint, other: Checkpoint, layers: tuple[int, int] = (0, 0)
) -> tuple[Family, Layer]:
    """Return the layout of a layer of the reference if that of the other model has the same.

    Raises
    ------
    Unsupported
        Naming the first size that differs.
    """
    family, ours = layout_of(reference, layers[0])
    _, theirs = layout_of(other, layers[1])
    for axis, size in ours.sizes.items():
        if theirs.sizes.get(axis) != size:
            raise Unsupported(
                f"{other.model}: {family.size_names[axis]} is {theirs.sizes.get(axis)}, but {size} "
                f"in the reference {reference.model}, and layers of different shape cannot be "
                "aligned; remove the model"
            )
    if len(ours.blocks) != len(theirs.blocks):
        raise Unsupported(
            f"{other.model}: a layer of {other.model_class} has other parts than one of "
            f"{reference.model_class}, the class of the reference {reference.model}; remove it"
        )
    for a, b in zip(ours.blocks, theirs.blocks, strict=True):
        if a.layout != b.layout:
            raise Unsupported(
                f"{other.model}: {a.kind} of its layer {layers[1]} differ in kind from those of "
                f"layer {layers[0]} of the reference {reference.model}; remove the model"
            )
    return family, ours


def present_blocks(layer: Layer, present: Container[str], model: object) -> list[Block]:
    """Return the blocks of a layer, without those that are alternatives to the ones it has.

    Raises
    ------
    Unsupported
        If a block lacks a tensor, or nothing is left of the layer's alternatives.
    """
    blocks = [block for block in layer.blocks if not block.absent(present)]
    for block in blocks:
        for template in block.missing(present):
            raise Unsupported(
                f"{model}: mergekit does not plan {template}, which moves with the rest of its "
                "layer; use the method without rotation_"
            )
    heads = [block for block in layer.blocks if isinstance(block.layout, AttentionLayout)]
    feed_forward = [block for block in layer.blocks if block not in heads]
    parts = {"feed-forward": feed_forward} | ({"attention": heads} if len(heads) > 1 else {})
    for part, alternatives in parts.items():
        if alternatives and not any(block in blocks for block in alternatives):
            raise Unsupported(
                f"{model}: mergekit plans no tensor of the {part} part of a layer; use the "
                "method without rotation_"
            )
    return blocks


def check_header(checkpoint: Checkpoint, load: LoadTensor, expected: tuple[int, ...]) -> None:
    """Check what a file header tells of a tensor that will be moved.

    Raises
    ------
    RotationError
        If it is not stored in floating point.
    Unsupported
        If it does not have the shape that the configuration demands.
    """
    name = checkpoint.resolve(load)
    header = checkpoint.header(name) if name is not None else None
    if header is None:
        return
    shape, dtype = header
    if dtype not in FLOATING:
        raise RotationError(
            f"{load.model}: {name} is stored as {dtype}; quantised weights cannot be aligned or "
            "merged, use the unquantised model"
        )
    if shape != expected:
        raise Unsupported(
            f"{load.model}: {name} has shape {list(shape)} where its config demands "
            f"{list(expected)}; repair or remove the model"
        )
