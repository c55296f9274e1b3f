"""Linear assignment: which row of one model is which row of the other."""

from collections.abc import Callable

import torch
from scipy.optimize import linear_sum_assignment
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from mergekit_rotation.symmetry.sparse import sparse_assignment

#: rows from which on few entries of the scores are tried first, and how far from the optimum,
#: relatively, an assignment of this size may be
MANY, GAP = 1024, 1e-4


def linear_assignment(score: torch.Tensor) -> torch.Tensor:
    """Return the permutation p that maximises sum_i score[i, p(i)].

    Where the largest entry of every row lies in a column of its own, that choice attains the sum
    of the row maxima, an upper bound of every assignment, and is returned without solving
    anything. Otherwise the linear assignment problem is solved: from `MANY` rows on by few of the
    entries, if what that gives is certified to reach the optimum but for a share of `GAP`, and
    exactly otherwise.

    Parameters
    ----------
    score : Tensor, shape (n, n)
        Finite.

    Returns
    -------
    Tensor of int64, shape (n,), on the device of ``score``.

    Raises
    ------
    torch.linalg.LinAlgError
        If the scores are such that there is none.

    References
    ----------
    Crouse, "On implementing 2D rectangular assignment algorithms", IEEE TAES 52, 2016,
    doi:10.1109/TAES.2016.140952 (the algorithm of `scipy.optimize.linear_sum_assignment`).
    """
    return certified_assignment(score)[0]


def certified_assignment(score: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return what `linear_assignment` does, and the certified gap.

    No permutation has a sum that is larger by more than this share of the largest; it is 0 where
    the permutation is optimal up to rounding errors.
    """
    n = score.shape[0]
    best = score.argmax(dim=1)
    if torch.unique(best).numel() == n:
        return best, 0.0
    try:
        if n >= MANY:
            found = sparse_assignment(score, GAP)
            if found.gap <= GAP:
                return found.index, found.gap
        _, columns = linear_sum_assignment(score.detach().cpu().numpy(), maximize=True)
    except ValueError as problem:
        raise torch.linalg.LinAlgError(f"no assignment: {problem}") from problem
    return torch.as_tensor(columns, dtype=torch.int64, device=score.device), 0.0


def lazy_assignment(
    bound: torch.Tensor,
    evaluate: Callable[[torch.Tensor], torch.Tensor],
    tighter: Callable[[], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Solve an assignment whose scores are dear, given cheap upper bounds.

    Starts from the bounds, evaluates only pairs that an optimal assignment of the current
    overestimates selects, and stops when all selected pairs are evaluated: every other
    assignment is then bounded by the one returned.

    Parameters
    ----------
    bound : Tensor, shape (n, n)
        Upper bounds of the scores.
    evaluate : callable
        Maps pairs, int64 of shape (k, 2), to their scores, shape (k,).
    tighter : callable, optional
        Returns bounds that are dearer. They are asked for once more than 1.5 n pairs would have
        to be evaluated.

    Returns
    -------
    Tensor of int64, shape (n,)
    """
    n = bound.shape[0]
    score = bound.clone()
    known = torch.zeros_like(bound, dtype=torch.bool)
    rows = torch.arange(n, device=bound.device)
    while True:
        choice = linear_assignment(score)
        pairs = torch.stack([rows, choice], dim=1)[~known[rows, choice]]
        if len(pairs) == 0:
            return choice
        if tighter is not None and int(known.sum()) + len(pairs) > n + n // 2:
            score = torch.where(known, score, torch.minimum(score, tighter()))
            tighter = None
            continue
        score[pairs[:, 0], pairs[:, 1]] = evaluate(pairs).to(score.dtype)
        known[pairs[:, 0], pairs[:, 1]] = True


def paying_cycles(index: torch.Tensor, gain: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Mark the entries of a permutation whose cycle gains more than is asked for.

    A cycle can be undone by itself, so ties stay where they are whatever an assignment made of
    them, and however much other cycles gain.

    Parameters
    ----------
    index : Tensor of int64, shape (n,)
    gain, least : Tensor, shape (n,)
        What each entry gains over staying, and the least that it has to.

    Returns
    -------
    Tensor of bool, shape (n,)
    """
    edges = coo_array(([1] * len(index), (list(range(len(index))), index.tolist())))
    _, labels = connected_components(edges, directed=False)
    cycle = torch.as_tensor(labels, dtype=torch.int64, device=index.device)
    zero = torch.zeros_like(gain)
    pays = zero.index_add(0, cycle, gain) > zero.index_add(0, cycle, least)
    result: torch.Tensor = pays[cycle]
    return result
