"""Factorisations that do not hang on one routine.

The divide-and-conquer drivers that torch takes are fast, and on rare matrices they do not converge;
a slower driver still factorises these.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import scipy.linalg
import torch

from mergekit_rotation.symmetry.precision import all_finite

#: what drivers raise: scipy's own error, and ValueError of numbers that it refuses
FAILURES = (torch.linalg.LinAlgError, scipy.linalg.LinAlgError, ValueError)

Factors = tuple[torch.Tensor, ...]


def svd(x: torch.Tensor) -> Factors:
    """Return U, S and V^T of square matrices, shape (..., n, n).

    Raises
    ------
    torch.linalg.LinAlgError
        If no driver factorises them, here and below.
    """
    drivers: list[Callable[[], Factors]] = [lambda: torch.linalg.svd(x)]
    if x.is_cuda:
        drivers.append(lambda: torch.linalg.svd(x, driver="gesvd"))
    drivers.append(lambda: _each(x, partial(scipy.linalg.svd, lapack_driver="gesvd")))
    return _first_sound("SVD", drivers)


def singular_values(x: torch.Tensor) -> torch.Tensor:
    """Return the singular values of square matrices, descending, shape (..., n)."""
    return _first_sound(
        "singular values", [lambda: (torch.linalg.svdvals(x),), lambda: svd(x)[1:2]]
    )[0]


def eigh(x: torch.Tensor) -> Factors:
    """Return eigenvalues, ascending, and eigenvectors of symmetric matrices (..., n, n)."""
    slower = partial(scipy.linalg.eigh, driver="ev")
    return _first_sound("eigenvectors", [lambda: torch.linalg.eigh(x), lambda: _each(x, slower)])


def eigenvalues(x: torch.Tensor) -> torch.Tensor:
    """Return the real parts of the eigenvalues of matrices (..., n, n), in any order.

    On the CPU: accelerators take matrices that are not symmetric one by one.
    """
    drivers = [lambda: (torch.linalg.eigvals(x.cpu()).real.to(x),), lambda: _each(x, _schur)]
    return _first_sound("eigenvalues", drivers)[0]


def _schur(x: Any) -> tuple[Any]:
    return (scipy.linalg.schur(x, output="complex")[0].diagonal().real,)


def _each(x: torch.Tensor, factorise: Callable[[Any], Sequence[Any]]) -> Factors:
    """Factorise matrices one by one on the CPU."""
    found = [factorise(one) for one in x.detach().cpu().reshape(-1, *x.shape[-2:]).numpy()]
    stacks = (torch.stack([torch.tensor(factor) for factor in f]) for f in zip(*found, strict=True))
    return tuple(stack.reshape(*x.shape[:-2], *stack.shape[1:]).to(x) for stack in stacks)


def _first_sound(what: str, drivers: Sequence[Callable[[], Factors]]) -> Factors:
    """Return the first result that is finite."""
    for driver in drivers:
        try:
            result = driver()
        except FAILURES:
            continue
        if all(map(all_finite, result)):
            return result
    raise torch.linalg.LinAlgError(f"no driver computes the {what}")
