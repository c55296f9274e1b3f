"""Which precision is computed in, and that settings are put back."""

from itertools import product

import pytest
import torch

from laws import rng
from mergekit_rotation.symmetry import (
    all_finite,
    full_precision,
    precision,
    product_dtype,
    working_dtype,
)
from mergekit_rotation.symmetry.precision import matrix_units, squares_fit

LOW = (torch.float16, torch.bfloat16, torch.float32)


def test_working_dtype():
    assert working_dtype() == torch.float32
    for dtype in LOW:
        assert working_dtype(dtype) == working_dtype(dtype, *LOW) == torch.float32
        assert working_dtype(dtype, torch.float64) == torch.float64


@pytest.mark.parametrize("dtype", LOW)
def test_products_are_taken_in_float64_where_float32_cannot_hold_them(dtype):
    one = torch.tensor([0.0, -1.0, 1e-3]).to(dtype)
    assert product_dtype() == product_dtype(one) == torch.float32
    assert product_dtype(one, one.double()) == torch.float64
    for nothing in (torch.zeros(3), torch.zeros(0), torch.tensor([float("nan"), float("inf")])):
        assert product_dtype(nothing.to(dtype)) == torch.float32
    if dtype == torch.float16:  # which cannot be that large or small
        assert product_dtype(one * torch.finfo(dtype).max) == torch.float32
        assert product_dtype(one * torch.finfo(dtype).smallest_normal) == torch.float32
        return
    for factor in (2.0**48, 2.0**-48):
        assert product_dtype(one * factor) == torch.float32
    for factor in (2.0**49, 2.0**-49, torch.finfo(dtype).max):
        assert product_dtype(one, one * factor) == torch.float64


def test_full_precision_is_put_back():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with pytest.raises(ZeroDivisionError), full_precision():
            assert torch.get_float32_matmul_precision() == "highest"
            raise ZeroDivisionError
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtypes", [*product([*LOW, torch.float64], repeat=2)], ids=str)
def test_no_product_loses_numbers(dtypes, transposed):
    """Matrix units multiply what is stored in bfloat16, and no other numbers, in bfloat16."""
    x, y = (torch.randn(60, 300, generator=rng(k)).to(dtype) for k, dtype in enumerate(dtypes))
    if transposed:
        x, y = x.mT.contiguous().mT, y.mT.contiguous().mT
    before = torch.get_float32_matmul_precision()
    work = working_dtype(*dtypes)
    total = torch.ones(60, 100, dtype=work)[:, 20:80]  # a part of another matrix
    with matrix_units(x, y):
        total.addmm_(x.to(work), y.to(work).mT)
    assert torch.get_float32_matmul_precision() == before
    expected = 1 + x.double() @ y.double().mT
    most = 1 + x.double().abs() @ y.double().abs().mT
    assert ((total.double() - expected).abs() <= 300 * torch.finfo(work).eps * most).all()


@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize("dtype", LOW)
def test_matrix_units_take_numbers_in_bfloat16_only(dtype, units, monkeypatch):
    asked = []
    monkeypatch.setattr(precision, "has_matrix_units", lambda: units)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    x = torch.ones(3, 2, dtype=dtype)
    with matrix_units(x, x):
        assert ("medium" in asked) == (units and dtype == torch.bfloat16)
    asked.clear()
    with matrix_units(x, torch.ones(3, 2)):
        assert "medium" not in asked


@pytest.mark.parametrize("dtype", [*LOW, torch.float64])
def test_all_finite_finds_what_is_not(dtype):
    assert all_finite(torch.zeros(0, dtype=dtype))
    for size in (1, 7, 64, 259):
        for position in range(size):
            for bad in (float("nan"), float("inf"), -float("inf")):
                x = torch.linspace(-1, 1, size).to(dtype)
                assert all_finite(x)
                x[position] = bad
                assert not all_finite(x)


@pytest.mark.parametrize("dtype", [*LOW, torch.float64])
def test_finite_numbers_may_have_an_infinite_sum(dtype):
    x = torch.full((9,), torch.finfo(dtype).max, dtype=dtype)
    assert all_finite(x)
    x[4] = float("inf")
    assert not all_finite(x)


@pytest.mark.parametrize("dtype", LOW)
def test_a_sum_of_squares_proves_only_what_the_entries_show(dtype):
    for exponent in range(-110, 111, 2):
        for count in (1, 5, 300):
            x = torch.zeros(count).index_fill(0, torch.tensor([0]), 2.0**exponent).to(dtype)
            proven = squares_fit(float(x.float().square().sum()), count)
            assert not proven or product_dtype(x) == torch.float32
            assert proven or abs(exponent) > 40 or dtype == torch.float16
