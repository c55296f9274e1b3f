"""Squared distances by blocks against one sum in float64."""

import pytest
import torch

from laws import DOUBLE, rng, tolerance
from mergekit_rotation.symmetry import distance, squared_distance


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
    dtype = DOUBLE if DOUBLE in dtypes else torch.float32
    for found, exact in (
        (squared_distance(x, y), float((x.double() - y.double()).square().sum())),
        (squared_distance(x), float(x.double().square().sum())),
    ):
        assert abs(found - exact) <= tolerance(50, dtype) * exact
    assert squared_distance(x, x) == 0.0


@pytest.mark.parametrize("factor", [2.0**100, 2.0**-100])
def test_squares_that_float32_cannot_hold(factor):
    x, y = (factor * torch.randn(30, 17, generator=rng(k)) for k in range(2))
    exact = float((x.double() - y.double()).square().sum())
    assert abs(squared_distance(x, y) - exact) <= tolerance(50, torch.float32) * exact
