"""Aligning experts: planted motions, brute force, groups, gauges, copies, estimated scores."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laws import (
    ANY_KIND,
    ANY_KIND_AND_DTYPE,
    DOUBLE,
    LAW,
    SEEDS,
    count,
    distance,
    draw_tensors,
    length,
    move,
    rng,
    tolerance,
)
from mergekit_rotation.symmetry import (
    ExpertLayout,
    NeuronLayout,
    Pattern,
    PatternError,
    Permute,
    Sign,
    SymmetryError,
    inverse,
    solve_experts,
    solve_neurons,
)
from mergekit_rotation.symmetry import experts as module

FORMS = {
    "packed": {
        "router": "x ~e",
        "gate_up": "x [f | ~f] ~e",
        "down": "x ~e ~f",
    },
    "transposed": {"router": "x ~e", "gate_up": "x ~e [f | ~f]", "down": "x ~f ~e"},
    "interleaved": {"router": "~e x", "up": "x ~e (f [u1 | u2])", "down": "x f ~e"},
    "ungated": {"router": "x ~e", "up": "x f ~e", "up.bias": "x f", "down": "x ~e f"},
    "biases": {
        "router": "x ~e",
        "router.bias": "x",
        "correction": "x",
        "gate": "x f ~e",
        "gate.bias": "x f",
        "up": "x ~f ~e",
        "up.bias": "x ~f",
        "down": "x ~e ~f",
        "down.bias": "x ~e",
    },
}
GATED = ("packed", "transposed", "biases")
every_form = pytest.mark.parametrize("form", FORMS)
DTYPES = [torch.bfloat16, torch.float32, DOUBLE]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(params=["exact", "estimated"])
def scores(request, monkeypatch):
    """Both ways to score pairs of experts."""
    if request.param == "estimated":
        monkeypatch.setattr(module, "AFFORDABLE", 0.0)


def mixture(form="packed", x=4, f=5, e=8, groups=1):
    patterns = {name: Pattern.parse(text) for name, text in FORMS[form].items()}
    return ExpertLayout(patterns, {"x": x, "f": f, "e": e, "u1": 1, "u2": 1}, groups)


def tensors(layout, seed, dtype=DOUBLE, kind="generic"):
    drawn = draw_tensors(layout.patterns, layout.sizes, seed, kind)
    return {name: tensor.to(dtype) for name, tensor in drawn.items()}


def moved(layout, transformation, x):
    return move(transformation, x, layout.patterns, layout.sizes)


def aligned(layout, reference, other, **freedoms):
    return moved(layout, solve_experts(reference, other, layout, **freedoms), other)


def rounding(*sides):
    return tolerance(count(sides[0])) * sum(length(side) for side in sides)


def noisy(layout, x, seed, size):
    noise = tensors(layout, seed)
    return {name: x[name] + size * noise[name].to(x[name].dtype) for name in x}


def draw_order(layout, seed):
    """Draw an order of the experts that exchanges groups as a whole."""
    generator, n = rng(seed), layout.sizes["x"]
    size = n // layout.groups
    members = torch.arange(n).view(layout.groups, size)
    members = members[torch.randperm(layout.groups, generator=generator)]
    return torch.cat([row[torch.randperm(size, generator=generator)] for row in members])


def draw_motion(form, layout, seed):
    n, f = layout.sizes["x"], layout.sizes["f"]
    generator = rng(seed + 1)
    order = torch.stack([torch.randperm(f, generator=generator) for _ in range(n)])
    sign = 2.0 * torch.randint(2, (n, f), generator=generator) - 1.0
    motion = (Permute("x", draw_order(layout, seed)), Permute("f", order, per="x"))
    return (*motion, Sign("f", sign, per="x")) if form in GATED else motion


def equal(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def order_of(transformation, n):
    """Order of the experts that a transformation makes."""
    order = [e.index for e in transformation if isinstance(e, Permute) and e.axis == "x"]
    return order[0].tolist() if order else list(range(n))


def keeps_groups(order, groups):
    size = len(order) // groups
    blocks = [{i // size for i in order[k : k + size]} for k in range(0, len(order), size)]
    return all(len(block) == 1 for block in blocks)


# -- planted motions ------------------------------------------------------------------------


@every_form
@every_dtype
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("scores")
def test_planted_motion_is_found_exactly(form, dtype, groups, seed):
    layout = mixture(form, groups=groups)
    reference, motion = tensors(layout, seed, dtype), draw_motion(form, layout, seed + 10)
    other = moved(layout, inverse(motion), reference)
    found = solve_experts(reference, other, layout)
    result = moved(layout, found, other)
    assert equal(result, reference)
    assert {tensor.dtype for tensor in result.values()} == {dtype}
    assert equal(moved(layout, inverse(found), result), other)
    assert order_of(found, 4) == motion[0].index.tolist()
    planted = {(type(e), e.axis): e for e in motion[1:]}
    for element in found:
        if element.axis == "f":
            expected = planted[type(element), "f"]
            if isinstance(element, Permute):
                assert torch.equal(element.index, expected.index)
            else:
                assert torch.equal(element.sign, expected.sign.to(element.sign.dtype))


@every_form
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("noise", [0.01, 0.1, 0.3])
@pytest.mark.usefixtures("scores")
def test_noisy_twins_find_each_other(form, groups, noise):
    layout = mixture(form, x=8, f=12, e=16, groups=groups)
    reference, motion = tensors(layout, 0), draw_motion(form, layout, 1)
    other = moved(layout, inverse(motion), noisy(layout, reference, 2, noise))
    found = solve_experts(reference, other, layout)
    assert order_of(found, 8) == motion[0].index.tolist()
    planted = distance(reference, moved(layout, motion, other))
    assert distance(reference, moved(layout, found, other)) <= planted + rounding(other)


@pytest.mark.parametrize("form", ["packed", "ungated"])
def test_estimates_know_twins_by_projections(form, monkeypatch):
    """Legs longer than the projection, and no router to go by."""
    monkeypatch.setattr(module, "AFFORDABLE", 0.0)
    monkeypatch.setattr(module, "WIDTH", 24)
    layout = mixture(form, x=16, f=32, e=64)
    reference, motion = tensors(layout, 0, torch.float32), draw_motion(form, layout, 1)
    reference.pop("router")
    other = moved(layout, inverse(motion), noisy(layout, reference, 2, 0.3))
    found = solve_experts(reference, other, layout)
    assert order_of(found, 16) == motion[0].index.tolist()


# -- optima ---------------------------------------------------------------------------------


def all_orders(n, groups):
    return [p for p in itertools.permutations(range(n)) if keeps_groups(p, groups)]


def one_expert(layout, x, k):
    """Tensors and patterns of one expert as a layer of its own."""
    result, patterns = {}, {}
    for name, tensor in x.items():
        for m, piece in enumerate(layout.patterns[name].split(tensor, layout.sizes)):
            dim = piece.dim("x")
            axes = piece.axes[:dim] + piece.axes[dim + 1 :]
            patterns[f"{name}.{m}"] = Pattern.parse(" ".join(axes or ("one",)))
            part = piece.tensor.select(dim, k)
            result[f"{name}.{m}"] = part if axes else part.reshape(1)
    return result, NeuronLayout(patterns, layout.sizes | {"one": 1})


def squares(layout, reference, other):
    """Smallest squared distance of every pair of experts, (E, E)."""
    n = layout.sizes["x"]
    result = torch.zeros(n, n, dtype=DOUBLE)
    for i, j in itertools.product(range(n), repeat=2):
        (a, inside), (b, _) = one_expert(layout, reference, i), one_expert(layout, other, j)
        motion = solve_neurons(a, b, inside)
        result[i, j] = distance(a, move(motion, b, inside.patterns, inside.sizes)) ** 2
    return result


@every_form
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kind", ["generic", "low rank", "signs", "small"])
def test_no_order_of_experts_does_better(form, groups, kind):
    layout = mixture(form, x=4, f=3, e=2, groups=groups)
    for seed in range(2):
        reference, other = tensors(layout, seed), tensors(layout, seed + 9, kind=kind)
        square = squares(layout, reference, other)
        best = min(float(square[range(4), order].sum()) for order in all_orders(4, groups)) ** 0.5
        found = solve_experts(reference, other, layout)
        assert keeps_groups(order_of(found, 4), groups)
        after = distance(reference, moved(layout, found, other))
        assert abs(after - best) <= rounding(reference, other)


@every_form
@pytest.mark.parametrize("groups", [1, 2])
def test_exact_scores_do_at_least_as_well_as_estimates(form, groups, monkeypatch):
    layout = mixture(form, x=6, f=8, e=6, groups=groups)
    for seed in range(2):
        a, b = tensors(layout, seed), tensors(layout, seed + 9)
        exact = distance(a, aligned(layout, a, b))
        with monkeypatch.context() as patch:
            patch.setattr(module, "AFFORDABLE", 0.0)
            estimated = distance(a, aligned(layout, a, b))
        in_place = distance(a, aligned(layout, a, b, experts=False))
        assert exact <= estimated + rounding(a, b)
        assert estimated <= in_place + rounding(a, b)


@every_form
@pytest.mark.parametrize("value", [0.0, 2.0**60])
@LAW
@given(
    x=st.integers(1, 3), f=st.integers(1, 5), groups=st.integers(1, 3), seed=SEEDS, kind=ANY_KIND
)
def test_distance_never_grows(form, value, x, f, groups, seed, kind):
    layout = mixture(form, x=x * groups, f=f, e=3, groups=groups)
    reference, other = tensors(layout, seed), tensors(layout, seed + 1, kind=kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "AFFORDABLE", value)
        for a, b in [(reference, other), (other, reference)]:
            result = solve_experts(a, b, layout)
            assert keeps_groups(order_of(result, x * groups), groups)
            assert distance(a, moved(layout, result, b)) <= distance(a, b) + rounding(a, b)


@pytest.mark.parametrize("seed", range(3))
def test_only_pairs_that_an_optimum_can_use_are_solved(seed, monkeypatch):
    """Twins: those of the optimum and those in place, 2 E instead of E^2."""
    solved = []

    def counted(reference, other, layout):
        solved.append(1)
        return solve_neurons(reference, other, layout)

    monkeypatch.setattr(module, "solve_neurons", counted)
    layout = mixture(x=12)
    reference, motion = tensors(layout, seed), draw_motion("packed", layout, seed)
    solve_experts(reference, moved(layout, inverse(motion), reference), layout)
    assert len(solved) <= 24


# -- groups ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("scores")
def test_experts_do_not_leave_their_group():
    layout = mixture(groups=2)
    reference = tensors(layout, 0)
    other = moved(layout, (Permute("x", torch.tensor([2, 1, 0, 3])),), reference)
    assert order_of(solve_experts(reference, other, layout), 4) in (
        [0, 1, 2, 3],
        [1, 0, 3, 2],
        [2, 3, 0, 1],
        [3, 2, 1, 0],
        [0, 1, 3, 2],
        [1, 0, 2, 3],
        [2, 3, 1, 0],
        [3, 2, 0, 1],
    )
    assert order_of(solve_experts(reference, other, replace(layout, groups=1)), 4) == [2, 1, 0, 3]


def test_groups_are_of_one_size():
    for groups in (0, 3):
        with pytest.raises(SymmetryError, match="groups"):
            mixture(x=4, groups=groups)


# -- what must not steer --------------------------------------------------------------------


@every_dtype
@pytest.mark.usefixtures("scores")
def test_a_shift_of_all_rows_of_the_router_changes_nothing(dtype):
    layout = replace(mixture("biases", x=6), shifted=frozenset({"router", "router.bias"}))
    shift = {"router": 8 * torch.randint(-9, 9, (8,)).to(DOUBLE), "router.bias": 64.0}
    for seed in range(3):
        a, b = tensors(layout, seed), tensors(layout, seed + 9)
        for name in shift:  # so that shifting them does not round
            a[name], b[name] = ((x[name] * 8).round() / 8 for x in (a, b))
        a, b = ({n: t.to(dtype) for n, t in side.items()} for side in (a, b))
        shifted = b | {name: (b[name] + shift[name]).to(dtype) for name in shift}
        if dtype == torch.bfloat16:  # eight bits are too few for both
            shifted = {n: t.to(DOUBLE) for n, t in b.items()}
            shifted |= {name: shifted[name] + shift[name] for name in shift}
        first, second = (solve_experts(a, x, layout) for x in (b, shifted))
        assert order_of(first, 6) == order_of(second, 6)
        assert equal(moved(layout, first, b), moved(layout, second, b))


@pytest.mark.usefixtures("scores")
def test_a_large_shift_hides_nothing():
    """Experts that are alike but for the router: the shift is no scale of rounding errors."""
    layout = replace(mixture(x=3), shifted=frozenset({"router"}))
    reference = {n: t[:1].expand_as(t).float() for n, t in tensors(layout, 0).items()}
    reference["router"] = (8 * tensors(layout, 1)["router"]).round().float() / 8
    other = reference | {"router": reference["router"][[2, 0, 1]] + 2**20}
    (element,) = solve_experts(reference, other, layout)
    assert element.index.tolist() == [1, 2, 0]


@every_form
@every_dtype
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.usefixtures("scores")
def test_near_copy_stays(form, dtype, groups):
    layout = mixture(form, x=6, f=8, e=24, groups=groups)
    for seed in range(3):
        reference = tensors(layout, seed, dtype)
        assert solve_experts(reference, reference, layout) == ()
        assert solve_experts(reference, noisy(layout, reference, 9, 0.02), layout) == ()


DEGENERATE = {
    "all equal": lambda x: x[:1].expand_as(x),
    "equal pairs": lambda x: x[torch.arange(len(x)) // 2],
    "all dead": torch.zeros_like,
    "some dead": lambda x: x * (torch.arange(len(x)) % 2).view(-1, *[1] * (x.dim() - 1)),
}


@pytest.mark.parametrize("form", ["packed", "biases"])
@pytest.mark.parametrize("change", DEGENERATE)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.usefixtures("scores")
def test_equal_and_dead_experts_stay(form, change, groups):
    layout = mixture(form, x=6, f=7, e=5, groups=groups)
    for seed, dtype in enumerate(DTYPES):
        a = {n: DEGENERATE[change](t).to(dtype) for n, t in tensors(layout, seed).items()}
        assert solve_experts(a, {n: t.clone() for n, t in a.items()}, layout) == ()


@every_dtype
@pytest.mark.usefixtures("scores")
def test_equal_experts_stay_where_others_move(dtype):
    layout = mixture(x=6)
    keep = torch.tensor([0, 0, 0, 3, 4, 5])
    reference = {n: t[keep].to(dtype) for n, t in tensors(layout, 0).items()}
    other = moved(layout, (Permute("x", torch.tensor([0, 1, 2, 5, 3, 4])),), reference)
    (element,) = solve_experts(reference, other, layout)
    assert element.index.tolist() == [0, 1, 2, 4, 5, 3]


# -- freedoms -------------------------------------------------------------------------------


@every_form
@pytest.mark.usefixtures("scores")
def test_without_experts_neurons_move_inside_theirs(form):
    layout = mixture(form)
    reference, motion = tensors(layout, 0), draw_motion(form, layout, 1)
    inside = motion[1:]
    other = moved(layout, inverse(inside), reference)
    found = solve_experts(reference, other, layout, experts=False)
    assert equal(moved(layout, found, other), reference)
    scrambled = moved(layout, inverse(motion), reference)
    found = solve_experts(reference, scrambled, layout, experts=False)
    assert {element.axis for element in found} == {"f"}


@every_form
@every_dtype
@pytest.mark.parametrize("groups", [1, 2])
def test_without_neurons_experts_move_as_they_are(form, dtype, groups):
    layout = mixture(form, groups=groups)
    reference = tensors(layout, 0, dtype)
    order = draw_order(layout, 3)
    other = moved(layout, (Permute("x", torch.argsort(order)),), reference)
    (element,) = solve_experts(reference, other, layout, neurons=False)
    assert element.axis == "x"
    assert element.index.tolist() == order.tolist()
    strange = tensors(layout, 5)
    orders = [
        distance(reference, moved(layout, (Permute("x", torch.tensor(p)),), strange))
        for p in all_orders(4, groups)
    ]
    after = distance(reference, aligned(layout, reference, strange, neurons=False))
    assert after <= min(orders) * (1 + 1e-6)


def test_without_any_nothing_moves():
    layout = mixture()
    a, b = tensors(layout, 0), tensors(layout, 1)
    assert solve_experts(a, b, layout, experts=False, neurons=False) == ()


# -- missing tensors, errors ----------------------------------------------------------------


@pytest.mark.parametrize("lacks", [("reference",), ("other",), ("reference", "other")])
@pytest.mark.parametrize("missing", ["router", "gate_up", "down"])
@pytest.mark.usefixtures("scores")
def test_a_tensor_that_one_side_lacks_takes_no_part(lacks, missing):
    layout = mixture()
    reference, motion = tensors(layout, 0), draw_motion("packed", layout, 2)
    sides = {"reference": reference, "other": moved(layout, inverse(motion), reference)}
    bare = {k: {n: t for n, t in x.items() if n != missing} for k, x in sides.items()}
    found = solve_experts(*(bare[k] if k in lacks else x for k, x in sides.items()), layout)
    assert equal(moved(layout, found, bare["other"]), bare["reference"])


def test_nothing_in_common_moves_nothing():
    layout = mixture()
    assert solve_experts({}, tensors(layout, 0), layout) == ()


def test_router_alone():
    layout = mixture()
    a = {"router": tensors(layout, 0)["router"]}
    (element,) = solve_experts(a, {"router": a["router"][[2, 0, 1, 3]]}, layout)
    assert element.index.tolist() == [1, 2, 0, 3]


@pytest.mark.parametrize("name", ["router", "correction", "gate", "down.bias"])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.usefixtures("scores")
def test_weights_that_are_not_finite_are_refused(name, side, value):
    layout = mixture("biases")
    sides = [tensors(layout, 0), tensors(layout, 1)]
    sides[side][name].view(-1)[-1] = value
    for freedoms in ({}, {"experts": False}, {"neurons": False}):
        with pytest.raises(SymmetryError):
            solve_experts(*sides, layout, **freedoms)


def test_another_shape_is_refused():
    layout = mixture()
    a = tensors(layout, 0)
    with pytest.raises(PatternError):
        solve_experts(a, a | {"down": a["down"][:3]}, layout)


@pytest.mark.usefixtures("scores")
def test_inputs_are_left_alone():
    layout = replace(mixture(), shifted=frozenset({"router"}))
    reference, other = tensors(layout, 0), tensors(layout, 1)
    before = [{n: t.clone() for n, t in side.items()} for side in (reference, other)]
    solve_experts(reference, other, layout)
    assert all(equal(kept, side) for kept, side in zip(before, (reference, other), strict=True))


# -- whatever the weights are -----------------------------------------------------------------

ANY_LAYOUT = st.builds(
    lambda form, x, f, groups: (form, mixture(form, x=x * groups, f=f, e=4, groups=groups)),
    st.sampled_from(sorted(FORMS)),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 2),
)


@pytest.mark.parametrize("value", [0.0, 2.0**60])
@LAW
@given(drawn=ANY_LAYOUT, seed=SEEDS, kind=ANY_KIND_AND_DTYPE)
def test_a_copy_stays_bit_by_bit(value, drawn, seed, kind):
    _, layout = drawn
    x = tensors(layout, seed, kind[1], kind[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "AFFORDABLE", value)
        assert equal(aligned(layout, x, {name: t.clone() for name, t in x.items()}), x)


@LAW
@given(drawn=ANY_LAYOUT, seed=SEEDS, kind=ANY_KIND_AND_DTYPE)
def test_a_scrambled_copy_of_any_kind_comes_back(drawn, seed, kind):
    """Up to what rounding hides: scores are sums of squares, so it is the root of their error."""
    form, layout = drawn
    x = tensors(layout, seed, kind[1], kind[0])
    other = moved(layout, inverse(draw_motion(form, layout, seed)), x)
    after = distance(x, aligned(layout, x, other))
    work = torch.float32 if kind[1] == torch.bfloat16 else kind[1]
    assert after <= tolerance(count(x), work) ** 0.5 * length(x)


@LAW
@given(drawn=ANY_LAYOUT, seed=SEEDS, kind=ANY_KIND_AND_DTYPE)
def test_motions_of_experts_are_a_group_that_loses_no_bit(drawn, seed, kind):
    form, layout = drawn
    x = tensors(layout, seed, kind[1], kind[0])
    first, second = (draw_motion(form, layout, seed + k) for k in (1, 2))
    there = moved(layout, first, x)
    assert equal(moved(layout, inverse(first), there), x)
    assert equal(moved(layout, second, there), moved(layout, first + second, x))
    back = moved(layout, inverse(first + second), moved(layout, second, there))
    assert equal(back, x)
