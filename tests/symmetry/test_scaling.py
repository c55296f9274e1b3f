"""Balancing of two factors, and the best scale: laws and optimality."""

from functools import partial

import pytest
import torch
from hypothesis import given

from laws import DOUBLE, LAW, PAIRINGS, SEEDS, rng
from mergekit_rotation.symmetry import (
    DirectSum,
    ExpertLayout,
    Orthogonal,
    Pattern,
    Permute,
    PlaneRotations,
    PlaneSigns,
    Scale,
    Sign,
    Signs,
    act,
    best_scale,
    rotary_pairs,
    solve_experts,
    solve_scaled_neurons,
)
from mergekit_rotation.symmetry.groups import MAX_CONDITION

N = 6
PLANES = {p: PlaneRotations(N, rotary_pairs(N, p)) for p in PAIRINGS}
SCALED = {"orthogonal": Orthogonal(N), **PLANES}
SCALED["sum"] = DirectSum((PlaneRotations(4, rotary_pairs(4, "half")), Orthogonal(2)))
EPS = torch.finfo(DOUBLE).eps


def grams(seed):
    """Gram matrices of two factors whose condition is bounded by 3, (4, N, N) each."""
    generator = rng(seed)
    result = []
    for _ in range(2):
        q = Orthogonal(N).sample(4, generator)
        values = 1 + 8 * torch.rand(4, N, dtype=DOUBLE, generator=generator)
        result.append((q * values[:, None, :]) @ q.mT)
    return result


def moved(a, s, t):
    dual = torch.linalg.inv(a)
    return a @ s @ a.mT, dual.mT @ t @ dual


def tolerance(*matrices):
    """c n eps: a few products of n x n matrices of condition up to 81."""
    return 81 * 8 * N * EPS * max(float(x.abs().max()) for x in matrices)


@LAW
@given(seed=SEEDS)
def test_orthogonal_balance_makes_the_gram_matrices_equal(seed):
    s, t = grams(seed)
    one, two = moved(Orthogonal(N).balance(s, t), s, t)
    assert torch.allclose(one, two, rtol=0, atol=tolerance(s, t))


@pytest.mark.parametrize("group", PLANES.values(), ids=PLANES)
def test_plane_balance_makes_the_traces_equal(group):
    s, t = grams(3)
    one, two = moved(group.balance(s, t), s, t)
    for pair in group.pairs:
        traces = [x[:, pair, pair].sum(-1) for x in (one, two)]
        assert torch.allclose(*traces, rtol=0, atol=tolerance(s, t))


@pytest.mark.parametrize("group", SCALED.values(), ids=SCALED)
def test_balance_follows_the_group_and_stops_at_balanced_factors(group):
    s, t = grams(5)
    g = group.sample(4, rng(6))
    a = group.balance(s, t)
    turned = group.balance(*moved(g, s, t))
    assert torch.allclose(turned, g @ a @ g.mT, rtol=0, atol=tolerance(s, t))
    eye = torch.eye(N, dtype=DOUBLE).expand(4, N, N)
    assert torch.allclose(group.balance(*moved(a, s, t)), eye, rtol=0, atol=tolerance(s, t))
    invariants = [group.invariants(*x) for x in ((s, t), moved(a, s, t), moved(g, s, t))]
    assert torch.allclose(invariants[0], invariants[1], rtol=0, atol=tolerance(s, t))
    assert torch.allclose(invariants[0], invariants[2], rtol=0, atol=tolerance(s, t))


@pytest.mark.parametrize("group", [PlaneSigns(N, rotary_pairs(N, "half")), Signs(N)])
def test_groups_of_signs_do_not_scale(group):
    assert group.balance(*grams(7)).equal(torch.eye(N, dtype=DOUBLE).expand(4, N, N))
    assert group.cells == () and group.stretches == 0


def test_undetermined_heads_are_not_balanced():
    s, t = grams(8)
    s[0] = 0
    s[1] = torch.diag(torch.tensor([1.0] * (N - 1) + [MAX_CONDITION**-2 / 2], dtype=DOUBLE))
    a = Orthogonal(N).balance(s, t)
    assert a[:2].equal(torch.eye(N, dtype=DOUBLE).expand(2, N, N))
    assert not a[2].equal(torch.eye(N, dtype=DOUBLE))
    assert torch.linalg.cond(a).max() <= MAX_CONDITION


@pytest.mark.parametrize("power", [1, 2])
@LAW
@given(seed=SEEDS)
def test_best_scale_is_no_worse_than_any_on_a_grid(power, seed):
    x = torch.randn(4, 5, 3, dtype=DOUBLE, generator=rng(seed))
    p, q = x[0].square().sum(-1), x[2].square().sum(-1)
    u, v = (x[0] * x[1]).sum(-1), (x[2] * x[3]).sum(-1)

    def cost(s):
        return p * s**2 - 2 * u * s + q * s ** (-2 * power) - 2 * v * s**-power

    best = cost(best_scale(p, u, q, v, power))
    for s in torch.logspace(-3, 3, 601, dtype=DOUBLE):
        assert bool((best <= cost(s) + 64 * EPS * (p + q + cost(s).abs())).all())


@pytest.mark.parametrize("power", [1, 2])
def test_best_scale_recovers_a_factor(power):
    factor = torch.logspace(-2, 2, 9, dtype=DOUBLE)
    p, q = factor**-2, factor ** (2 * power)
    found = best_scale(p, 1 / factor, q, factor**power, power)
    assert torch.allclose(found, factor, rtol=64 * EPS, atol=0)
    assert best_scale(torch.zeros(1), torch.zeros(1), torch.ones(1), torch.ones(1)) == 1


def test_scaled_experts_return():
    layout = ExpertLayout(
        {"in": Pattern.parse("x [f | ~f^1] e"), "out": Pattern.parse("x e ~f^-1")},
        {"x": 3, "f": 5, "e": 7},
    )
    generator = rng(9)
    shapes = {name: pattern.shape(layout.sizes) for name, pattern in layout.patterns.items()}
    origin = {n: torch.randn(s, dtype=DOUBLE, generator=generator) for n, s in shapes.items()}
    factor = 10 ** (torch.rand(3, 5, dtype=DOUBLE, generator=generator) - 0.5)
    order = torch.stack([torch.randperm(5, generator=generator) for _ in range(3)])
    change = (Permute("x", torch.tensor([1, 2, 0])), Permute("f", order, "x"))
    change += (Scale("f", factor, "x"), Sign("f", -torch.ones(3, 5), "x"))
    other = {n: act(change, x, layout.patterns[n], layout.sizes) for n, x in origin.items()}
    found = solve_scaled_neurons(origin, other, layout, partial(solve_experts, layout=layout))
    for name, x in origin.items():
        back = act(found, other[name], layout.patterns[name], layout.sizes)
        assert torch.allclose(back, x, rtol=64 * EPS, atol=0)
