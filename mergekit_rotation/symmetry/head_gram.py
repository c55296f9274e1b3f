"""Products between the heads of two attention layers: exact ones of a few pairs, bounds of all.

For every pair of heads there is a cross-Gram matrix M = sum over legs of X Y^T. With h heads of d
dimensions all of them take (h d)^2 products per column of the legs. They are not needed to tell
which heads belong together: with P some columns of the legs, and Q the others,

    max over g of <g, X Y^T>  <=  max over g of <g, P X (P Y)^T> + |Q X| |Q Y|

by Cauchy and Schwarz, and where a group turns cells of a few dimensions each, only the blocks of
M on these cells matter. On a cell of k dimensions <g, M> is at most sqrt(k) |M|_F, and

    |P X (P Y)^T|_F^2  =  <(P X)^T P X, (P Y)^T P Y>

needs one s x s matrix for every head, and one product of numbers for every pair of heads.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mergekit_rotation.symmetry.axes import Piece
from mergekit_rotation.symmetry.chance import chance_share
from mergekit_rotation.symmetry.errors import SymmetryError
from mergekit_rotation.symmetry.groups import Group, inner
from mergekit_rotation.symmetry.precision import all_finite, matrix_units
from mergekit_rotation.symmetry.vectors import row_squares

#: columns that bounds look at, for every dimension of a cell, and the least
PER_DIMENSION, LEAST = 3, 64

#: rows by which columns are chosen
ROWS = 64

#: entries of cross-Gram matrices at a time, and weights that are cast at a time; the same for an
#: accelerator
ENTRIES, WEIGHTS, MANY_WEIGHTS = 2**22, 2**19, 2**26

#: a leg of both sides by heads, (kv, g, d, rest) each; g = 1 where it has no query axis
Leg = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class HeadBounds:
    """What the legs of two heads can add to the objective at most, float64.

    Attributes
    ----------
    shared : Tensor, shape (kv, kv)
        Legs without query axis, of key/value heads a and b.
    query : Tensor, shape (kv, kv, m, m)
        The others, of query heads i of a and j of b; zero where there are none.
    """

    shared: torch.Tensor
    query: torch.Tensor


@dataclass(frozen=True)
class PairGram:
    """Cross-Gram matrices of k pairs of key/value heads, in the working dtype.

    Attributes
    ----------
    shared : Tensor, shape (k, d, d)
        Legs without query axis.
    query : Tensor, shape (k, m, m, d, d), or None
        The others, of query heads i of one and j of the other.
    """

    shared: torch.Tensor
    query: torch.Tensor | None

    def total(self, order: torch.Tensor) -> torch.Tensor:
        """M of the pairs with query heads in ``order``, (k, m); float64, (k, d, d)."""
        gram = self.shared
        if self.query is not None:
            rows = torch.arange(len(order), device=order.device)[:, None]
            i = torch.arange(order.shape[1], device=order.device)
            gram = gram + self.query[rows, i, order].sum(1)
        return gram.double()


class HeadAxis:
    """The legs of one axis of the heads, of a reference and of another model.

    Parameters
    ----------
    pieces : iterable of (Piece, Piece)
        Reference and other; every piece has the axes ``kv`` and ``axis``.
    axis : str
    group : Group
        Acts on ``axis``.
    heads : (int, int)
        Number of key/value heads, and of query heads in a group.
    work : torch.dtype
        In which products are taken.
    device : torch.device

    Attributes
    ----------
    norms : Tensor, shape (2, kv)
        Frobenius norms over all legs of both sides, float64.

    Raises
    ------
    SymmetryError
        If the weights are not finite.
    """

    def __init__(
        self,
        pieces: Iterable[tuple[Piece, Piece]],
        axis: str,
        group: Group,
        heads: tuple[int, int],
        work: torch.dtype,
        device: torch.device,
    ) -> None:
        self.group, self.device, self.work = group, device, work
        self.kv, self.m = heads
        self.legs: list[Leg] = [(_rows(x, axis), _rows(y, axis)) for x, y in pieces]
        #: squared norms of the heads of each leg, (2, kv, g), float64
        self._squares = [_squares(leg, work) for leg in self.legs]
        square = torch.zeros(2, self.kv, dtype=torch.float64, device=device)
        for one in self._squares:
            square += one.sum(2)
        self.norms = square.sqrt()
        if not all_finite(self.norms):
            raise SymmetryError("the weights of a head hold NaN or Inf, or are too large to square")
        #: number of products summed into one entry of M, and of weights per key/value head
        self.length = sum(x.shape[1] * x.shape[3] for x, _ in self.legs)
        self.entries = sum(x[0].numel() for x, _ in self.legs)

    def gram(self, a: torch.Tensor, b: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """M of the pairs (a, b), query heads of b in ``order``, (k, m); float64, (k, d, d)."""
        rows = torch.arange(len(order), device=self.device)[:, None]
        straight = torch.equal(order, torch.arange(self.m, device=self.device).expand_as(order))
        gram = self._zeros(len(a))
        for x, y in self.legs:
            for some in self._blocks(len(a), x):
                left, right = _take(x, a[some]), _take(y, b[some])
                if y.shape[1] > 1 and not straight:
                    right = right[rows[: len(right)], order[some]]
                gram[some] += (left.to(self.work) @ right.to(self.work).mT).sum(1)
        return gram.double()

    def pairs(self, a: torch.Tensor, b: torch.Tensor) -> PairGram:
        """Cross-Gram matrices of the pairs (a, b), each of shape (k,)."""
        shared, query = self._zeros(len(a)), None
        for x, y in self.legs:
            m, d = x.shape[1:3]
            gram = torch.stack(
                [self._products(x[i], y[j]) for i, j in zip(a.tolist(), b.tolist(), strict=True)]
            )
            if m == 1:
                shared += gram
            else:
                blocks = gram.view(-1, m, d, m, d).transpose(2, 3)
                query = blocks if query is None else query + blocks
        return PairGram(shared, query)

    def _products(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Inner products of all rows of two key/value heads of a leg, (m d, m d)."""
        left, right = (side.flatten(0, 1).to(self.work) for side in (x, y))
        with matrix_units(x, y):
            return left @ right.mT

    def project(self, a: torch.Tensor, b: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
        """Best element for the matrices ``gram`` (k, d, d) of the pairs (a, b).

        The errors of sums of n products add up like sqrt(n) eps times the norms of the factors.
        """
        eps = torch.finfo(self.work).eps
        return self.group.project(
            gram, self.length**0.5 * eps * self.norms[0, a] * self.norms[1, b]
        )

    def rotation(
        self, a: torch.Tensor, b: torch.Tensor, gram: torch.Tensor, stored: torch.dtype
    ) -> torch.Tensor:
        """Best element for each pair, or the identity where moving does not pay; (k, d, d)."""
        left, right = self.norms[0, a], self.norms[1, b]
        # Mean square of a rounding error is at most (eps |x|)^2 / 12 per entry.
        rounding = 0.0 if self.group.exact else torch.finfo(stored).eps ** 2 / 12
        # Rounding errors of M can feign a gain of the first order.
        noise = 4.0 * float(self.group.n) ** 0.5 * torch.finfo(self.work).eps
        distance = left**2 + right**2 - 2 * gram.diagonal(dim1=-2, dim2=-1).sum(-1)
        chance = chance_share(self.group.freedom, self.entries)
        least = rounding * right**2 + noise * left * right + chance * distance.clamp(min=0)
        result = torch.eye(self.group.n, dtype=gram.dtype, device=self.device).repeat(len(a), 1, 1)
        (open_,) = torch.nonzero(self.group.most_gain(gram) > least, as_tuple=True)
        if len(open_) == 0:
            return result
        eye, some = result[open_], gram[open_]
        g = self.project(a[open_], b[open_], some)
        # Decrease of the squared distance, 2 <g - 1, M>, written without cancellation: at the
        # optimum g^T M is symmetric on the group's algebra and (g - 1)^T (g - 1) = 2 - g - g^T.
        gain = inner((g - eye).mT @ (g - eye), g.mT @ some)
        result[open_] = torch.where((gain > least[open_])[:, None, None], g, eye)
        return result

    def bounds(self, *, every_column: bool) -> HeadBounds:
        """Bound the objective of all pairs of heads.

        Parameters
        ----------
        every_column : bool
            Whether all columns of the legs are looked at; else some, with large norms.
        """
        shared = [k for k, (x, _) in enumerate(self.legs) if x.shape[1] == 1]
        query = [k for k, (x, _) in enumerate(self.legs) if x.shape[1] > 1]
        kv, m = self.kv, self.m
        result = torch.zeros(kv, kv, m, m, dtype=torch.float64, device=self.device)
        if query:
            every = self._bound(query, every_column)
            result = every.view(kv, m, kv, m).transpose(1, 2)
        return HeadBounds(self._bound(shared, every_column), result)

    def _bound(self, legs: Sequence[int], every_column: bool) -> torch.Tensor:
        """Upper bounds of what some legs add for all pairs of their heads, (A, B), float64."""
        if not legs:
            return torch.zeros(self.kv, self.kv, dtype=torch.float64, device=self.device)
        square = torch.stack([self._squares[k].flatten(1) for k in legs]).sum(0)  # (2, heads)
        largest = square.amax(1).sqrt()
        # Powers of two with which no norm is larger than one.
        factor = torch.ldexp(torch.ones_like(largest), -torch.frexp(largest).exponent)
        square = square * factor[:, None].square()
        factors = self.group.factors()
        cell = max(index.shape[1] for index, _ in factors)
        widths = [self.legs[k][0].shape[3] for k in legs]
        numbers = [width if every_column else columns(width, cell) for width in widths]
        chosen = [_largest(self.legs[k], n) for k, n in zip(legs, numbers, strict=True)]
        left, right = (
            torch.cat([one[side] for one in chosen], 2).to(self.work).mul_(float(factor[side]))
            for side in range(2)
        )
        total = torch.zeros(len(left), len(right), dtype=torch.float64, device=self.device)
        for index, part in factors:
            x, y = (_cells(one, index.to(self.device)) for one in (left, right))
            if not every_column and _few_products(x, y):
                total += _frobenius(x, y)
                continue
            # With one query head each, the best value of a pair is not much dearer than a bound.
            measure = part.value if every_column and self.m == 1 else part.bound
            total += _measured(x, y, measure)
        if numbers != widths:
            # Widened by rounding: what is left of a square is known to so many of its digits.
            eps = self.length**0.5 * torch.finfo(self.work).eps
            seen = torch.stack([_square(left), _square(right)])
            rest = ((square - seen).clamp(min=0) + eps * square).sqrt()
            total += rest[0][:, None] * rest[1]
        most = square[0].sqrt()[:, None] * square[1].sqrt()
        return torch.minimum(total, most) / factor.prod()

    def _blocks(self, count: int, leg: torch.Tensor) -> Iterator[slice]:
        """Cut ``count`` pairs of key/value heads into blocks whose weights are cast at a time."""
        weights = WEIGHTS if self.device.type == "cpu" else MANY_WEIGHTS
        step = max(1, weights // leg[0].numel())
        return (slice(start, start + step) for start in range(0, count, step))

    def _zeros(self, count: int) -> torch.Tensor:
        n = self.group.n
        return torch.zeros(count, n, n, dtype=self.work, device=self.device)


def columns(width: int, cell: int) -> int:
    """Return how many columns of a leg bounds look at for cells of some dimensions.

    Columns s of independent heads leave about sqrt(cell / s) of the bound by the norms. All are
    taken where that is not much more than some.
    """
    number = max(LEAST, PER_DIMENSION * cell)
    return width if 2 * number > width else number


def _rows(piece: Piece, axis: str) -> torch.Tensor:
    """View a piece as (kv, g, d, rest) with g = 1 where it has no query axis."""
    lead = [piece.dim("kv"), piece.dim("g"), piece.dim(axis)]
    known = [dim for dim in lead if dim is not None]
    rest = [dim for dim in range(piece.tensor.dim()) if dim not in known]
    x = piece.tensor.permute(*known, *rest)
    if lead[1] is None:
        x = x.unsqueeze(1)
    return x.flatten(3) if x.dim() > 3 else x.unsqueeze(3)


def _squares(leg: Leg, work: torch.dtype) -> torch.Tensor:
    """Squared Frobenius norms of all heads of both sides, (2, kv, g), float64."""
    rows = torch.stack([row_squares(x.flatten(0, 2), work) for x in leg])
    return rows.double().view(2, *leg[0].shape[:3]).sum(3)


def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the key/value heads of an index; the given ones where that is all of them."""
    straight = torch.arange(len(x), device=x.device)
    return x if torch.equal(index, straight) else x[index]


def _largest(leg: Leg, number: int) -> Leg:
    """Return so many columns of all heads, (heads, dimensions, number), of both sides.

    Those with the largest norms on the reference's side, judged by `ROWS` of its rows.
    """
    x, y = (side.flatten(0, 1) for side in leg)
    if number == x.shape[2]:
        return x, y
    rows = x.flatten(0, 1)
    few = rows[:: max(1, len(rows) // ROWS)].double()
    some = few.square().sum(0).topk(number).indices
    return x[..., some], y[..., some]


def _square(x: torch.Tensor) -> torch.Tensor:
    """Squared Frobenius norms of the heads of some columns, float64."""
    return x.square().sum((1, 2), dtype=torch.float64)


def _cells(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return heads by cells, (cells, heads, dimensions, columns)."""
    if index.shape[0] == 1 and index.shape[1] == x.shape[1]:
        return x.unsqueeze(0)
    return x[:, index].transpose(0, 1)


def _few_products(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Tell whether `_frobenius` takes fewer products than `_measured`."""
    _, heads, k, s = left.shape
    other = right.shape[1]
    return (heads + other) * k * s + heads * other * s < heads * other * k**2


def _frobenius(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Bound what all pairs of heads add by Frobenius norms of cross-Gram matrices, (A, B).

    Their squares are inner products of Gram matrices of columns, and widened by the rounding of
    those relative to the product of the norms.
    """
    _, _, k, s = left.shape
    square = torch.zeros(left.shape[1], right.shape[1], dtype=torch.float64, device=left.device)
    total = square.clone()
    for x, y in zip(left, right, strict=True):
        square = ((x.mT @ x).flatten(1) @ (y.mT @ y).flatten(1).mT).double()
        error = (s + 2 * k**0.5) * torch.finfo(x.dtype).eps
        square += error * _square(x)[:, None] * _square(y)
        total += (k * square).sqrt()
    return total


def _measured(
    left: torch.Tensor, right: torch.Tensor, measure: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Add up a measure of the cross-Gram matrices of all pairs of heads over cells, (A, B)."""
    cells, _, d, _ = left.shape
    other = right.shape[1]
    step = max(1, ENTRIES // (cells * other * d * d))
    result = []
    for x in left.split(step, 1):
        gram = x.flatten(1, 2) @ right.flatten(1, 2).mT
        blocks = gram.view(cells, -1, d, other, d).transpose(2, 3)
        result.append(measure(blocks).double().sum(0))
    return torch.cat(result)
