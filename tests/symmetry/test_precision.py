"""Which precision is computed in, and that settings are put back."""

import pytest
import torch

from mergekit_rotation.symmetry import all_finite, full_precision, working_dtype

LOW = (torch.float16, torch.bfloat16, torch.float32)


def test_working_dtype():
    assert working_dtype() == torch.float32
    for dtype in LOW:
        assert working_dtype(dtype) == working_dtype(dtype, *LOW) == torch.float32
        assert working_dtype(dtype, torch.float64) == torch.float64


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
