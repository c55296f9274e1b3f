"""Matching from a few columns: what is returned is what all products would give."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from laws import DOUBLE, LAW, SEEDS, rng
from mergekit_rotation.symmetry import (
    NeuronLayout,
    Pattern,
    SymmetryError,
    assignment,
    nearest,
    neurons,
    sparse,
)
from mergekit_rotation.symmetry.nearest import nearest_matching
from mergekit_rotation.symmetry.vectors import Part, Vectors, pair_products, row_squares, row_sums


def draw(n, m, seed, spread=0.5, dtype=DOUBLE):
    """Vectors of unequal norms with unequal columns, by part."""
    rows = torch.exp(spread * torch.randn(n, 1, dtype=DOUBLE, generator=rng(seed)))
    columns = torch.exp(spread * torch.randn(m, dtype=DOUBLE, generator=rng(seed + 1)))
    parts = torch.randn(3, n, m, dtype=DOUBLE, generator=rng(seed + 2)) * rows * columns
    return parts.to(dtype)


def vectors(a, b, work=None):
    """Make one plain and two signed parts, the last stored transposed."""
    last = [x[2].mT.contiguous().mT for x in (a, b)]
    parts = [Part(False, a[0], b[0]), Part(True, a[1], b[1]), Part(True, *last)]
    return Vectors(parts, work or (DOUBLE if a.dtype == DOUBLE else torch.float32))


def scores(a, b):
    gram = a.double() @ b.double().mT
    return gram[0] + (gram[1] + gram[2]).abs()


def noisy(a, noise, seed):
    extra = torch.randn(a.shape, dtype=DOUBLE, generator=rng(seed))
    return (a.double() + noise * a.double().abs() * extra).to(a.dtype)


def scrambled(x, seed):
    """Reorder the vectors, and change signs of signed parts: (vectors, order back)."""
    n = x.shape[1]
    order = torch.randperm(n, generator=rng(seed))
    sign = 2.0 * torch.randint(2, (n, 1), generator=rng(seed + 1)).to(x.dtype) - 1
    return torch.stack([x[0], x[1] * sign, x[2] * sign])[:, order], order.argsort()


def gap(a, b, index):
    """How far a matching is below the optimum, relative to it."""
    score = scores(a, b)
    rows, best = linear_sum_assignment(score.numpy(), maximize=True)
    optimum = float(score[rows, best].sum())
    assert sorted(index.tolist()) == rows.tolist()
    return (optimum - float(score[torch.arange(len(index)), index].sum())) / optimum


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, DOUBLE])
@LAW
@given(n=st.integers(1, 40), m=st.integers(1, 60), seed=SEEDS, noise=st.sampled_from([0, 0.1, 1]))
def test_what_is_returned_is_optimal(dtype, n, m, seed, noise):
    a = draw(n, m, seed, dtype=dtype)
    b, _ = scrambled(noisy(a, noise, seed + 3), seed + 4)
    sides = vectors(a, b)
    index = nearest_matching(sides)
    if index is not None:
        assert gap(a, b, index) <= 8 * sides.error


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.3])
def test_related_vectors_are_matched_without_all_products(noise, monkeypatch):
    every = Vectors.gram

    def some(self, *chosen):
        asked = min(len(one) for one in chosen if one is not None)
        assert asked <= nearest.MOST_ROWS * self.count
        return every(self, *chosen)

    monkeypatch.setattr(Vectors, "gram", some)
    a = draw(300, 200, 0, dtype=torch.float32)
    b, back = scrambled(noisy(a, noise, 5), 6)
    assert torch.equal(nearest_matching(vectors(a, b)), back)
    assert torch.equal(nearest_matching(vectors(a, noisy(a, noise, 5))), torch.arange(300))


def test_independent_vectors_are_left_to_the_full_product():
    assert nearest_matching(vectors(draw(300, 60, 0), draw(300, 60, 7))) is None


@pytest.mark.parametrize("strange", [1, 3, 8])
@pytest.mark.parametrize("seed", range(3))
def test_vectors_without_partner_are_assigned_among_themselves(strange, seed):
    """Some have nothing in common with what is left: a small assignment with prices."""
    a = draw(300, 200, seed)
    b = noisy(a, 0.1, seed + 5)
    b[:, :strange] = draw(strange, 200, seed + 9)
    b, _ = scrambled(b, seed + 6)
    index = nearest_matching(vectors(a, b))
    assert index is not None and gap(a, b, index) <= 1e-12


def test_prices_rise_until_nobody_wants_anything_else(monkeypatch):
    """Two rows want one column; the loser's next choice belongs to a third row, which gives way."""
    monkeypatch.setattr(nearest, "MOST_ROWS", 1.0)
    a = torch.zeros(3, 3, 4, dtype=DOUBLE)
    b = a.clone()
    a[0] = torch.tensor([[1, 0, 0, 0], [1, 0.05, 0, 0], [0.8, 0.6, 0, 0]])
    b[0] = torch.tensor([[1, 0.02, 0, 0], [0.8, 0.6, 0, 0], [0, 1, 0.1, 0]])
    sides = vectors(a, b)
    index = nearest_matching(sides)
    assert index is not None and gap(a, b, index) <= 8 * sides.error


DEGENERATE = {
    "all dead": torch.zeros_like,
    "some dead": lambda x: x * (torch.arange(x.shape[1]) % 10 != 0)[:, None],
    "equal pairs": lambda x: x[:, torch.arange(x.shape[1]) // 2],
    "opposite pairs": lambda x: torch.cat([x[:, ::2], -x[:, ::2]], 1),
    "all equal": lambda x: x[:, :1].expand_as(x),
    "tiny": lambda x: x * 1e-30,
    "one huge": lambda x: x * torch.where(torch.arange(x.shape[1]) == 3, 1e6, 1.0)[:, None],
}


@pytest.mark.parametrize("change", DEGENERATE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, DOUBLE])
def test_copies_stay(change, dtype):
    a = DEGENERATE[change](draw(64, 40, 0)).to(dtype)
    index = nearest_matching(vectors(a, a.clone()))
    assert index is not None and torch.equal(index, torch.arange(64))


@pytest.mark.parametrize("change", ["some dead", "equal pairs", "one huge"])
def test_scrambled_copies_with_ties_reach_the_optimum(change, monkeypatch):
    monkeypatch.setattr(nearest, "MOST_ROWS", 1.0)
    a = DEGENERATE[change](draw(64, 40, 0))
    b, _ = scrambled(a, 1)
    sides = vectors(a, b)
    index = nearest_matching(sides)
    assert index is not None and gap(a, b, index) <= 8 * sides.error


def test_a_common_factor_changes_nothing():
    a = draw(80, 100, 0)
    b, back = scrambled(noisy(a, 0.1, 5), 6)
    assert torch.equal(nearest_matching(vectors(a, b * 1e-3)), back)


def test_differences_in_a_column_that_is_looked_at_last_are_found(monkeypatch):
    """Vectors that are told apart by one column among many."""
    monkeypatch.setattr(nearest, "FIRST", 3)
    monkeypatch.setattr(nearest, "MOST_ROWS", 1.0)
    n, m = 20, 50
    a = draw(1, m, 0).expand(3, n, m).clone()
    a[0, :, -1] = 100 * torch.arange(n)
    b, back = scrambled(a, 1)
    assert torch.equal(nearest_matching(vectors(a, b)), back)


def test_no_random_numbers_are_drawn():
    state = torch.get_rng_state()
    a = draw(64, 40, 0)
    nearest_matching(vectors(a, noisy(a, 0.3, 1)))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e200])
def test_numbers_that_cannot_be_squared_are_refused(bad):
    a = draw(8, 4, 0)
    a[1, 2, 3] = bad
    with pytest.raises(SymmetryError, match="NaN or Inf"):
        nearest_matching(vectors(a, a))


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.5, 2.0])
def test_neurons_are_solved_as_with_all_products(noise, monkeypatch):
    patterns = {"gate": "f e", "up": "~f e", "down": "e ~f"}
    layout = NeuronLayout({k: Pattern.parse(v) for k, v in patterns.items()}, {"f": 300, "e": 80})
    a = draw(300, 80, 0, dtype=torch.float32)
    b, _ = scrambled(noisy(a, noise, 5), 6)
    sides = [{"gate": x[0], "up": x[1], "down": x[2].mT} for x in (a, b)]
    found = neurons.solve_neurons(*sides, layout)
    monkeypatch.setattr(neurons, "MANY", 10**9)
    expected = neurons.solve_neurons(*sides, layout)
    assert torch.equal(found[0].index, expected[0].index)
    assert torch.equal(found[1].sign, expected[1].sign)


def test_the_order_of_unrelated_neurons_has_a_certified_gap(monkeypatch):
    """And that of related ones has none."""
    layout = NeuronLayout({"up": Pattern.parse("f e")}, {"f": 400, "e": 60})
    sides = [{"up": draw(400, 60, seed)[0]} for seed in (0, 7)]
    (best,) = neurons.solve_neurons(*sides, layout)
    assert best.gap == 0
    for module, name, value in (
        (assignment, "MANY", 2),
        (assignment, "GAP", 0.1),
        (sparse, "FIRST", 2),
    ):
        monkeypatch.setattr(module, name, value)
    (found,) = neurons.solve_neurons(*sides, layout)
    score = sides[0]["up"] @ sides[1]["up"].mT
    rows = torch.arange(400)
    most, value = (float(score[rows, one.index].sum()) for one in (best, found))
    rounding = float((score.abs() * 400 * torch.finfo(score.dtype).eps).amax(1).sum())
    assert most - value <= found.gap * (most + rounding) + rounding
    assert 0 < found.gap <= assignment.GAP
    back = torch.randperm(400, generator=rng(1))
    (same,) = neurons.solve_neurons(sides[0], {"up": sides[0]["up"][back]}, layout)
    assert same.gap == 0 and same.inverse().gap == 0


# -- products of pairs ----------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, DOUBLE])
def test_scores_are_taken_in_tiles(dtype, chosen, monkeypatch):
    monkeypatch.setattr("mergekit_rotation.symmetry.vectors.TILE", 8)
    a, b = draw(30, 17, 0, dtype=dtype), draw(30, 17, 7, dtype=dtype)
    sides = vectors(a, b)
    rows, columns = (torch.randperm(30, generator=rng(k))[: 10 + k] for k in range(2))
    found, expected = sides.gram(), scores(a, b)
    if chosen:
        found, expected = sides.gram(rows, columns), expected[rows][:, columns]
    most = (a.double().abs() @ b.double().abs().mT).sum(0)
    most = most[rows][:, columns] if chosen else most
    assert found.shape == expected.shape and found.dtype == sides.work
    assert ((found.double() - expected).abs() <= 51 * torch.finfo(sides.work).eps * most).all()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, DOUBLE])
def test_norms_and_products_of_rows_in_blocks(transposed, dtype, monkeypatch):
    monkeypatch.setattr("mergekit_rotation.symmetry.vectors.BLOCK", 64)
    x, y = (torch.randn(30, 17, generator=rng(k), dtype=DOUBLE).to(dtype) for k in range(2))
    if transposed:
        x, y = x.mT.contiguous().mT, y.mT.contiguous().mT
    bound = 17 * torch.finfo(torch.float32).eps
    left, right = x.double().norm(dim=1), y.double().norm(dim=1)
    first, second, inner = (z.double() for z in row_sums(x, y, torch.float32))
    alone = [row_squares(z, torch.float32).double() for z in (x, y)]
    for one, norm in zip([first, second, *alone], [left, right, left, right], strict=True):
        assert ((one.sqrt() - norm).abs() <= bound * norm).all()
    exact = (x.double() * y.double()).sum(1)
    assert ((inner - exact).abs() <= bound * left * right).all()
    rows = torch.arange(len(x))[::2].repeat(3)
    columns = torch.randperm(30, generator=rng(2)).repeat(2)[: len(rows)]
    exact = (x.double()[rows] * y.double()[columns]).sum(1)
    found = pair_products(x, y, rows, columns, torch.float32).double()
    assert ((found - exact).abs() <= bound * left[rows] * right[columns]).all()
