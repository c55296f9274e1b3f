"""Aligning heads: planted recovery, optimality, monotony, copies, noise, dead heads, switches."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laws import (
    ANY_GROUP,
    ANY_KIND,
    DOUBLE,
    FORMS,
    GROUPS,
    LAW,
    SEEDS,
    attention,
    attentions,
    count,
    distance,
    draw_motion,
    draw_tensors,
    length,
    move,
    rng,
    tolerance,
)
from mergekit_rotation.symmetry import (
    AttentionLayout,
    Orthogonal,
    Pattern,
    Permute,
    PlaneRotations,
    PlaneSigns,
    Rotate,
    Trivial,
    inverse,
    rotary_pairs,
    solve_attention,
)

LOW = (torch.bfloat16, torch.float32)


def tensors(layout, seed, kind="generic"):
    return draw_tensors(layout.patterns, layout.sizes, seed, kind)


def moved(layout, transformation, x):
    return move(transformation, x, layout.patterns, layout.sizes)


def aligned(layout, reference, other, **switches):
    return moved(layout, solve_attention(reference, other, layout, **switches), other)


def elements(transformation):
    return {(type(element), element.axis) for element in transformation}


def rounding(*sides):
    return tolerance(count(sides[0])) * sum(length(side) for side in sides)


def reserve(layout):
    """What may be left on the table, as a share of the squared distance.

    p numbers fitted to N explain p/N of differences without structure on average; a rotation has to
    explain twice that, and more than chance gives with a probability of exp(-20), or a half.
    """
    shares = []
    for axis, group in (("qk", layout.query_key), ("vo", layout.value_output)):
        pieces = [
            piece.tensor.numel()
            for pattern in layout.patterns.values()
            for piece in pattern.split(torch.empty(pattern.shape(layout.sizes)), layout.sizes)
            if axis in piece.axes
        ]
        p, entries = group.freedom, sum(pieces) / layout.sizes["kv"]
        explained = max(2 * p, p + 2 * (20 * p) ** 0.5 + 40) if p else 0
        shares.append(min(explained / entries, 0.5))
    return max(shares)


def at_most(layout, reference, after, other_choice):
    """Whether ``after`` is as close to the reference as another choice, but for the reserve."""
    best = (1 - reserve(layout)) ** 0.5 * distance(reference, after)
    return best <= distance(reference, other_choice) + rounding(reference, after)


# -- planted recovery -----------------------------------------------------------------------


@LAW
@given(layout=attentions(), seed=SEEDS)
def test_planted_transformation_is_undone(layout, seed):
    reference = tensors(layout, seed)
    other = moved(layout, inverse(draw_motion(layout, seed + 1)), reference)
    result = aligned(layout, reference, other)
    assert distance(reference, result) <= rounding(reference, other)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", GROUPS)
def test_planted_transformation_is_undone_for_every_group_and_form(name, form):
    """The group acts on queries and keys, then on values and output, in grouped-query layouts."""
    for groups in [(GROUPS[name](2), Orthogonal(3)), (Orthogonal(3), GROUPS[name](2))]:
        layout = attention(*groups, form=form, kv=3, g=2, e=16)
        reference = tensors(layout, 0)
        motion = draw_motion(layout, 1)
        other = moved(layout, inverse(motion), reference)
        assert distance(reference, aligned(layout, reference, other)) <= rounding(reference, other)


@LAW
@given(seed=SEEDS, kv=st.integers(1, 2), m=st.integers(2, 5), d=st.integers(2, 8))
def test_planted_order_of_query_heads_is_undone_in_narrow_models(seed, kv, m, d):
    """Started from the identity alone, the alternation gets stuck."""
    layout = attention(Orthogonal(d), Orthogonal(d), kv=kv, g=m, e=d)
    reference = tensors(layout, seed)
    other = moved(layout, inverse(draw_motion(layout, seed + 1)), reference)
    result = aligned(layout, reference, other)
    assert distance(reference, result) <= rounding(reference, other)


@LAW
@given(seed=SEEDS, kv=st.integers(1, 4), group=ANY_GROUP, rank=st.integers(0, 2))
def test_planted_transformation_is_undone_where_heads_are_rank_deficient(seed, kv, group, rank):
    """The rotation is not determined then; the distance still is."""
    layout = attention(group, group, kv=kv, e=4 * group.n, biases=False)
    reference = {}
    for name, tensor in tensors(layout, seed).items():
        columns = tensor if name != "o" else tensor.mT
        heads = columns.reshape(kv, group.n, -1)
        keep = min(rank, group.n)
        low = (heads[:, :, :keep] @ heads[:, :keep, :]).reshape(columns.shape)
        reference[name] = low if name != "o" else low.mT
    other = moved(layout, inverse(draw_motion(layout, seed + 1)), reference)
    result = aligned(layout, reference, other)
    assert distance(reference, result) <= rounding(reference, other)


@pytest.mark.parametrize("dtype", LOW)
@LAW
@given(layout=attentions(), seed=SEEDS)
def test_planted_transformation_is_undone_in_low_precision(dtype, layout, seed):
    exact = tensors(layout, seed)
    other = moved(layout, inverse(draw_motion(layout, seed + 1)), exact)
    reference, other = ({n: t.to(dtype) for n, t in side.items()} for side in (exact, other))
    result = solve_attention(reference, other, layout)
    assert all(e.matrix.dtype in (torch.float32, DOUBLE) for e in result if isinstance(e, Rotate))
    widest = max(layout.query_key.n, layout.value_output.n)
    raised = {name: tensor.double() for name, tensor in other.items()}
    error = distance(reference, moved(layout, result, raised))
    assert error <= tolerance(widest, dtype) * length(exact)


@LAW
@given(layout=attentions(), seed=SEEDS)
def test_result_is_in_the_group(layout, seed):
    result = solve_attention(tensors(layout, seed), tensors(layout, seed + 1), layout)
    kv, m = layout.sizes["kv"], layout.sizes.get("g", 1)
    assert len(elements(result)) == len(result)
    for element in result:
        if isinstance(element, Rotate):
            group = {"qk": layout.query_key, "vo": layout.value_output}[element.axis]
            assert element.per == "kv" and element.matrix.shape == (kv, group.n, group.n)
            assert group.contains(element.matrix, tolerance(group.n))
        else:
            n, per = {"kv": (kv, None), "g": (m, "kv")}[element.axis]
            assert isinstance(element, Permute) and element.per == per
            assert (element.index.sort(-1).values == torch.arange(n)).all()


# -- optimality -----------------------------------------------------------------------------


@LAW
@given(layout=attentions(), seed=SEEDS, kind=ANY_KIND)
def test_distance_never_grows(layout, seed, kind):
    reference, other = tensors(layout, seed), tensors(layout, seed + 1, kind)
    for a, b in [(reference, other), (other, reference)]:
        assert distance(a, aligned(layout, a, b)) <= distance(a, b) + rounding(a, b)


@LAW
@given(layout=attentions(), seed=SEEDS)
def test_no_sampled_transformation_does_better(layout, seed):
    reference, other = tensors(layout, seed), tensors(layout, seed + 1)
    result = aligned(layout, reference, other)
    for k in range(20):
        sample = moved(layout, draw_motion(layout, seed + 2 + k), other)
        assert at_most(layout, reference, result, sample)


@LAW
@given(layout=attentions(), seed=SEEDS, noise=st.sampled_from([0.01, 0.1, 1.0]))
def test_at_least_as_good_as_what_was_planted_under_noise(layout, seed, noise):
    reference = tensors(layout, seed)
    motion = draw_motion(layout, seed + 1)
    strange = tensors(layout, seed + 2)
    noisy = {name: reference[name] + noise * strange[name] for name in reference}
    other = moved(layout, inverse(motion), noisy)
    result = aligned(layout, reference, other)
    assert at_most(layout, reference, result, moved(layout, motion, other))


def smallest_square(layout, reference, other):
    """Smallest squared distance over all orders of heads, for one query head per group."""
    kv = layout.sizes["kv"]
    values = torch.zeros(kv, kv, dtype=DOUBLE)
    for axis, group in (("qk", layout.query_key), ("vo", layout.value_output)):
        heads = []
        for side in (reference, other):
            legs = []
            for name, pattern in layout.patterns.items():
                for piece in pattern.split(side[name], layout.sizes):
                    if axis in piece.axes:
                        front = piece.tensor.movedim((piece.dim("kv"), piece.dim(axis)), (0, 1))
                        legs.append(front.reshape(kv, group.n, -1))
            heads.append(torch.cat(legs, dim=-1))
        for a, b in itertools.product(range(kv), repeat=2):
            values[a, b] += group.value(heads[0][a] @ heads[1][b].mT)
    best = max(values[range(kv), list(p)].sum() for p in itertools.permutations(range(kv)))
    return length(reference) ** 2 + length(other) ** 2 - 2 * float(best)


@LAW
@given(
    seed=SEEDS,
    kv=st.integers(2, 4),
    groups=st.tuples(ANY_GROUP, ANY_GROUP),
    form=st.sampled_from(sorted(FORMS)),
)
def test_order_of_heads_is_the_best_of_all(seed, kv, groups, form):
    layout = attention(*groups, form=form, kv=kv, g=1, e=2 * max(g.n for g in groups))
    reference, other = tensors(layout, seed), tensors(layout, seed + 1)
    smallest = smallest_square(layout, reference, other)
    after = distance(reference, aligned(layout, reference, other)) ** 2
    atol = tolerance(count(reference)) * (length(reference) ** 2 + length(other) ** 2)
    assert smallest - atol <= after
    assert (1 - reserve(layout)) * after <= smallest + atol


@pytest.mark.parametrize("name", [n for n in GROUPS if GROUPS[n](2).freedom == 0])
@LAW
@given(seed=SEEDS, kv=st.integers(1, 5))
def test_distance_is_the_smallest_of_all_for_finite_groups(name, seed, kv):
    """Without a rotation to weigh, the distance itself is what brute force finds."""
    layout = attention(GROUPS[name](2), Trivial(2), kv=kv, e=3)
    reference, other = tensors(layout, seed), tensors(layout, seed + 1)
    after = distance(reference, aligned(layout, reference, other)) ** 2
    atol = tolerance(count(reference)) * (length(reference) ** 2 + length(other) ** 2)
    assert abs(after - smallest_square(layout, reference, other)) <= atol


@LAW
@given(seed=SEEDS, kv=st.integers(2, 5), m=st.integers(1, 4), d=st.integers(1, 3))
def test_order_of_grouped_heads_is_the_best_of_all_without_rotations(seed, kv, m, d):
    """With nothing to rotate the order of queries is a linear assignment, and solved exactly."""
    layout = attention(Orthogonal(d), Orthogonal(d), kv=kv, g=m, e=4, biases=False)
    reference, other = tensors(layout, seed), tensors(layout, seed + 1)
    result = aligned(layout, reference, other, query_key=False, value_output=False)
    flat = []
    for side in (reference, other):
        turned = side | {"o": side["o"].mT}
        heads = torch.stack([turned[name].reshape(kv, m, -1) for name in ("q", "o")])
        groups = torch.stack([turned[name].reshape(kv, -1) for name in ("k", "v")])
        flat.append((groups, heads))
    (groups, heads), (other_groups, other_heads) = flat
    score = torch.einsum("lax,lbx->ab", groups, other_groups)
    queries = torch.einsum("laix,lbjx->abij", heads, other_heads)
    inside = torch.tensor(list(itertools.permutations(range(m))))
    score += queries[:, :, torch.arange(m), inside].sum(-1).amax(-1)
    best = max(score[range(kv), list(p)].sum() for p in itertools.permutations(range(kv)))
    square = length(reference) ** 2 + length(other) ** 2
    atol = tolerance(count(reference)) * square
    assert abs(distance(reference, result) ** 2 - (square - 2 * float(best))) <= atol


# -- models in the same coordinates ---------------------------------------------------------


@pytest.mark.parametrize("dtype", LOW)
@LAW
@given(layout=attentions(), seed=SEEDS)
def test_copy_stays(dtype, layout, seed):
    reference = {name: tensor.to(dtype) for name, tensor in tensors(layout, seed).items()}
    copy = {name: tensor.clone() for name, tensor in reference.items()}
    assert solve_attention(reference, copy, layout) == ()


@LAW
@given(layout=attentions(), seed=SEEDS, kind=ANY_KIND)
def test_copy_stays_within_rounding(layout, seed, kind):
    reference = tensors(layout, seed, kind)
    result = solve_attention(reference, reference, layout)
    assert not any(isinstance(element, Permute) for element in result)
    assert distance(reference, moved(layout, result, reference)) <= rounding(reference)


NOISY = {
    "orthogonal": Orthogonal(16),
    "rotations": PlaneRotations(128, rotary_pairs(128, "half")),
    "signs": PlaneSigns(8, rotary_pairs(8, "interleaved")),
}


@pytest.mark.parametrize("name", NOISY)
@pytest.mark.parametrize("dtype", [*LOW, DOUBLE])
@pytest.mark.parametrize("g", [1, 2])
def test_small_noise_moves_nothing(name, dtype, g):
    """Fitting one of these groups to noise gains twice the average once in 10^5 heads at most."""
    group = NOISY[name]
    layout = attention(group, Orthogonal(16), kv=3, g=g, e=2 * max(group.n, 16))
    reference, noise = tensors(layout, 0), tensors(layout, 1)
    other = {name: (reference[name] + 0.01 * noise[name]).to(dtype) for name in reference}
    reference = {name: tensor.to(dtype) for name, tensor in reference.items()}
    assert solve_attention(reference, other, layout) == ()


def _repeat(axis):
    def change(piece, x):
        dim = piece.dim(axis)
        return x if dim is None else x.narrow(dim, 0, 1).expand_as(x)

    return change


def _dead_head(piece, x):
    alive = torch.ones(x.shape[piece.dim("kv")], dtype=x.dtype)
    alive[0] = 0
    return x * alive.view([-1 if k == piece.dim("kv") else 1 for k in range(x.dim())])


def _rank_one(piece, x):
    front = x.movedim(piece.dim("kv"), 0)
    heads = front.reshape(len(front), front.shape[1:].numel())
    return (heads * 0 + heads[:, :1]).reshape(front.shape).movedim(0, piece.dim("kv"))


DEGENERATE = {
    "zero": lambda piece, x: torch.zeros_like(x),
    "one dead head": _dead_head,
    "constant heads": _rank_one,
    "equal heads": _repeat("kv"),
    "equal query heads": _repeat("g"),
    "equal dimensions": lambda piece, x: _repeat("qk")(piece, _repeat("vo")(piece, x)),
}


def degenerate(layout, change, seed):
    result = {}
    for name, tensor in tensors(layout, seed).items():
        pattern = layout.patterns[name]
        pieces = pattern.split(tensor, layout.sizes)
        changed = [DEGENERATE[change](piece, piece.tensor) for piece in pieces]
        result[name] = pattern.join(changed, layout.sizes)
    return result


@pytest.mark.parametrize("change", DEGENERATE)
@LAW
@given(layout=attentions(), seed=SEEDS)
def test_degenerate_heads(change, layout, seed):
    """Every pairing with a degenerate model is solved, and never for the worse; a copy stays."""
    strange, usual = degenerate(layout, change, seed), tensors(layout, seed + 1)
    for a, b in [(strange, usual), (usual, strange), (strange, strange)]:
        assert distance(a, aligned(layout, a, b)) <= distance(a, b) + rounding(a, b)
    low = {name: tensor.float() for name, tensor in strange.items()}
    assert solve_attention(low, low, layout) == ()


@pytest.mark.parametrize("dtype", [*LOW, DOUBLE])
@pytest.mark.parametrize("axis", ["kv", "g"])
@LAW
@given(seed=SEEDS, n=st.sampled_from([3, 5, 8]), kinds=st.integers(1, 3))
def test_ties_between_equal_heads_resolve_to_the_identity(axis, dtype, seed, n, kinds):
    """Equal heads score alike but for rounding, which differs from place to place."""
    kv, g = (n, 1) if axis == "kv" else (1, n)
    layout = attention(PlaneSigns(2, rotary_pairs(2, "half")), Trivial(2), kv=kv, g=g, e=257)
    which = torch.randint(kinds, (n,), generator=rng(seed))
    reference = {}
    for name, tensor in tensors(layout, seed).items():
        pattern, changed = layout.patterns[name], []
        for piece in pattern.split(tensor.to(dtype), layout.sizes):
            dim = piece.dim(axis)
            same = piece.tensor if dim is None else piece.tensor.index_select(dim, which)
            changed.append(same)
        reference[name] = pattern.join(changed, layout.sizes)
    assert solve_attention(reference, reference, layout) == ()


@pytest.mark.parametrize("dtype", LOW)
@LAW
@given(seed=SEEDS, d=st.integers(2, 8), rank=st.integers(1, 7))
def test_directions_without_weight_stay(dtype, seed, d, rank):
    """Weights whose products are far below the rounding error of a head turn nothing."""
    live = torch.randperm(d, generator=rng(seed))[:rank]
    turn = torch.eye(d, dtype=DOUBLE)
    turn[live[:, None], live] = Orthogonal(len(live)).sample(1, rng(seed + 1))[0]
    layout = attention(Orthogonal(d), Trivial(1), kv=1, e=4 * d, biases=False)
    reference = tensors(layout, seed + 2)
    other = moved(layout, inverse((Rotate("qk", turn[None], per="kv"),)), reference)
    other = {name: tensor.clone() for name, tensor in other.items()}
    dead = torch.tensor(sorted(set(range(d)) - set(live.tolist())), dtype=torch.long)
    level = 1 / 1024  # of the products, relative to eps
    tiny = (level * torch.finfo(torch.float32).eps) ** 0.5
    strange = tensors(layout, seed + 3)
    for name in ("q", "k"):
        other[name][dead] = tiny * strange[name][dead]
        reference[name][dead] *= tiny
    sides = [{n: t.to(dtype) for n, t in side.items()} for side in (reference, other)]
    for element in solve_attention(*sides, layout):
        found = element.matrix[0][dead[:, None], dead].double()
        eye = torch.eye(len(dead), dtype=DOUBLE)
        assert torch.allclose(found, eye, rtol=0, atol=d**2 * level)


# -- switches and missing tensors -----------------------------------------------------------


@LAW
@given(layout=attentions(), seed=SEEDS)
def test_switches(layout, seed):
    reference, other = tensors(layout, seed), tensors(layout, seed + 1)
    for query_key, value_output, heads in itertools.product([False, True], repeat=3):
        switches = {"query_key": query_key, "value_output": value_output, "heads": heads}
        allowed = {(Rotate, "qk")} if query_key else set()
        allowed |= {(Rotate, "vo")} if value_output else set()
        allowed |= {(Permute, "kv"), (Permute, "g")} if heads else set()
        result = solve_attention(reference, other, layout, **switches)
        assert elements(result) <= allowed
        after = distance(reference, moved(layout, result, other))
        assert after <= distance(reference, other) + rounding(reference, other)


@LAW
@given(layout=attentions(), seed=SEEDS)
def test_a_switch_leaves_the_other_freedoms_whole(layout, seed):
    """What is planted with the freedoms that are on is undone."""
    reference = tensors(layout, seed)
    motion = draw_motion(layout, seed + 1)
    for query_key, value_output, heads in itertools.product([False, True], repeat=3):
        on = {"qk": query_key, "vo": value_output, "kv": heads, "g": heads}
        planted = tuple(element for element in motion if on[element.axis])
        other = moved(layout, inverse(planted), reference)
        switches = {"query_key": query_key, "value_output": value_output, "heads": heads}
        result = aligned(layout, reference, other, **switches)
        assert distance(reference, result) <= rounding(reference, other)


@pytest.mark.parametrize("lacks", [("reference",), ("other",), ("reference", "other")])
def test_a_tensor_that_one_side_lacks_takes_no_part(lacks):
    layout = attention(Orthogonal(3), Orthogonal(3), kv=3, g=2)
    bare = attention(Orthogonal(3), Orthogonal(3), kv=3, g=2, biases=False)
    sides = {"reference": tensors(layout, 0), "other": tensors(layout, 1)}
    expected = solve_attention(*sides.values(), bare)
    for side in lacks:
        sides[side] = {n: t for n, t in sides[side].items() if not n.endswith(".bias")}
    result = solve_attention(*sides.values(), layout)
    assert [type(e) for e in result] == [type(e) for e in expected]
    for a, b in zip(result, expected, strict=True):
        kind = "matrix" if isinstance(a, Rotate) else "index"
        assert torch.equal(getattr(a, kind), getattr(b, kind))


def test_an_axis_without_tensors_stays():
    layout = AttentionLayout(
        {"v": Pattern.parse("(kv vo) e")},
        {"kv": 2, "qk": 3, "vo": 3, "e": 12},
        Orthogonal(3),
        Orthogonal(3),
    )
    reference, other = tensors(layout, 0), tensors(layout, 1)
    assert (Rotate, "qk") not in elements(solve_attention(reference, other, layout))


def test_storage_that_rounds_more_than_is_gained_keeps_heads_in_place():
    """A turn by 1e-3 pays in float32 but not where bfloat16 stores the result."""
    angle = torch.tensor(1e-3, dtype=DOUBLE)
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(1, 2, 2)
    layout = attention(Orthogonal(2), Trivial(2), kv=1, e=16)
    reference = {name: tensor.float() for name, tensor in tensors(layout, 0).items()}
    raised = {name: tensor.double() for name, tensor in reference.items()}
    other = moved(layout, (Rotate("qk", turn, per="kv"),), raised)
    assert elements(solve_attention(reference, other, layout)) == {(Rotate, "qk")}
    assert solve_attention(reference, other, layout, stored=torch.bfloat16) == ()


def test_inputs_are_left_alone():
    layout = attention(Orthogonal(3), Orthogonal(2), kv=3, g=2)
    reference, other = tensors(layout, 0), tensors(layout, 1)
    before = [{n: t.clone() for n, t in side.items()} for side in (reference, other)]
    solve_attention(reference, other, layout)
    for kept, side in zip(before, (reference, other), strict=True):
        assert all(torch.equal(kept[name], side[name]) for name in side)


def test_solution_is_reproducible():
    layout = attention(Orthogonal(3), Orthogonal(2), kv=3, g=2)
    reference, other = tensors(layout, 0), tensors(layout, 1)
    first, second = (aligned(layout, reference, other) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_unrelated_model_is_moved():
    """Negative control: staying is not all the solver can do."""
    layout = attention(Orthogonal(4), Orthogonal(4), kv=3, e=256)
    result = solve_attention(tensors(layout, 0), tensors(layout, 1), layout)
    assert elements(result) >= {(Rotate, "qk"), (Rotate, "vo")}
