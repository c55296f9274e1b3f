"""How far a transformation moves what it acts on: fixed points, angles, signs."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mergekit_rotation.symmetry import (
    Linear,
    Permute,
    Rotate,
    Scale,
    Sign,
    SignedPermutation,
    StreamMap,
    Transformation,
    eigh,
)

#: of the distribution of angles
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Motion:
    """What happens to one axis.

    Attributes
    ----------
    axis : str
    kind : str
        ``order``, ``rotation``, ``sign`` or ``scale``.
    size : int
        How many positions or dimensions there are, over all heads or experts.
    fixed : float
        Share of them that stay: positions in their place, signs +1, rotation angles of zero as
        far as float32 tells, factors of one.
    angles : tuple of float
        Minimum, quartiles and maximum of the rotation angles, in degrees.
    gap : float, optional
        Of neurons that were reordered: see `Permute`.
    """

    axis: str
    kind: str
    size: int
    fixed: float
    angles: tuple[float, ...] = ()
    gap: float | None = None


def orders(
    transformation: Transformation, axes: Mapping[str, tuple[int, int]]
) -> tuple[Motion, ...]:
    """Describe how a transformation reorders the heads, neurons or experts of one block.

    Parameters
    ----------
    transformation : Transformation
    axes : mapping of axis to (times, size)
        What may be reordered (`BlockSpec.orders`); an axis that stays as it is is described, too.
    """
    result = []
    for axis, (times, size) in axes.items():
        straight = torch.arange(size, device="cpu")  # workers of --multi-gpu make them elsewhere
        index, gap = straight.expand(times, size), None
        for element in transformation:
            if isinstance(element, Permute) and element.axis == axis:
                index = index.gather(1, element.index.cpu().expand(times, size))
                gap = element.gap
        fixed = float((index == straight).double().mean())
        result.append(Motion(axis, "order", times * size, fixed, gap=gap))
    return tuple(result)


def turns(transformation: Transformation) -> tuple[Motion, ...]:
    """Describe the rotations, signs and scalings of one block; takes eigenvalues."""
    result = []
    for element in transformation:
        if isinstance(element, Rotate):
            result.append(_rotation(element.axis, element.matrix))
        elif isinstance(element, Sign):
            positive = float((element.sign > 0).double().mean())
            result.append(Motion(element.axis, "sign", element.sign.numel(), positive))
        elif isinstance(element, Scale):
            ones = float((element.factor == 1).double().mean())
            result.append(Motion(element.axis, "scale", element.factor.numel(), ones))
        elif isinstance(element, Linear):
            size = element.matrix.shape[0] * element.matrix.shape[-1]
            result.append(Motion(element.axis, "scale", size, 0.0))
    return tuple(result)


def stream_motion(stream: StreamMap) -> Motion:
    """Describe a map of the residual stream."""
    if isinstance(stream, SignedPermutation):
        fixed = float((stream.index.cpu() == torch.arange(len(stream.index))).double().mean())
        return Motion("e", "order", len(stream.index), fixed)
    return _rotation("e", stream.q)


def _rotation(axis: str, matrix: torch.Tensor) -> Motion:
    """Describe orthogonal matrices, shape (..., d, d), by the angles of their eigenvalues.

    These are the angles of the planes that a rotation turns; a reflection counts as 180 degrees.
    Their cosines are the eigenvalues of the symmetric part, because orthogonal matrices are
    normal. Near 0 and 180 degrees an angle is known up to the square root of the rounding errors
    of its cosine; what is below that counts as fixed.
    """
    q = matrix.detach().double().cpu()
    cosine = eigh((q + q.mT) / 2)[0].flatten()
    noise = q.shape[-1] ** 0.5 * torch.finfo(torch.float32).eps
    fixed = float((cosine > 1 - noise).double().mean())
    angles = torch.rad2deg(torch.arccos(cosine.clamp(-1, 1)))
    quantiles = torch.quantile(angles, torch.tensor(QUANTILES, dtype=torch.float64))
    return Motion(axis, "rotation", cosine.numel(), fixed, tuple(quantiles.tolist()))
