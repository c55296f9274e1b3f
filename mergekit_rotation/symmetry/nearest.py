"""Matching vectors that have clear partners, without all of their inner products.

For any numbers v (prices of the columns) no permutation has a larger sum of scores S than

    sum_j v_j + sum_i max_j (S_ij - v_j),

so a permutation p for which S_ij - v_j <= S_ip(i) - v_p(i) for all i and j is optimal. For
v_j = |b_j|^2 / 2 this says that b_p(i) is the vector closest to a_i. A few columns P of the
vectors can prove it, because by Cauchy and Schwarz the others, Q, cannot add more than the
product of their norms:

    <a_i, b_j>  <=  <P a_i, P b_j> + |Q a_i| |Q b_j|;

plain and signed parts are bounded like this apart. That holds for every choice of columns: what
is accepted is proven, not probable, up to rounding, which the bound is widened by. Rows that want
the same column are assigned by themselves; the prices of what they contend for go up until nobody
wants anything else.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt

import torch
from scipy.optimize import linear_sum_assignment

from mergekit_rotation.symmetry.vectors import Vectors

Sides = tuple[torch.Tensor, torch.Tensor]

#: columns that are looked at first
FIRST = 32

#: share of the columns beyond which the full product is cheaper
MOST_COLUMNS = 0.2

#: share of the rows that may need all of their products
MOST_ROWS = 0.0625

#: entries of a tile of the matrix of bounds: few enough for a cache; and for an accelerator
ENTRIES, MANY_ENTRIES = 2**18, 2**26

#: most rounds in which prices go up
ROUNDS = 100


def nearest_matching(vectors: Vectors) -> torch.Tensor | None:
    """Return the permutation p that maximises the sum of scores, if that is cheap to prove.

    Parameters
    ----------
    vectors : Vectors
        n vectors of length L on each side.

    Returns
    -------
    Tensor of int64, shape (n,), or None
        Optimal up to rounding errors of the scores; rows for which staying is as good as that
        stay. None where the vectors are too far apart, or too many want the same partner: then
        the full matrix of scores is needed. Takes n^2 s + 4 n L products, s << L columns being
        looked at, and memory for a few rows of scores.
    """
    scaled = _Scaled.of(vectors)
    if scaled is None:
        return torch.arange(vectors.count, device=vectors.device)
    search = _Search(scaled)
    few = MOST_ROWS * vectors.count
    search.look(scaled.bounds(FIRST))
    if len(search.open) > few:
        share = 1.5 * float(search.needed().quantile(0.9))
        if share <= MOST_COLUMNS:
            search.look(scaled.bounds(max(2 * FIRST, int(share * vectors.length))))
    return None if len(search.open) > few else _settle(scaled, search)


@dataclass(frozen=True)
class _Scaled:
    """The vectors with norms of one at most, and prices of the columns.

    Attributes
    ----------
    vectors : Vectors
    factors : tuple of float
        Powers of two that the sides are multiplied by.
    square : Tensor, shape (2 kinds, 2 sides, n)
        Squared norms of the scaled vectors, float64.
    price : Tensor, shape (n,)
        In the working precision.
    """

    vectors: Vectors
    factors: tuple[float, float]
    square: torch.Tensor
    price: torch.Tensor

    @classmethod
    def of(cls, vectors: Vectors) -> "_Scaled | None":
        """Scale both sides; None if one of them is zero."""
        largest = torch.linalg.vector_norm(vectors.norms, dim=0).amax(1)
        if bool((largest == 0).any()):
            return None
        factor = torch.ldexp(torch.ones_like(largest), -torch.frexp(largest).exponent)
        square = (vectors.norms * factor[:, None]).square()
        left, right = square.sum(0)
        price = (left.sum() / right.sum()).sqrt() * right / 2
        a, b = factor.tolist()
        return cls(vectors, (a, b), square, price.to(vectors.work))

    def value(self, index: torch.Tensor) -> torch.Tensor:
        """Score minus price of every row i with column ``index[i]``, float64, (n,)."""
        a, b = self.factors
        return self.vectors.scores(index) * (a * b) - self.price[index].double()

    def tolerance(self, index: torch.Tensor) -> torch.Tensor:
        """What rounding leaves open of these values, (n,)."""
        a, b = self.factors
        noise = self.vectors.noise(torch.arange(len(index), device=index.device), index)
        return 4 * (noise * (a * b) + self.vectors.error * self.price[index].double())

    def values(self, rows: torch.Tensor | None, columns: torch.Tensor | None) -> torch.Tensor:
        """Scores minus prices of some rows and columns (None: of all), float64."""
        a, b = self.factors
        price = (self.price if columns is None else self.price[columns]).double()
        return self.vectors.gram(rows, columns).double().mul_(a * b).sub_(price)

    def bounds(self, count: int) -> "_Bounds":
        """Bound the values of all pairs by so many columns of the vectors, evenly spread."""
        work, error = self.vectors.work, self.vectors.error
        rest = self.square.clone()
        # Kinds: plain, signed. Sides: left, right.
        none = self.price.new_empty(len(self.price), 0)
        some: list[tuple[list[torch.Tensor], list[torch.Tensor]]]
        some = [([none], [none]), ([none], [none])]
        for part in self.vectors.parts:
            kind, width = int(part.signed), part.a.shape[1]
            number = min(width, -(-count * width // self.vectors.length))
            index = torch.arange(number, device=self.vectors.device) * width // number
            for side, x in enumerate((part.a, part.b)):
                columns = (x if number == width else x[:, index]).to(work) * self.factors[side]
                rest[kind, side] -= columns.square().sum(1).double()
                some[kind][side].append(columns)
        # Widened by rounding: the product of two norms grows by the error of the score.
        rest = (rest.clamp(min=0) + error * self.square).sqrt().to(work)
        last = (torch.ones_like(self.price), -(1 - error) * self.price)
        for side in range(2):
            some[0][side].extend([rest[:, side].mT, last[side][:, None]])
        plain, signed = ((torch.cat(a, 1), torch.cat(b, 1)) for a, b in some)
        return _Bounds(plain, signed)


@dataclass(frozen=True)
class _Bounds:
    """Upper bounds of the values of all pairs: products of short rows.

    Attributes
    ----------
    plain, signed : (left, right), both of shape (n, k)
        A bound is the product of two plain rows, and the absolute value of that of two signed ones.
    """

    plain: Sides
    signed: Sides

    def tiles(self, rows: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the bounds of some rows, from a column on; all tiles share their memory."""
        left, right = self.plain
        signed, signed_right = self.signed
        left, signed = left[rows], signed[rows]
        entries = ENTRIES if left.device.type == "cpu" else MANY_ENTRIES
        width = min(len(right), entries // len(rows))
        memory = left.new_empty(len(rows) * width)
        for start in range(0, len(right), width):
            columns = slice(start, start + width)
            there = right[columns]
            tile = memory[: len(rows) * len(there)].view(len(rows), -1)
            torch.mm(signed, signed_right[columns].mT, out=tile).abs_()
            yield start, tile.addmm_(left, there.mT)


class _Search:
    """The best column of every row.

    Attributes
    ----------
    choice : Tensor of int64, shape (n,)
    value : Tensor, shape (n,)
        Of the choice, float64.
    open : Tensor of int64
        Rows for which another column may be better.
    """

    def __init__(self, scaled: _Scaled) -> None:
        self.scaled = scaled
        self.rows = torch.arange(scaled.vectors.count, device=scaled.vectors.device)
        self.stay = scaled.value(self.rows)
        self.tie = scaled.tolerance(self.rows)
        self.choice, self.value, self.open = self.rows, self.stay, self.rows

    def look(self, bounds: _Bounds) -> None:
        """Decide what rows that are open can be decided by some bounds."""
        proposal = self.choice.clone()
        proposal[self.open] = self.open
        # Who does not exceed staying is no rival.
        second = self.stay + self.tie
        entries = ENTRIES if self.open.device.type == "cpu" else MANY_ENTRIES
        for rows in self.open.split(isqrt(entries)):
            second[rows] = self._best(bounds, rows, proposal)
        value = self.scaled.value(proposal)
        moves = value > self.stay + self.tie
        self.choice = torch.where(moves, proposal, self.rows)
        self.value = torch.where(moves, value, self.stay)
        tie = self.scaled.tolerance(self.choice)
        self.open = self.open[(second > self.value + tie)[self.open]]

    def _best(self, bounds: _Bounds, rows: torch.Tensor, proposal: torch.Tensor) -> torch.Tensor:
        """Propose the column of the largest bound to some rows, and return the next bound.

        Only columns that exceed staying count.
        """
        place = torch.arange(len(rows), device=rows.device)
        first = (self.stay + self.tie)[rows]
        second = first.clone()
        low, high = (int(row) for row in rows.aminmax())
        for start, bound in bounds.tiles(rows):
            end = start + bound.shape[1]
            if start <= high and low < end:
                own = (rows >= start) & (rows < end)
                bound[place[own], rows[own] - start] = -torch.inf
            top = bound.amax(1).double()
            (some,) = torch.nonzero(top > second, as_tuple=True)
            if len(some) == 0:
                continue
            top, bound, before = top[some], bound[some], first[some]
            column = bound.argmax(1)
            bound.scatter_(1, column[:, None], -torch.inf)
            lower = torch.maximum(second[some], bound.amax(1).double())
            second[some] = torch.maximum(lower, torch.minimum(top, before))
            first[some] = torch.maximum(top, before)
            better = top > before
            proposal[rows[some[better]]] = column[better] + start
        return second

    def needed(self) -> torch.Tensor:
        """Share of the columns that rows which are open will need, about."""
        a, b = self.scaled.square.sum(0).sqrt()
        length = (a * b[self.choice]).clamp(min=torch.finfo(torch.float64).tiny)
        score = self.value + self.scaled.price[self.choice].double()
        result: torch.Tensor = 1 - (score / length)[self.open]
        return result


def _settle(scaled: _Scaled, search: _Search) -> torch.Tensor | None:
    """Assign the rows that want the same column, or whose best column is not known.

    They are assigned to the columns that are left, at prices at which no other row wants these.
    If that makes them want columns of others, the owners of those take part as well.
    """
    choice, n = search.choice.clone(), scaled.vectors.count
    inside = torch.bincount(choice, minlength=n)[choice] > 1
    inside[search.open] = True
    rows = columns = search.rows[:0]
    across = torch.zeros(0, n, dtype=torch.float64, device=choice.device)
    down = across.mT
    owner = torch.full_like(choice, -1)
    new = search.rows[inside]
    while len(new):
        if len(rows) + len(new) > MOST_ROWS * n:
            return None
        owner[:] = -1
        owner[choice[~inside]] = search.rows[~inside]
        more = search.rows[owner < 0]
        more = more[~torch.isin(more, columns)]
        rows, columns = torch.cat([rows, new]), torch.cat([columns, more])
        across = torch.cat([across, scaled.values(new, None)])
        down = torch.cat([down, scaled.values(None, more)], 1)

        value, tie = across[:, columns], search.tie[rows]
        value += (rows[:, None] == columns) * tie[:, None]
        _, best = linear_sum_assignment(value.cpu().numpy(), maximize=True)
        order = torch.as_tensor(best, dtype=torch.int64, device=rows.device)
        choice[rows] = columns[order]
        wish = (down - search.value[:, None])[~inside]
        least = wish.amax(0) if len(wish) else torch.zeros_like(value[0])
        price = _prices(value, order, least)
        if price is None:
            return None
        kept = (value.gather(1, order[:, None])[:, 0] - price[order] + tie)[:, None]
        new = owner[(across > kept).any(0) & (owner >= 0)]
        inside[new] = True
    return choice


def _prices(value: torch.Tensor, order: torch.Tensor, least: torch.Tensor) -> torch.Tensor | None:
    """Return the lowest prices at which row k wants no column but ``order[k]``.

    Parameters
    ----------
    value : Tensor, shape (k, k)
    order : Tensor of int64, shape (k,)
        An optimal assignment.
    least : Tensor, shape (k,)
        What prices may not be below.

    Returns
    -------
    Tensor, shape (k,), or None
        None if they take more than `ROUNDS` to settle.
    """
    price = least
    for _ in range(ROUNDS):
        kept = value.gather(1, order[:, None]) - price[order][:, None]
        higher = torch.maximum(price, (value - kept).amax(0))
        if torch.allclose(higher, price, rtol=0, atol=8 * torch.finfo(value.dtype).eps):
            return price
        price = higher
    return None
