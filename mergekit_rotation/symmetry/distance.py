"""Squared distances of stored tensors, a block at a time."""

import torch

from mergekit_rotation.symmetry.precision import product_dtype

#: numbers that are cast and subtracted at a time: few enough to stay in a cache
BLOCK = 2**17


def squared_distance(x: torch.Tensor, y: torch.Tensor | None = None) -> float:
    """Return || x - y ||_F^2, or || x ||_F^2, without copies of contiguous tensors.

    Differences are taken in `product_dtype`, and blocks are added up in double precision.

    Parameters
    ----------
    x, y : Tensor, of one shape
    """
    given = [x] if y is None else [x, y]
    work = product_dtype(*given)
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    step = BLOCK if x.device.type == "cpu" else max(1, x.numel())
    for blocks in zip(*(z.reshape(-1).split(step) for z in given), strict=True):
        first, *second = (block.to(work) for block in blocks)
        difference = first - second[0] if second else first
        total += torch.dot(difference, difference)
    return float(total)
