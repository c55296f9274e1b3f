"""Norms between the writers and the readers of the residual stream.

A map of the stream is a symmetry once every norm is a plain normalisation: its weight and bias are
*folded* into the layers that read it, and *unfolded* for other norms afterwards,

    W -> W diag(w) Q^T diag(1/w'),    c -> c + W b - W' b',    (w, b) -> (w', b'),

which is exact for any non-zero w', so that a model can be brought to the norms of another one.
"""

from dataclasses import dataclass

import torch

from mergekit_rotation.symmetry.axes import Pattern
from mergekit_rotation.symmetry.errors import SymmetryError
from mergekit_rotation.symmetry.stream import SignedPermutation, StreamMap


@dataclass(frozen=True, eq=False)
class Norm:
    """Effective weight, and bias, of an RMSNorm or LayerNorm; float64, shape (D,).

    A bias of None stands for a norm without one, or for one that is *carried*: some reader has
    no bias of its own that could take it up.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None


#: smallest weight of a norm that readers are divided by, as a share of its root mean square
LEAST_WEIGHT = 2.0**-12


def target_norm(own: Norm, reference: Norm | None, stream: StreamMap) -> Norm:
    """Return the norm that a moved model gets: the reference's, where readers can be divided by it.

    Weights of the reference that are zero, or smaller than `LEAST_WEIGHT` times their root mean
    square, are replaced: under a permutation by the model's own moved weight, under a rotation by
    that least weight. Without a reference a permuted norm stays as it is and a rotated one becomes
    a constant. All are exact; they are coordinates of the same function.
    """
    if isinstance(stream, SignedPermutation):
        moved = stream.along(own.weight, 0, signed=False)
        bias = None if own.bias is None else stream.along(own.bias, 0)
        if reference is None:
            return Norm(moved, bias)
        usable = (reference.weight.abs() > _least(reference.weight)) & (moved.abs() > _least(moved))
        bias = _reference_bias(own, reference)
        return Norm(torch.where(usable, reference.weight, moved), bias)
    if reference is None:
        scale = own.weight.square().mean().sqrt()
        bias = None if own.bias is None else torch.zeros_like(own.bias)
        return Norm(scale.expand(own.weight.shape).clone(), bias)
    least = _least(reference.weight)
    sign = torch.where(reference.weight < 0, -1.0, 1.0).to(reference.weight.dtype)
    weight = torch.where(reference.weight.abs() > least, reference.weight, sign * least)
    return Norm(weight, _reference_bias(own, reference))


def _reference_bias(own: Norm, reference: Norm) -> torch.Tensor | None:
    """Bias of the reference's norm, or none where the model's own is carried."""
    if own.bias is None:
        return None
    return torch.zeros_like(own.bias) if reference.bias is None else reference.bias


def _least(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.square().mean().sqrt()
    return LEAST_WEIGHT * torch.where(scale > 0, scale, torch.ones_like(scale))


def scaled(x: torch.Tensor, pattern: Pattern, weight: torch.Tensor) -> torch.Tensor:
    """Multiply a reader's weight by a vector along the stream."""
    dim = pattern.dim_of("e")
    assert dim is not None
    shape = [-1 if k == dim else 1 for k in range(x.dim())]
    return x * weight.to(device=x.device, dtype=x.dtype).view(shape)


def contracted(x: torch.Tensor, pattern: Pattern, vector: torch.Tensor) -> torch.Tensor:
    """What a reader's weight makes of a constant vector of the stream: shaped like its bias."""
    dim = pattern.dim_of("e")
    assert dim is not None
    result: torch.Tensor = x.movedim(dim, -1) @ vector.to(device=x.device, dtype=x.dtype)
    return result


def carried_bias(
    own: Norm, bias: torch.Tensor, stream: StreamMap, weight: torch.Tensor
) -> torch.Tensor:
    """Bias of a norm that a reader without a bias sees through the folded weight.

    Raises
    ------
    SymmetryError
        If the norm has a bias where its weight is zero, which no other weight can express.
    """
    weight = weight.to(bias.device)
    if isinstance(stream, SignedPermutation):
        ratio = weight / stream.along(own.weight, 0, signed=False)
        ratio = torch.where(torch.isfinite(ratio), ratio, torch.ones_like(ratio))
        return stream.along(bias, 0) * ratio
    if bool(((own.weight.abs() <= _least(own.weight)) & (bias != 0)).any()):
        raise SymmetryError("a norm has a bias where its weight is zero, and a reader without bias")
    safe = torch.where(own.weight == 0, torch.ones_like(own.weight), own.weight)
    return stream.along(bias / safe, 0) * weight
