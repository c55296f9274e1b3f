"""Bounds of pairs of heads from some columns, and how little related models need beside them."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laws import (
    GROUPS,
    LAW,
    SEEDS,
    attention,
    count,
    distance,
    draw_motion,
    draw_tensors,
    length,
    move,
    tolerance,
)
from mergekit_rotation.symmetry import (
    Orthogonal,
    PlaneRotations,
    inverse,
    rotary_pairs,
    solve_attention,
)
from mergekit_rotation.symmetry.head_gram import LEAST, HeadAxis, _few_products

#: wide enough for some of the columns to be looked at
WIDTH = 3 * LEAST


def axis_of(layout, reference, other, axis, group, work):
    pieces = [
        pair
        for name, pattern in layout.patterns.items()
        for pair in zip(
            pattern.split(reference[name], layout.sizes),
            pattern.split(other[name], layout.sizes),
            strict=True,
        )
        if axis in pair[0].axes
    ]
    heads = layout.sizes["kv"], layout.sizes.get("g", 1)
    return HeadAxis(pieces, axis, group, heads, work, torch.device("cpu"))


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("every_column", [False, True])
@LAW
@given(
    seed=SEEDS,
    kv=st.integers(1, 3),
    m=st.integers(1, 3),
    related=st.booleans(),
    scale=st.sampled_from([1.0, 1e-12, 1e12]),
)
def test_no_pair_and_no_order_exceeds_its_bound(name, every_column, seed, kv, m, related, scale):
    group = GROUPS[name](2)
    layout = attention(group, Orthogonal(4), kv=kv, g=m, e=WIDTH)
    reference = draw_tensors(layout.patterns, layout.sizes, seed)
    other = draw_tensors(layout.patterns, layout.sizes, seed + 1)
    if related:
        other = {n: scale * (x + 0.1 * other[n]) for n, x in reference.items()}
    reference = {n: scale * x for n, x in reference.items()}
    reference, other = ({n: x.float() for n, x in side.items()} for side in (reference, other))
    for axis, acting in (("qk", group), ("vo", layout.value_output)):
        legs = axis_of(layout, reference, other, axis, acting, torch.float32)
        exact = axis_of(layout, reference, other, axis, acting, torch.float64)
        bounds = legs.bounds(every_column=every_column)
        for a, b, order in itertools.product(
            range(kv), range(kv), itertools.permutations(range(m))
        ):
            gram = exact.gram(*torch.tensor([[a], [b]]), torch.tensor([order]))
            most = bounds.shared[a, b] + bounds.query[a, b][range(m), list(order)].sum()
            norms = legs.norms[0, a] * legs.norms[1, b]
            rounding = legs.length * torch.finfo(torch.float32).eps * norms
            assert acting.value(gram)[0] <= most + rounding


@pytest.mark.parametrize("related", [False, True])
def test_many_large_heads_are_bounded_by_frobenius_norms(related):
    heads, k = 8, 32
    layout = attention(Orthogonal(k), Orthogonal(k), kv=heads, g=1, e=8 * k)
    sides = [draw_tensors(layout.patterns, layout.sizes, seed) for seed in (0, 1)]
    if related:
        sides[1] = {n: x + 1e-3 * sides[1][n] for n, x in sides[0].items()}
    work = [{n: x.float() for n, x in side.items()} for side in sides]
    axis = axis_of(layout, *work, "qk", Orthogonal(k), torch.float32)
    some = axis.legs[0][0][..., : 3 * k].flatten(0, 1)[None]
    assert _few_products(some, some)
    a, b = torch.cartesian_prod(torch.arange(heads), torch.arange(heads)).unbind(1)
    gram = axis.gram(a, b, torch.zeros(len(a), 1, dtype=torch.int64))
    bounds = axis.bounds(every_column=False)
    most = (bounds.shared + bounds.query[..., 0, 0])[a, b]
    rounding = axis.length * torch.finfo(torch.float32).eps * axis.norms[0, a] * axis.norms[1, b]
    assert bool((axis.group.value(gram) <= most + rounding).all())
    apart = a != b
    assert bool((most < 0.95 * axis.norms[0, a] * axis.norms[1, b])[apart].all())


def test_columns_that_are_not_looked_at_count_by_their_norms():
    """A head may agree with itself there as well, so its bound is its square; others' is less."""
    layout = attention(Orthogonal(1), Orthogonal(1), kv=2, g=1, e=WIDTH)
    reference = draw_tensors(layout.patterns, layout.sizes, 0)
    axis = axis_of(layout, reference, reference, "qk", Orthogonal(1), torch.float64)
    bounds = axis.bounds(every_column=False).shared
    norms = axis.norms[0]
    assert torch.allclose(bounds.diagonal(), norms.square(), rtol=1e-6, atol=0)
    assert bounds[0, 1] < 0.95 * norms[0] * norms[1]


@pytest.fixture
def looked_at(monkeypatch):
    """What a solver asks of its axes beside the bounds of some columns and chosen pairs."""
    asked = []
    pairs, bounds = HeadAxis.pairs, HeadAxis.bounds

    def watched_pairs(self, *given):
        asked.append("pairs")
        return pairs(self, *given)

    def watched_bounds(self, *, every_column):
        if every_column:
            asked.append("every column")
        return bounds(self, every_column=every_column)

    monkeypatch.setattr(HeadAxis, "pairs", watched_pairs)
    monkeypatch.setattr(HeadAxis, "bounds", watched_bounds)
    return asked


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("moved", [False, True])
def test_related_heads_are_matched_from_a_few_columns(looked_at, m, moved):
    rotary = PlaneRotations(4, rotary_pairs(4, "half"))
    layout = attention(rotary, Orthogonal(4), kv=3, g=m, e=WIDTH)
    reference = draw_tensors(layout.patterns, layout.sizes, 0)
    noise = draw_tensors(layout.patterns, layout.sizes, 1)
    other = {n: x + 0.02 * noise[n] for n, x in reference.items()}
    near = distance(reference, other)
    if moved:
        other = move(inverse(draw_motion(layout, 2)), other, layout.patterns, layout.sizes)
    found = solve_attention(reference, other, layout)
    assert looked_at == []
    assert bool(found) == moved
    aligned = move(found, other, layout.patterns, layout.sizes)
    assert distance(reference, aligned) <= near + tolerance(count(reference)) * length(reference)


def test_heads_that_are_not_related_are_compared_in_all_columns(looked_at):
    layout = attention(Orthogonal(4), Orthogonal(4), kv=3, g=2, e=WIDTH)
    sides = [draw_tensors(layout.patterns, layout.sizes, seed) for seed in (0, 1)]
    assert solve_attention(*sides, layout)
    assert "pairs" in looked_at and "every column" in looked_at
