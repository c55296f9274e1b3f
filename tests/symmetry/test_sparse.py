"""Large assignments by their best entries: valid, certified, and the dense solver otherwise."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from laws import ANY_KIND, DOUBLE, LAW, SEEDS, matrices, rng, tolerance
from mergekit_rotation.symmetry import assignment, linear_assignment, sparse
from mergekit_rotation.symmetry.sparse import sparse_assignment


def total(score, index):
    assert sorted(index.tolist()) == list(range(len(score)))
    return float(score[torch.arange(len(score)), index].double().sum())


def optimum(score):
    rows, columns = linear_sum_assignment(score.double().numpy(), maximize=True)
    return float(score[rows, columns].double().sum())


def rounding(score):
    return tolerance(len(score), score.dtype) * float(score.abs().max()) * len(score)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@LAW
@given(n=st.integers(1, 60), kind=ANY_KIND, seed=SEEDS, rounds=st.integers(1, 3))
def test_the_bound_holds_and_the_value_is_attained(dtype, n, kind, seed, rounds):
    score = matrices(kind, seed, n, n).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"FIRST": 1, "MORE": 1, "ROUNDS": rounds, "BLOCK": 100}.items():
            patch.setattr(sparse, name, value)
        found = sparse_assignment(score, 0.0)
    assert abs(total(score, found.index) - found.value) <= rounding(score)
    assert found.value <= optimum(score) + rounding(score)
    assert found.bound >= optimum(score) - rounding(score)
    assert found.gap >= 0


@LAW
@given(n=st.integers(1, 60), kind=ANY_KIND, seed=SEEDS)
def test_candidates_are_added_until_there_is_no_gap(n, kind, seed):
    score = matrices(kind, seed, n, n)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"FIRST": 2, "MORE": 2, "ROUNDS": n + 1}.items():
            patch.setattr(sparse, name, value)
        found = sparse_assignment(score, 0.0)
    assert abs(found.value - optimum(score)) <= rounding(score)
    assert found.bound - found.value <= rounding(score)


@pytest.mark.parametrize("spread", [0.0, 1.0], ids=["equal norms", "unequal norms"])
@pytest.mark.parametrize("shift", [0.0, -10.0])
def test_few_entries_of_random_scores_reach_the_optimum(shift, spread):
    scale = torch.exp(spread * torch.randn(2, 400, generator=rng(1)))
    score = (torch.randn(400, 400, generator=rng(0)) + shift) * scale[0] * scale[1][:, None]
    found = sparse_assignment(score, assignment.GAP)
    assert found.gap <= assignment.GAP
    assert optimum(score) - found.value <= assignment.GAP * abs(optimum(score))


def test_a_column_that_nobody_wants_is_assigned_as_well():
    score = torch.rand(200, 200, dtype=DOUBLE, generator=rng(0))
    score[:, 7] -= 100
    found = sparse_assignment(score, 0.0)
    assert abs(found.value - optimum(score)) <= rounding(score)


def test_ties_leave_the_diagonal_where_it_is_favoured():
    n = 200
    score = torch.ones(n, n, dtype=DOUBLE)
    score.diagonal().add_(1e-9)
    assert torch.equal(sparse_assignment(score, 0.0).index, torch.arange(n))


def test_scores_that_tie_are_assigned(monkeypatch):
    """By sums without rounding errors: with them the sparse solver never returned from these."""
    generator, n, width = rng(4), 512, 40
    left, right, more, others = (
        torch.randn(n, width, generator=generator) * scale
        for scale in torch.exp(0.3 * torch.randn(4, n, 1, generator=generator))
    )
    score = ((left @ right.mT + (more @ others.mT).abs()) * 4).round() / 4
    given = []
    solve = sparse.min_weight_full_bipartite_matching
    monkeypatch.setattr(
        sparse, "min_weight_full_bipartite_matching", lambda x: given.append(x) or solve(x)
    )
    found = sparse_assignment(score, assignment.GAP)
    assert optimum(score) - total(score, found.index) <= assignment.GAP * optimum(score)
    for cost in given:
        assert (cost.data == cost.data.round()).all() and 1 <= cost.data.min()
        assert n * cost.data.max() <= 2.0**53


def test_a_large_gap_goes_to_the_dense_solver(monkeypatch):
    """One entry a row and column is not enough."""
    monkeypatch.setattr(assignment, "MANY", 2)
    monkeypatch.setattr(sparse, "FIRST", 1)
    monkeypatch.setattr(sparse, "ROUNDS", 1)
    asked = []
    dense = assignment.linear_sum_assignment
    monkeypatch.setattr(
        assignment, "linear_sum_assignment", lambda *x, **y: asked.append(1) or dense(*x, **y)
    )
    score = torch.randn(200, 200, dtype=DOUBLE, generator=rng(0))
    assert total(score, linear_assignment(score)) == pytest.approx(optimum(score), rel=1e-12)
    assert asked == [1]


def test_large_assignments_do_without_the_dense_solver(monkeypatch):
    monkeypatch.setattr(assignment, "linear_sum_assignment", None)
    score = torch.randn(assignment.MANY, assignment.MANY, generator=rng(0))
    choice = linear_assignment(score)
    best = optimum(score)
    assert best - total(score, choice) <= assignment.GAP * best
