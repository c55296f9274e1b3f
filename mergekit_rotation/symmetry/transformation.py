"""The transformation of a whole model as a value: solved once, then saved, composed or applied."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from mergekit_rotation.symmetry.action import Transformation, inverse
from mergekit_rotation.symmetry.axes import Pattern
from mergekit_rotation.symmetry.norms import Norm, carried_bias, contracted, scaled
from mergekit_rotation.symmetry.stream import (
    SignedPermutation,
    StreamMap,
    act_stream,
    composed,
)

Tensors = Mapping[str, torch.Tensor]


def bias_of(weight: str) -> str:
    """Name of the bias that belongs to a weight."""
    return weight.removesuffix(".weight") + ".bias"


@dataclass(frozen=True)
class StreamLayout:
    """Which tensors make up the residual stream, and how its norms are read.

    Parameters
    ----------
    patterns : mapping of tensor name to Pattern
        Every tensor with an axis of the stream, norm weights (``e``) and biases (``~e``) included.
    readers : mapping of norm weight to tuple of names
        The weights that read each norm that stands before a branch or a head.
    layer_norm : bool
        LayerNorm (which removes the mean) instead of RMSNorm.
    offset : float
        What the model adds to a stored norm weight.
    carried : frozenset of str
        Norms with a reader without bias: their own bias is kept, in the new coordinates.
    """

    patterns: Mapping[str, Pattern]
    readers: Mapping[str, tuple[str, ...]]
    layer_norm: bool = False
    offset: float = 0.0
    carried: frozenset[str] = frozenset()

    def norm_of(self, name: str) -> str | None:
        """Return the norm that a weight or its bias reads, or that a norm's bias belongs to."""
        for norm, readers in self.readers.items():
            if name in (norm, bias_of(norm)):
                return norm
            if any(name in (reader, bias_of(reader)) for reader in readers):
                return norm
        return None

    def reads_alone(self, name: str, present: Container[str]) -> bool:
        """Tell whether no other tensor among those present reads the norm of this one."""
        norm = self.norm_of(name)
        others = () if norm is None else self.readers[norm]
        return not any(reader in present for reader in others if reader != name)

    def needed(self, names: Iterable[str]) -> list[str]:
        """Return the names of all tensors that moving some tensors takes.

        These are the norms of readers, and the weight of a reader whose bias is moved.
        """
        result = dict.fromkeys(names)
        for name in list(result):
            norm = self.norm_of(name)
            if norm is not None:
                result |= dict.fromkeys(r for r in self.readers[norm] if bias_of(r) == name)
                result |= dict.fromkeys([norm, bias_of(norm)] if self.layer_norm else [norm])
        return list(result)

    def norm(self, name: str, tensors: Tensors) -> Norm:
        """Return a norm of a model in float64, without the bias if that is carried."""
        weight = tensors[name].double() + self.offset
        bias = None if name in self.carried else tensors.get(bias_of(name))
        return Norm(weight, None if bias is None else bias.double())


@dataclass(frozen=True, eq=False)
class ModelTransformation:
    """What moves one model to the coordinates of a reference.

    Parameters
    ----------
    stream : SignedPermutation or OrthogonalMap, optional
        Map of the residual stream. With None, norms stay as they are, too.
    norms : mapping of (norm weight, reference layer, layer) to Norm
        The norms that the moved model gets (the reference's); layers are -1 outside of all.
    blocks : mapping of (block, reference layer, layer) to Transformation
        What acts on heads and neurons, after the map of the stream.
    """

    stream: StreamMap | None = None
    norms: Mapping[tuple[str, int, int], Norm] = field(default_factory=dict)
    blocks: Mapping[tuple[str, int, int], Transformation] = field(default_factory=dict)

    def then(self, other: "ModelTransformation") -> "ModelTransformation":
        """Return the transformation that applies this one and then another.

        The other one starts in the coordinates that this one leads to, so its layers are keyed by
        this one's reference layers.
        """
        if self.stream is None or other.stream is None:
            stream = self.stream or other.stream
        else:
            stream = composed(self.stream, other.stream)
        before = {a: b for _, a, b in (*self.blocks, *self.norms)}
        after = {b: a for _, a, b in (*other.blocks, *other.norms)}
        blocks = {(k, after.get(a, a), b): e for (k, a, b), e in self.blocks.items()}
        for (k, a, b), element in other.blocks.items():
            key = (k, a, before.get(b, b))
            blocks[key] = blocks.get(key, ()) + element
        norms = {(n, after.get(a, a), b): x for (n, a, b), x in self.norms.items()}
        if other.stream is not None:
            norms |= {(n, a, before.get(b, b)): x for (n, a, b), x in other.norms.items()}
        return ModelTransformation(stream, norms, blocks)

    def inverse(self, norms: Mapping[tuple[str, int, int], Norm]) -> "ModelTransformation":
        """Return the transformation back to a model with the given norms."""
        return ModelTransformation(
            None if self.stream is None else self.stream.inverse(),
            norms if self.stream is not None else {},
            {(kind, b, a): inverse(element) for (kind, a, b), element in self.blocks.items()},
        )


def into_stream(
    tensors: Tensors, names: Iterable[str], layout: StreamLayout, stream: StreamMap | None
) -> dict[str, torch.Tensor]:
    """Return tensors in the stream's new coordinates, with norms folded into their readers.

    Parameters
    ----------
    tensors : mapping
        In the working dtype; `StreamLayout.needed` tells what has to be there.
    names : iterable of str
        Which tensors to return; norms that are folded are left out.
    layout : StreamLayout
    stream : SignedPermutation or OrthogonalMap, optional
        None folds only.
    """
    result = {}
    for name in names:
        x, norm = tensors[name], layout.norm_of(name)
        if norm is not None:
            if name in (norm, bias_of(norm)):
                continue
            own = layout.norm(norm, tensors)
            if name in layout.readers[norm]:
                weight = _nonzero(own) if isinstance(stream, SignedPermutation) else own.weight
                x = scaled(x, layout.patterns[name], weight)
            elif own.bias is not None:
                reader = _reader_of(name, layout.readers[norm])
                x = x + contracted(tensors[reader], layout.patterns[reader], own.bias)
        if stream is not None and name in layout.patterns:
            x = act_stream(stream, x, layout.patterns[name])
        result[name] = x
    return result


def out_of_stream(
    moved: Tensors,
    tensors: Tensors,
    names: Iterable[str],
    layout: StreamLayout,
    stream: StreamMap,
    targets: Mapping[str, Norm],
) -> dict[str, torch.Tensor]:
    """Return moved tensors for given norms: undo the folding of `into_stream`.

    Parameters
    ----------
    moved : mapping
        What `into_stream` returned, with heads and neurons moved since.
    tensors : mapping
        What `into_stream` was given.
    names : iterable of str
        Which tensors to return; norms among them are set to their targets.
    layout : StreamLayout
    stream : SignedPermutation or OrthogonalMap
    targets : mapping of norm weight to Norm
        See `target_norm`.
    """
    result: dict[str, torch.Tensor] = {}
    for name in names:
        norm = layout.norm_of(name)
        if norm is None:
            result[name] = moved[name]
            continue
        target = targets[norm]
        if name == norm:
            x = target.weight - layout.offset
        elif name == bias_of(norm):
            x = _norm_bias(tensors, name, norm, layout, stream, target)
        elif name in layout.readers[norm]:
            x = scaled(moved[name], layout.patterns[name], 1 / _nonzero(target))
        else:
            x = moved[name]
            if target.bias is not None:
                reader = _reader_of(name, layout.readers[norm])
                weight = scaled(moved[reader], layout.patterns[reader], 1 / _nonzero(target))
                x = x - contracted(weight, layout.patterns[reader], target.bias)
        like = tensors[name]
        result[name] = x.to(device=like.device, dtype=like.dtype)
    return result


def averaged_apart(name: str, reference: Tensors, other: Tensors, layout: StreamLayout) -> float:
    """What it costs to average a reader and its norm instead of their product.

    With readers R, R' and norms w, w', the product of the averages misses the average of the
    products by (R - R') diag(w - w') / 4, at the midpoint; for a reader's bias it is (R - R')
    (b - b') / 4 with the norms' biases.

    Parameters
    ----------
    name : str
        A reader or its bias; anything else costs nothing.
    reference, other : mapping
        With all that `StreamLayout.needed` names.
    layout : StreamLayout

    Returns
    -------
    float
        Four times the square of that: what it adds to twice the summed squared distances of a
        midpoint from its ends.
    """
    norm = layout.norm_of(name)
    if norm is None:
        return 0.0
    first, second = layout.norm(norm, reference), layout.norm(norm, other)
    if name in layout.readers[norm]:
        gap = first.weight - second.weight
        if not bool(gap.any()):
            return 0.0
        miss = scaled(reference[name] - other[name], layout.patterns[name], gap)
    else:
        if first.bias is None or second.bias is None or torch.equal(first.bias, second.bias):
            return 0.0
        reader = _reader_of(name, layout.readers[norm])
        difference = reference[reader] - other[reader]
        miss = contracted(difference, layout.patterns[reader], first.bias - second.bias)
    return float(miss.square().sum()) / 4


def _norm_bias(
    tensors: Tensors,
    name: str,
    norm: str,
    layout: StreamLayout,
    stream: StreamMap,
    target: Norm,
) -> torch.Tensor:
    if target.bias is not None:
        return target.bias
    return carried_bias(layout.norm(norm, tensors), tensors[name].double(), stream, target.weight)


def _nonzero(norm: Norm) -> torch.Tensor:
    """Weight that readers can be divided by: what stands behind a zero is kept as it is.

    So is what stands behind a weight whose inverse float32 cannot hold.
    """
    return torch.where(norm.weight.abs() < 2.0**-100, torch.ones_like(norm.weight), norm.weight)


def _reader_of(bias: str, readers: Iterable[str]) -> str:
    return next(reader for reader in readers if bias_of(reader) == bias)
