"""Squared distances of stored tensors, a block at a time."""

import torch

from mergekit_rotation.symmetry.precision import product_dtype, working_dtype

#: numbers that are cast and subtracted at a time: few enough to stay in a cache
BLOCK = 2**17


def squared_distance(x: torch.Tensor, y: torch.Tensor | None = None) -> float:
    """Return || x - y ||_F^2, or || x ||_F^2, without copies of contiguous tensors.

    Differences are taken in float32, in float64 where squares need it (`product_dtype`) or a tensor
    has it, and blocks are added up in double precision.

    Parameters
    ----------
    x, y : Tensor, of one shape
    """
    given = [x] if y is None else [x, y]
    work = working_dtype(*(z.dtype for z in given))
    total = _sum_of_squares(given, work)
    if work != torch.float64 and not 2.0**-96 * x.numel() <= total < float("inf"):
        work = product_dtype(*given)
        return _sum_of_squares(given, work) if work == torch.float64 else total
    return total


def _sum_of_squares(given: list[torch.Tensor], work: torch.dtype) -> float:
    """Return the squared norm of a tensor, or of the difference of two."""
    total = torch.zeros((), dtype=torch.float64, device=given[0].device)
    step = BLOCK if total.device.type == "cpu" else 128 * BLOCK  # dot takes less than 2^31 there
    for blocks in zip(*(z.reshape(-1).split(step) for z in given), strict=True):
        first, *second = (block.to(work) for block in blocks)
        difference = first - second[0] if second else first
        total += torch.dot(difference, difference)
    return float(total)
