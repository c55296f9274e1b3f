"""Squared norms and distances by blocks against sums in float64."""

import pytest
import torch

from laws import DOUBLE, rng, tolerance
from mergekit_rotation.symmetry import distance, product_dtype, squares


def exact(x, y):
    return [float(z.double().square().sum()) for z in (x, y, x.double() - y.double())]


def check(x, y, eps):
    """Compare with the exact sums; a difference is as exact as what it is taken of."""
    one, other, between = exact(x, y)
    found = squares(x, y)
    for value, expected in zip(found, (one, other, between), strict=False):
        assert abs(value - expected) <= eps * expected
    assert found.work == product_dtype(x, y)


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16,) * 2, (torch.float32, torch.float16), (DOUBLE,) * 2]
)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (30, 17)])
@pytest.mark.parametrize("transposed", [False, True])
def test_blocks_add_up(dtypes, shape, transposed, monkeypatch):
    monkeypatch.setattr(distance, "BLOCK", 50)
    x, y = (torch.randn(shape, dtype=DOUBLE, generator=rng(k)).to(d) for k, d in enumerate(dtypes))
    if transposed and x.dim() == 2:
        x, y = x.mT, y.mT
    before = x.clone(), y.clone()
    check(x, y, tolerance(50, DOUBLE if DOUBLE in dtypes else torch.float32))
    assert squares(x, x).apart == 0.0
    assert torch.equal(x, before[0]) and torch.equal(y, before[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("factors", [(2.0**100,) * 2, (2.0**-100,) * 2, (1.0, 2.0**100), (0, 1)])
def test_squares_that_float32_cannot_hold(dtype, factors):
    x, y = (f * torch.randn(30, 17, generator=rng(k)) for k, f in enumerate(factors))
    check(x.to(dtype), y.to(dtype), tolerance(50, torch.float32))
