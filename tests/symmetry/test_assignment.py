"""Linear assignment against brute force, and the lazy one against the full matrix."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laws import ANY_KIND, DOUBLE, LAW, SEEDS, matrices, rng, tolerance
from mergekit_rotation.symmetry import lazy_assignment, linear_assignment

ORDERS = st.integers(1, 6)


def total(score: torch.Tensor, choice: torch.Tensor) -> float:
    assert sorted(choice.tolist()) == list(range(len(score)))
    return float(score[torch.arange(len(score)), choice].sum())


def optimum(score: torch.Tensor) -> float:
    orders = torch.tensor(list(itertools.permutations(range(len(score)))))
    return float(score[torch.arange(len(score)), orders].sum(1).max())


def rounding(score: torch.Tensor) -> float:
    return tolerance(len(score)) * float(score.abs().max())


class Scores:
    """Scores that remember which pairs were asked for."""

    def __init__(self, score: torch.Tensor) -> None:
        self.score = score
        self.asked: list[tuple[int, int]] = []

    def __call__(self, pairs: torch.Tensor) -> torch.Tensor:
        assert pairs.dtype == torch.int64 and pairs.shape[1] == 2
        self.asked += [(a, b) for a, b in pairs.tolist()]
        return self.score[pairs[:, 0], pairs[:, 1]]


@LAW
@given(n=ORDERS, kind=ANY_KIND, seed=SEEDS)
def test_assignment_is_optimal(n, kind, seed):
    score = matrices(kind, seed, n, n)
    choice = linear_assignment(score)
    assert choice.dtype == torch.int64 and choice.shape == (n,)
    assert abs(total(score, choice) - optimum(score)) <= rounding(score)


@LAW
@given(n=ORDERS, seed=SEEDS)
def test_planted_permutation_is_found(n, seed):
    planted = torch.randperm(n, generator=rng(seed))
    score = torch.rand(n, n, dtype=DOUBLE, generator=rng(seed + 1))
    score[torch.arange(n), planted] += 1
    assert torch.equal(linear_assignment(score), planted)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_input_is_left_alone(dtype):
    score = matrices("generic", 0, 5, 5).to(dtype)
    bound = score + 1
    kept = score.clone(), bound.clone()
    linear_assignment(score)
    lazy_assignment(bound, Scores(score))
    assert torch.equal(score, kept[0]) and torch.equal(bound, kept[1])


@LAW
@given(n=ORDERS, seed=SEEDS, levels=st.integers(1, 3))
def test_a_bonus_on_the_diagonal_breaks_ties_for_the_identity(n, seed, levels):
    """Whole scores of which the identity is one of many optima."""
    score = torch.randint(levels, (n, n), generator=rng(seed)).to(DOUBLE)
    score.diagonal().copy_(score.amax(1))
    score.diagonal().add_(1 / (2 * n))
    identity = torch.arange(n)
    assert torch.equal(linear_assignment(score), identity)
    evaluate = Scores(score)
    assert torch.equal(lazy_assignment(score.clone(), evaluate), identity)
    assert sorted(evaluate.asked) == [(i, i) for i in range(n)]


@LAW
@given(n=ORDERS, kind=ANY_KIND, seed=SEEDS, slack=st.sampled_from([0.0, 0.1, 1.0, 100.0]))
def test_lazy_assignment_is_the_optimum_for_any_upper_bound(n, kind, seed, slack):
    score = matrices(kind, seed, n, n)
    above = torch.rand(n, n, dtype=DOUBLE, generator=rng(seed + 1))
    bound = score + slack * score.abs().max() * above
    evaluate = Scores(score)
    choice = lazy_assignment(bound, evaluate)
    assert abs(total(score, choice) - optimum(score)) <= rounding(bound)
    assert len(set(evaluate.asked)) == len(evaluate.asked)
    assert set(enumerate(choice.tolist())) <= set(evaluate.asked)


@LAW
@given(n=st.integers(1, 30), seed=SEEDS)
def test_tight_bounds_cost_one_evaluation_per_row(n, seed):
    score = matrices("generic", seed, n, n)
    evaluate = Scores(score)
    choice = lazy_assignment(score, evaluate)
    assert total(score, choice) == total(score, linear_assignment(score))
    assert len(evaluate.asked) == n


@LAW
@given(n=st.integers(2, 30), seed=SEEDS)
def test_only_pairs_whose_bound_can_compete_are_evaluated(n, seed):
    """A clear winner in every row: bounds of all other pairs stay below the evaluated scores."""
    planted = torch.randperm(n, generator=rng(seed))
    score = torch.rand(n, n, dtype=DOUBLE, generator=rng(seed + 1))
    score[torch.arange(n), planted] += 3
    evaluate = Scores(score)
    assert torch.equal(lazy_assignment(score + 1, evaluate), planted)
    assert len(evaluate.asked) == n


@LAW
@given(n=ORDERS, seed=SEEDS)
def test_dearer_bounds_are_asked_for_once_and_only_where_many_pairs_compete(n, seed):
    score = matrices("generic", seed, n, n)
    asked = []

    def tighter():
        asked.append(True)
        return score.clone()

    loose = torch.full_like(score, float(score.max()) + 1)
    evaluate = Scores(score)
    choice = lazy_assignment(loose, evaluate, tighter)
    assert abs(total(score, choice) - optimum(score)) <= rounding(loose)
    assert len(asked) <= 1
    assert len(evaluate.asked) <= 3 * n
    lazy_assignment(score.clone(), Scores(score), lambda: pytest.fail("not needed"))
