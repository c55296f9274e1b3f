"""Squared norms and distances of stored tensors, a block at a time."""

from typing import NamedTuple

import torch

from mergekit_rotation.symmetry.precision import product_dtype, squares_fit, working_dtype

#: numbers that are cast and subtracted at a time: few enough to stay in a cache
BLOCK = 2**17


class Squares(NamedTuple):
    """Squared Frobenius norms of two tensors and of their difference.

    Attributes
    ----------
    first, second, apart : float
    work : torch.dtype
        `product_dtype` of both tensors.
    """

    first: float
    second: float
    apart: float
    work: torch.dtype


def squares(x: torch.Tensor, y: torch.Tensor) -> Squares:
    """Return || x ||_F^2, || y ||_F^2 and || x - y ||_F^2 in one pass.

    Differences are taken in float32, in float64 where squares need it (`product_dtype`) or a tensor
    has it, and blocks are added up in double precision.

    Parameters
    ----------
    x, y : Tensor, of one shape
        Read without copies where they are contiguous.
    """
    work = working_dtype(x.dtype, y.dtype)
    sums = _sums_of_squares(x, y, work)
    if work != torch.float64 and not all(squares_fit(sums[k], x.numel()) for k in (0, 1)):
        work = product_dtype(x, y)
        if work == torch.float64:
            sums = _sums_of_squares(x, y, work)
    return Squares(*sums, work)


def _sums_of_squares(
    x: torch.Tensor, y: torch.Tensor, work: torch.dtype
) -> tuple[float, float, float]:
    sums = torch.zeros(3, dtype=torch.float64, device=x.device)
    first, second, apart = sums.unbind()
    step = BLOCK if x.device.type == "cpu" else 128 * BLOCK  # dot takes less than 2^31 there
    for a, b in zip(x.reshape(-1).split(step), y.reshape(-1).split(step), strict=True):
        left, right = a.to(work), b.to(work)
        first += torch.dot(left, left)
        second += torch.dot(right, right)
        left = left - right if left is a else left.sub_(right)
        apart += torch.dot(left, left)
    one, other, between = sums.tolist()
    return one, other, between
