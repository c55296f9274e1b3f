"""In which precision symmetries are solved and applied."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from math import isfinite

import torch


def working_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: float64 if any input has it, else float32.

    Half-precision inputs are always raised to float32; nothing is ever solved below it.
    """
    return torch.float64 if torch.float64 in dtypes else torch.float32


def product_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """Return the dtype in which products of entries are summed.

    It is `working_dtype`, and float64 where float32 could not hold the sums: squares of entries
    above 2^48 overflow once 2^31 are added, and where no entry of a tensor reaches 2^-48, those
    of entries smaller by the precision of float32 lie below its smallest number.

    Parameters
    ----------
    *tensors : Tensor
        Floating point, any shape. Zeros alone, NaN and Inf ask for nothing.
    """
    work = working_dtype(*(x.dtype for x in tensors))
    return work if all(map(_in_range, tensors)) else torch.float64


def _in_range(x: torch.Tensor) -> bool:
    if x.dtype in (torch.float16, torch.float64) or x.numel() == 0 or x.is_meta:
        return True
    largest = float(torch.stack(torch.aminmax(x)).abs().amax())
    return not (0 < largest < 2.0**-48 or 2.0**48 < largest < float("inf"))


def squares_fit(total: float, count: int) -> bool:
    """Tell whether a sum of squares in float32 proves that float32 holds products of the entries.

    Parameters
    ----------
    total : float
        Sum of the squares of the entries of a tensor.
    count : int
        Number of entries.

    Returns
    -------
    bool
        If true, the largest entry is in the range that `product_dtype` asks for; else it may be.
    """
    return 2.0**-96 * count <= total <= 2.0**96


def all_finite(x: torch.Tensor) -> bool:
    """Tell whether a floating-point tensor holds neither NaN nor Inf.

    Both make their sum NaN or Inf, and a sum is twice as fast as the extremes, which decide where
    the sum of finite numbers may have overflowed. Both are one pass without temporaries.
    """
    if x.numel() == 0 or isfinite(float(x.sum())):
        return True
    return all(isfinite(float(end)) for end in torch.aminmax(x))


@contextmanager
def full_precision() -> Iterator[None]:
    """Run float32 matrix products in float32 (no TF32, no bfloat16 passes).

    And sum those of bfloat16 in float32 on a GPU, too.
    """
    settings = torch.backends.cuda.matmul
    reduced = settings.allow_bf16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = False
    try:
        with _products("highest"):
            yield
    finally:
        settings.allow_bf16_reduced_precision_reduction = reduced


@contextmanager
def _products(precision: str) -> Iterator[None]:
    """Set PyTorch's precision of float32 products, which is one for all threads."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def matrix_units(*tensors: torch.Tensor) -> Iterator[None]:
    """Let the matrix units of a CPU take float32 products, if they lose nothing.

    They multiply numbers of bfloat16 exactly and sum in float32, as is done without them. Only
    products of such numbers may be taken inside, by any thread.

    Parameters
    ----------
    *tensors : Tensor
        What is multiplied, as it is stored.
    """
    exact = all(x.dtype == torch.bfloat16 and x.device.type == "cpu" for x in tensors)
    with _products("medium") if exact and has_matrix_units() else nullcontext():
        yield


def has_matrix_units() -> bool:
    """Tell whether the CPU has units that multiply matrices of bfloat16 (AMX)."""
    tiles = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return tiles is not None and bool(tiles())


@contextmanager
def single_thread(device: torch.device, if_size: int = 0) -> Iterator[None]:
    """Run small matrix factorisations (up to 256 x 256) on the CPU in one thread.

    LAPACK gains nothing from more at the size of a head, loses factors of a hundred where
    another process holds a core that its threads spin for, and returns other last bits for
    other numbers of threads.
    """
    before = torch.get_num_threads()
    if device.type != "cpu" or before == 1 or if_size > 256:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
