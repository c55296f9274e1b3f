"""Balancing of two factors, and the best scale: laws and optimality."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laws import (
    ANY_KIND,
    ANY_KIND_AND_DTYPE,
    DOUBLE,
    LAW,
    PAIRINGS,
    SEEDS,
    count,
    distance,
    draw_motion,
    draw_tensors,
    length,
    move,
    rng,
)
from laws import tolerance as rounding
from mergekit_rotation.symmetry import (
    AttentionLayout,
    DirectSum,
    ExpertLayout,
    Linear,
    NeuronLayout,
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
    inverse,
    rotary_pairs,
    solve_attention,
    solve_experts,
    solve_neurons,
    solve_scaled_attention,
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


# -- whole layouts ------------------------------------------------------------------------------

HEADS = {
    "q": "(kv g qk^1) e",
    "q.bias": "(kv g qk^1)",
    "k": "(kv qk^-1) e",
    "v": "(kv vo^1) e",
    "o": "e (kv g vo^-1)",
}
NEURONS = {
    "gated": {"gate": "f e", "up": "~f^1 e", "up.bias": "~f^1", "down": "e ~f^-1"},
    "relu": {"up": "f^1 e", "down": "e f^-1"},
    "squared relu": {"up": "f^1 e", "down": "e f^-2"},
    "experts": {"router": "x e", "in": "x [f | ~f^1] e", "out": "x e ~f^-1"},
}


def patterns(texts):
    return {name: Pattern.parse(text) for name, text in texts.items()}


def scaled_groups(size):
    """Groups of queries and keys that allow for scaling, of 2 or 4 dimensions."""
    pairs = rotary_pairs(size, "half")
    return {
        "orthogonal": Orthogonal(size),
        "rotary": PlaneRotations(size, pairs),
        "partial": DirectSum((PlaneRotations(2, ((0, 1),)), Orthogonal(size - 2)))
        if size > 2
        else PlaneRotations(2, ((0, 1),)),
    }


@st.composite
def layouts(draw):
    """Draw a layout with exponents, and its solver without and with scaling."""
    name = draw(st.sampled_from(["heads", *NEURONS]))
    if name == "heads":
        group = scaled_groups(draw(st.sampled_from([2, 4])))[
            draw(st.sampled_from(["orthogonal", "rotary", "partial"]))
        ]
        vo = Orthogonal(draw(st.integers(1, 3)))
        sizes = {"kv": draw(st.integers(1, 3)), "g": draw(st.integers(1, 2)), "e": 16}
        sizes |= {"qk": group.n, "vo": vo.n}
        layout = AttentionLayout(patterns(HEADS), sizes, group, vo)
        plain = partial(solve_attention, layout=layout)
        return layout, plain, partial(solve_scaled_attention, layout=layout, solve=plain)
    sizes = {"f": draw(st.integers(1, 6)), "e": 5}
    if name == "experts":
        layout = ExpertLayout(patterns(NEURONS[name]), sizes | {"x": draw(st.integers(1, 3))})
        plain = partial(solve_experts, layout=layout)
    else:
        layout = NeuronLayout(patterns(NEURONS[name]), sizes)
        plain = partial(solve_neurons, layout=layout)
    return layout, plain, partial(solve_scaled_neurons, layout=layout, solve=plain)


def solution(layout, solve, reference, other, dtype=DOUBLE):
    more = {"stored": dtype} if isinstance(layout, AttentionLayout) else {}
    return solve(reference, other, **more)


def sided(layout, seed, kind="generic", dtype=DOUBLE):
    drawn = draw_tensors(layout.patterns, layout.sizes, seed, kind)
    return {name: x.to(dtype) for name, x in drawn.items()}


def gauge(layout, seed):
    """Draw an invertible map of condition 4 at most, as the group allows it, or factors."""
    generator, sizes = rng(seed), layout.sizes
    if not isinstance(layout, AttentionLayout):
        shape = (sizes["x"], sizes["f"]) if "x" in sizes else (sizes["f"],)
        factor = 0.5 + 1.5 * torch.rand(shape, dtype=DOUBLE, generator=generator)
        return (Scale("f", factor, "x" if "x" in sizes else None),)
    result = []
    for axis, group in (("qk", layout.query_key), ("vo", layout.value_output)):
        scale = torch.ones(sizes["kv"], group.n, dtype=DOUBLE)
        for cell in group.cells:
            drawn = 0.5 + 1.5 * torch.rand(sizes["kv"], 1, dtype=DOUBLE, generator=generator)
            scale[:, list(cell)] = drawn
        turn = group.sample(sizes["kv"], generator)
        matrix = turn * scale[:, None, :]
        result.append(Linear(axis, matrix, turn / scale[:, None, :], "kv"))
    return tuple(result)


def acted(layout, transformation, x):
    return move(transformation, x, layout.patterns, layout.sizes)


@LAW
@given(drawn=layouts(), seed=SEEDS)
def test_invertible_maps_act_as_a_group(drawn, seed):
    layout, _, _ = drawn
    x = sided(layout, seed)
    first, second = gauge(layout, seed + 1), gauge(layout, seed + 2)
    there = acted(layout, first, x)
    # A map of condition c enlarges the rounding errors of n products c-fold: two, and squares.
    atol = 4**4 * rounding(count(x)) * length(x)
    assert distance(acted(layout, inverse(first), there), x) <= atol
    assert distance(acted(layout, second, there), acted(layout, first + second, x)) <= atol


@LAW
@given(drawn=layouts(), seed=SEEDS, kind=ANY_KIND_AND_DTYPE)
def test_nothing_is_found_for_a_copy(drawn, seed, kind):
    layout, _, scaled = drawn
    x = sided(layout, seed, *kind)
    found = solution(layout, scaled, x, {name: t.clone() for name, t in x.items()}, kind[1])
    assert found == ()


@LAW
@given(drawn=layouts(), seed=SEEDS, kind=ANY_KIND)
def test_scaling_never_ends_farther_away(drawn, seed, kind):
    layout, plain, scaled = drawn
    pair = sided(layout, seed), sided(layout, seed + 1, kind)
    for reference, other in (pair, pair[::-1]):
        straight = distance(reference, acted(layout, plain(reference, other), other))
        found = solution(layout, scaled, reference, other)
        after = distance(reference, acted(layout, found, other))
        atol = rounding(count(reference)) * (length(reference) + length(other))
        assert after <= straight + atol <= distance(reference, other) + 2 * atol


@LAW
@given(drawn=layouts(), seed=SEEDS)
def test_scrambled_and_scaled_copies_come_back(drawn, seed):
    """Up to what rounding hides: the root of its share of a sum of squares."""
    layout, _, scaled = drawn
    x = sided(layout, seed)
    change = gauge(layout, seed + 1)
    if isinstance(layout, AttentionLayout):
        change = (*draw_motion(layout, seed + 2), *change)
    else:
        order = torch.randperm(layout.sizes["f"], generator=rng(seed))
        change = (Permute("f", order), *change)
    other = acted(layout, change, x)
    found = solution(layout, scaled, x, other)
    assert distance(x, acted(layout, found, other)) <= rounding(count(x)) ** 0.5 * length(x)
