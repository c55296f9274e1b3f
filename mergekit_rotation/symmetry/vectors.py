"""Two sets of vectors that are stored in pieces, and inner products of some pairs of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from mergekit_rotation.symmetry.errors import SymmetryError
from mergekit_rotation.symmetry.precision import all_finite, matrix_units

#: numbers that are cast to the working precision at a time: few enough to stay in a cache; and
#: for an accelerator
BLOCK, LARGE_BLOCK = 2**16, 2**26

#: rows and columns of the scores at a time: the numbers of so many vectors are cast
TILE = 1024


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
        return self._sums[0]

    @cached_property
    def _sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `norms`, and the products of every row with the same of the other, (2 kinds, n).

        Everything is read once.
        """
        norms = torch.zeros(2, 2, self.count, dtype=torch.float64, device=self.device)
        products = torch.zeros(2, self.count, dtype=self.work, device=self.device)
        for part in self.parts:
            kind = int(part.signed)
            *squares, inner = row_sums(part.a, part.b, self.work)
            norms[kind] = torch.hypot(norms[kind], torch.stack(squares).double().sqrt())
            products[kind] += inner
        if not all_finite(norms):
            raise SymmetryError(
                "the weights of a neuron hold NaN or Inf, or are too large to square"
            )
        return norms, products

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
        rows = torch.arange(self.count, device=self.device)
        plain, signed = self._sums[1] if torch.equal(index, rows) else self.pairs(rows, index)
        self._known.append((index, (plain, signed)))
        return plain, signed

    def pairs(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        """Plain and signed inner products of rows i with rows j of the other, (2 kinds, k)."""
        result = torch.zeros(2, len(i), dtype=self.work, device=self.device)
        for part in self.parts:
            result[int(part.signed)] += pair_products(part.a, part.b, i, j, self.work)
        return result

    def scores(self, index: torch.Tensor) -> torch.Tensor:
        """Score of every row i with row ``index[i]``, float64, (n,)."""
        plain, signed = self.products(index)
        return plain.double() + signed.double().abs()

    def gram(
        self, rows: torch.Tensor | None = None, columns: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Scores of some of the reference (all if None) with some of the other, in `work`."""
        n, m = (self.count if some is None else len(some) for some in (rows, columns))
        result = torch.zeros(n, m, dtype=self.work, device=self.device)
        parts = sorted(self.parts, key=lambda part: not part.signed)
        widest = max(part.a.shape[1] for part in parts)
        # The same memory for all tiles: what is returned to the system and taken again is dear.
        left, right = result.new_empty(2, min(TILE, max(n, m)) * widest)
        for down in range(0, m, TILE):
            for across in range(0, n, TILE):
                here, there = slice(across, across + TILE), slice(down, down + TILE)
                tile, signed = result[here, there], False
                for part in parts:
                    if signed and not part.signed:
                        tile.abs_()
                    signed = part.signed
                    x = part.a[here] if rows is None else part.a[rows[here]]
                    y = part.b[there] if columns is None else part.b[columns[there]]
                    with matrix_units(x, y):
                        tile.addmm_(_copy(x, left), _copy(y, right).mT)
                if signed:
                    tile.abs_()
        return result


def _copy(x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Copy a matrix to some memory, in its dtype and the order in which x is stored."""
    n, m = x.shape
    some = memory[: n * m]
    result = some.view(n, m) if x.stride(1) == 1 else some.view(m, n).mT
    return result.copy_(x)


def row_squares(x: torch.Tensor, work: torch.dtype) -> torch.Tensor:
    """Squared norms of the rows of x, (n, m); each is read once, (n,)."""
    n, m = x.shape
    result = torch.zeros(n, dtype=work, device=x.device)
    if x.is_contiguous():
        for rows in _slices(n, m, x.device):
            result[rows] = torch.linalg.vector_norm(x[rows].to(work), dim=1).square()
        return result
    for columns in _slices(m, n, x.device):
        result += x.mT[columns].to(work).square().sum(0)
    return result


def row_sums(
    x: torch.Tensor, y: torch.Tensor, work: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`row_squares` of x and y, both (n, m), and inner products of equal rows."""
    n, m = x.shape
    first, second, inner = torch.zeros(3, n, dtype=work, device=x.device)
    if x.is_contiguous():
        for rows in _slices(n, m, x.device):
            one, other = x[rows].to(work), y[rows].to(work)
            first[rows] = torch.linalg.vector_norm(one, dim=1).square()
            second[rows] = torch.linalg.vector_norm(other, dim=1).square()
            inner[rows] = (one * other).sum(1)
        return first, second, inner
    for columns in _slices(m, n, x.device):
        one, other = x.mT[columns].to(work), y.mT[columns].to(work)
        first += one.square().sum(0)
        second += other.square().sum(0)
        inner += (one * other).sum(0)
    return first, second, inner


def pair_products(
    x: torch.Tensor, y: torch.Tensor, i: torch.Tensor, j: torch.Tensor, work: torch.dtype
) -> torch.Tensor:
    """Inner products of rows i of x with rows j of y, (k,)."""
    result = torch.zeros(len(i), dtype=work, device=x.device)
    if x.is_contiguous():
        for some in _slices(len(i), x.shape[1], x.device):
            one, other = x.index_select(0, i[some]), y.index_select(0, j[some])
            result[some] = (one.to(work) * other.to(work)).sum(1)
        return result
    for columns in _slices(x.shape[1], max(len(i), len(x)), x.device):
        one, other = x.mT[columns].to(work), y.mT[columns].to(work)
        result += (one.index_select(1, i) * other.index_select(1, j)).sum(0)
    return result


def _slices(count: int, size: int, device: torch.device) -> Iterator[slice]:
    """Cut ``count`` lines of ``size`` numbers into blocks."""
    block = BLOCK if device.type == "cpu" else LARGE_BLOCK
    step = max(1, block // max(1, size))
    return (slice(start, start + step) for start in range(0, count, step))
