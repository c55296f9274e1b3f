"""Large assignments from few entries of the scores, with a certified gap.

For any prices v of the columns, no assignment has a larger sum than

    sum_j v_j + sum_i max_j (score_ij - v_j).

So the assignment that is best among some candidates comes with a bound, at the prices at which no
row prefers another candidate; and what rows prefer at these prices among all columns are the
candidates that are missing.
"""

from dataclasses import dataclass

import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import min_weight_full_bipartite_matching

#: candidates of every row and column to begin with, and of every row that are added in a round
FIRST, MORE = 16, 8

#: most rounds of adding candidates, and of raising prices in each of them
ROUNDS, RAISES = 6, 1000

#: sum of the costs of an assignment that the solver is given, at most: exact with their signs
LARGEST = 2.0**50

#: entries of the scores at a time
BLOCK = 2**20


@dataclass(frozen=True)
class Certified:
    """An assignment, and how far it can be from the best one.

    Attributes
    ----------
    index : Tensor of int64, shape (n,)
    value, bound : float
        The sum that it attains, and one that no assignment exceeds.
    """

    index: torch.Tensor
    value: float
    bound: float

    @property
    def gap(self) -> float:
        """Difference to the bound, relative to it."""
        excess = max(0.0, self.bound - self.value)
        return excess / abs(self.bound) if excess else 0.0


def sparse_assignment(score: torch.Tensor, gap: float) -> Certified:
    """Assign rows to columns by few entries of the scores.

    Candidates are at first the largest entries of rows and columns, each relative to the largest
    of both, and the diagonal, so that there is always an assignment.

    Parameters
    ----------
    score : Tensor, shape (n, n)
        Finite.
    gap : float
        Candidates are added until the certified gap is no larger, or `ROUNDS` are over.

    Returns
    -------
    Certified
        The last assignment, with the lowest bound.

    References
    ----------
    Jonker, Volgenant, "A shortest augmenting path algorithm for dense and sparse linear
    assignment problems", Computing 38, 1987, doi:10.1007/BF02278710 (the algorithm of
    `scipy.sparse.csgraph.min_weight_full_bipartite_matching`).
    """
    n = len(score)
    places = _largest(score)
    price = torch.zeros(n, dtype=torch.float64, device=score.device)
    bound = float("inf")
    for _ in range(ROUNDS):
        rows, columns = places // n, places % n
        weight = score[rows, columns].double()
        index = _solve(rows, columns, weight, price)
        attained = score.gather(1, index[:, None])[:, 0].double()
        price = _prices(rows, columns, weight, index, attained)
        wanted, most = _wanted(score, price)
        bound = min(bound, most)
        found = Certified(index, float(attained.sum()), bound)
        if found.gap <= gap:
            break
        places = torch.unique(torch.cat([places, wanted]))
    return found


def _largest(score: torch.Tensor) -> torch.Tensor:
    """Return the places (row * n + column) of the first candidates, in order."""
    n = len(score)
    line = torch.arange(n, device=score.device)
    k = min(FIRST, n)
    tiny = torch.finfo(score.dtype).tiny
    blocks, memory = _blocks(score)
    wide = torch.cat([_largest_size(score[some], 1) for some in blocks]).clamp(min=tiny)
    high = torch.stack([_largest_size(score[some], 0) for some in blocks]).amax(0).clamp(min=tiny)
    places = line.new_empty(n, 2 * k + 1)
    places[:, 0] = line * n + line
    for some in blocks:
        block = torch.div(score[some], high, out=memory[0, : some.stop - some.start])
        places[some, 1 : k + 1] = line[some, None] * n + block.topk(k, 1).indices
        down = torch.div(score[:, some], wide[:, None], out=block.view(n, -1))
        block = memory[1, : some.stop - some.start].copy_(down.mT)
        places[some, k + 1 :] = block.topk(k, 1).indices * n + line[some, None]
    result: torch.Tensor = torch.unique(places)
    return result


def _blocks(score: torch.Tensor) -> tuple[list[slice], torch.Tensor]:
    """Cut rows into blocks, and return memory for the scores of two, which all share."""
    n = len(score)
    step = min(n, max(1, BLOCK // n))
    blocks = [slice(start, min(start + step, n)) for start in range(0, n, step)]
    return blocks, score.new_empty(2, step, n)


def _largest_size(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the largest absolute value along a dimension, without a copy."""
    return torch.maximum(x.amax(dim), -x.amin(dim))


def _solve(
    rows: torch.Tensor, columns: torch.Tensor, weight: torch.Tensor, price: torch.Tensor
) -> torch.Tensor:
    """Return the best assignment among candidates, (n,).

    Prices change no sum by more than a constant; the solver is much faster where they are right.
    It is given whole numbers, whose sums are exact: where costs tie but for rounding errors, it
    raises its own prices by such errors without end.
    """
    n = len(price)
    value = weight - price[columns]
    top = torch.full_like(price, -torch.inf).scatter_reduce(0, rows, value, "amax")
    cost = top[rows] - value
    largest = float(cost.max())
    if largest > 0:
        cost = (cost / largest * (LARGEST / n)).round_()
    cost += 1  # a zero would be no candidate
    places = (rows.cpu().numpy(), columns.cpu().numpy())
    _, index = min_weight_full_bipartite_matching(
        csr_array((cost.cpu().numpy(), places), shape=(n, n))
    )
    return torch.as_tensor(index, dtype=torch.int64, device=rows.device)


def _prices(
    rows: torch.Tensor,
    columns: torch.Tensor,
    weight: torch.Tensor,
    index: torch.Tensor,
    attained: torch.Tensor,
) -> torch.Tensor:
    """Raise prices from zero until no row prefers another candidate, (n,)."""
    price = torch.zeros_like(attained)
    enough = torch.finfo(weight.dtype).eps * float(weight.abs().max())
    for _ in range(RAISES):
        kept = attained - price[index]
        higher = price.scatter_reduce(0, columns, weight - kept[rows], "amax")
        if float((higher - price).max()) <= enough:
            break
        price = higher
    return price


def _wanted(score: torch.Tensor, price: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return the places that rows prefer at some prices, and the bound that these prices give."""
    n = len(score)
    line = torch.arange(n, device=score.device)
    price = price.to(score.dtype)  # prices may be any numbers
    bound = float(price.double().sum())
    k = min(MORE, n)
    places = line.new_empty(n, k)
    blocks, memory = _blocks(score)
    for some in blocks:
        block = torch.sub(score[some], price, out=memory[0, : some.stop - some.start])
        best = block.topk(k, 1)
        bound += float(best.values[:, 0].double().sum())
        places[some] = line[some, None] * n + best.indices
    return places.flatten(), bound
