"""Two sets of vectors that are stored in pieces, and inner products of some pairs of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from mergekit_rotation.symmetry.errors import SymmetryError
from mergekit_rotation.symmetry.precision import all_finite

#: numbers that are cast to the working precision at a time: few enough to stay in a cache
BLOCK = 2**18


@dataclass(frozen=True)
class Part:
    """A piece of all vectors of both sides.

    Attributes
    ----------
    signed : bool
        Whether the product of this piece counts with its absolute value, together with those of
        all other signed pieces.
    a, b : Tensor, shape (n, m)
        Rows of the reference and of the other; views of the stored tensors, in their dtype.
    """

    signed: bool
    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True)
class Vectors:
    """n vectors of the reference and n of the other. Scores of their pairs.

    The score of a pair (i, j) is

        <plain parts of a_i, of b_j> + | <signed parts of a_i, of b_j> |.

    Parameters
    ----------
    parts : sequence of Part
        At least one.
    work : torch.dtype
        In which products are taken.

    Raises
    ------
    SymmetryError
        By `norms`, if a number is not finite or too large to square.
    """

    parts: Sequence[Part]
    work: torch.dtype
    #: what `products` returned
    _known: list[tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]] = field(
        default_factory=list, repr=False
    )

    @property
    def count(self) -> int:
        return self.parts[0].a.shape[0]

    @property
    def length(self) -> int:
        """Number of entries of one vector."""
        return sum(part.a.shape[1] for part in self.parts)

    @property
    def device(self) -> torch.device:
        return self.parts[0].a.device

    @cached_property
    def norms(self) -> torch.Tensor:
        """Norms of the plain and of the signed parts of both sides, float64, (2 kinds, 2, n)."""
        result = torch.zeros(2, 2, self.count, dtype=torch.float64, device=self.device)
        for part in self.parts:
            for side, x in enumerate((part.a, part.b)):
                one = result[int(part.signed), side]
                torch.hypot(one, row_norms(x, self.work).double(), out=one)
        if not all_finite(result):
            raise SymmetryError(
                "the weights of a neuron hold NaN or Inf, or are too large to square"
            )
        return result

    @property
    def error(self) -> float:
        """Rounding error of a score, relative to the product of the norms of its vectors."""
        result: float = 4 * torch.finfo(self.work).eps * float(self.length) ** 0.5
        return result

    def noise(self, i: torch.Tensor, j: torch.Tensor, *, signed: bool = False) -> torch.Tensor:
        """Rounding errors of the scores of pairs, or of their signed part alone, float64."""
        a, b = self.norms[1] if signed else torch.linalg.vector_norm(self.norms, dim=0)
        result: torch.Tensor = self.error * a[i] * b[j]
        return result

    def products(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Plain and signed inner products of every row i with row ``index[i]``, two of (n,)."""
        for known, found in self._known:
            if torch.equal(known, index):
                return found
        zero = torch.zeros(self.count, dtype=self.work, device=self.device)
        plain, signed = zero, zero.clone()
        straight = torch.equal(index, torch.arange(self.count, device=self.device))
        for part in self.parts:
            products = row_products(part.a, part.b, None if straight else index, self.work)
            (signed if part.signed else plain).add_(products)
        self._known.append((index, (plain, signed)))
        return plain, signed

    def scores(self, index: torch.Tensor) -> torch.Tensor:
        """Score of every row i with row ``index[i]``, float64, (n,)."""
        plain, signed = self.products(index)
        return plain.double() + signed.double().abs()

    def gram(
        self, rows: torch.Tensor | None = None, columns: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Scores of some of the reference (all if None) with some of the other, in `work`."""
        result: torch.Tensor | None = None
        for part in sorted(self.parts, key=lambda part: not part.signed):
            x = (part.a if rows is None else part.a[rows]).to(self.work)
            y = (part.b if columns is None else part.b[columns]).to(self.work)
            if result is None:
                result, signed = x @ y.mT, part.signed
                continue
            if signed and not part.signed:
                result.abs_()
            signed = part.signed
            result.addmm_(x, y.mT)
        assert result is not None
        return result.abs_() if signed else result


def row_norms(x: torch.Tensor, work: torch.dtype) -> torch.Tensor:
    """Norm of every row of (n, m), in the working precision."""
    dim = 1 if x.is_contiguous() else 0
    square = torch.zeros(x.shape[0], dtype=work, device=x.device)
    for rows, y, _ in _blocks(x, x, None, work):
        square[rows] += y.square().sum(dim)
    return square.sqrt()


def row_products(
    x: torch.Tensor, y: torch.Tensor, index: torch.Tensor | None, work: torch.dtype
) -> torch.Tensor:
    """Inner products of the rows of x with rows ``index`` of y (None: the same), (n,)."""
    dim = 1 if x.is_contiguous() else 0
    result = torch.zeros(x.shape[0], dtype=work, device=x.device)
    for rows, one, other in _blocks(x, y, index, work):
        result[rows] += (one * other).sum(dim)
    return result


def _blocks(
    x: torch.Tensor, y: torch.Tensor, index: torch.Tensor | None, work: torch.dtype
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield blocks of x and of the rows ``index`` of y in the order in which x is stored.

    Rows are cut where they are contiguous; otherwise columns, and the blocks are transposed.
    """
    step = max(1, BLOCK // max(1, x.shape[1] if x.is_contiguous() else x.shape[0]))
    if x.is_contiguous():
        for start in range(0, x.shape[0], step):
            rows = slice(start, start + step)
            other = y[rows] if index is None else y.index_select(0, index[rows])
            yield rows, x[rows].to(work), other.to(work)
        return
    for start in range(0, x.shape[1], step):
        columns = slice(start, start + step)
        other = y.mT[columns].to(work)
        if index is not None:
            other = other.index_select(1, index)
        yield slice(None), x.mT[columns].to(work), other
