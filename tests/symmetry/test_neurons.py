"""Aligning neurons: planted signed permutations, brute force, copies with dead and equal units."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laws import (
    ANY_KIND,
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
    NeuronLayout,
    Pattern,
    Permute,
    Sign,
    inverse,
    solve_neurons,
)

FORMS = {
    "plain": {"up": "f e", "up.bias": "f", "down": "e f"},
    "transposed": {"up": "e f", "up.bias": "f", "down": "f e"},
    "gated": {
        "gate": "f e",
        "gate.bias": "f",
        "up": "~f e",
        "up.bias": "~f",
        "down": "e ~f",
    },
    "fused": {"gate_up": "[f | ~f] e", "down": "e ~f"},
}
GATED = ("gated", "fused")
every_form = pytest.mark.parametrize("form", FORMS)
DTYPES = [torch.bfloat16, torch.float32, DOUBLE]


def neurons(form, n, e):
    patterns = {name: Pattern.parse(text) for name, text in FORMS[form].items()}
    return NeuronLayout(patterns, {"f": n, "e": e})


def tensors(layout, seed, kind="generic"):
    return draw_tensors(layout.patterns, layout.sizes, seed, kind)


def moved(layout, transformation, x):
    return move(transformation, x, layout.patterns, layout.sizes)


def aligned(layout, reference, other):
    return moved(layout, solve_neurons(reference, other, layout), other)


def rounding(*sides):
    return tolerance(count(sides[0])) * sum(length(side) for side in sides)


def draw_motion(n, seed):
    sign = 2.0 * torch.randint(2, (n,), generator=rng(seed)).to(DOUBLE) - 1.0
    return (Permute("f", torch.randperm(n, generator=rng(seed + 1))), Sign("f", sign))


def all_motions(n, signed):
    signs = list(itertools.product([1.0, -1.0], repeat=n)) if signed else [(1.0,) * n]
    for order in itertools.permutations(range(n)):
        for sign in signs:
            yield Permute("f", torch.tensor(order)), Sign("f", torch.tensor(sign))


@every_form
@pytest.mark.parametrize("dtype", DTYPES)
@LAW
@given(n=st.integers(1, 12), e=st.integers(2, 6), seed=SEEDS)
def test_planted_signed_permutation_is_undone_exactly(form, dtype, n, e, seed):
    layout = neurons(form, n, e)
    reference = {name: tensor.to(dtype) for name, tensor in tensors(layout, seed).items()}
    other = moved(layout, inverse(draw_motion(n, seed + 1)), reference)
    result = aligned(layout, reference, other)
    assert all(torch.equal(result[name], reference[name]) for name in reference)
    assert {tensor.dtype for tensor in result.values()} == {dtype}


@every_form
@LAW
@given(n=st.integers(2, 8), seed=SEEDS, noise=st.sampled_from([0.01, 0.1, 1.0]))
def test_at_least_as_good_as_what_was_planted_under_noise(form, n, seed, noise):
    layout, motion = neurons(form, n, 4), draw_motion(n, seed)
    reference, strange = tensors(layout, seed + 2), tensors(layout, seed + 3)
    noisy = {name: reference[name] + noise * strange[name] for name in reference}
    other = moved(layout, inverse(motion), noisy)
    planted = distance(reference, moved(layout, motion, other))
    assert distance(reference, aligned(layout, reference, other)) <= planted + rounding(other)


@every_form
@LAW
@given(n=st.integers(1, 3), seed=SEEDS, kind=ANY_KIND)
def test_no_signed_permutation_does_better(form, n, seed, kind):
    layout = neurons(form, n, 2)
    reference, other = tensors(layout, seed), tensors(layout, seed + 1, kind)
    motions = all_motions(n, form in GATED)
    best = min(distance(reference, moved(layout, motion, other)) for motion in motions)
    after = distance(reference, aligned(layout, reference, other))
    assert after <= best + rounding(reference, other)


@every_form
@LAW
@given(n=st.integers(1, 6), seed=SEEDS, kind=ANY_KIND)
def test_distance_is_the_smallest_of_all(form, n, seed, kind):
    """Squared distances of all pairs of neurons, the better sign of each, over all orders."""
    layout = neurons(form, n, 3)
    reference, other = tensors(layout, seed), tensors(layout, seed + 1, kind)
    squares = torch.zeros(2, n, n, dtype=DOUBLE)
    for name, pattern in layout.patterns.items():
        sides = [pattern.split(side[name], layout.sizes) for side in (reference, other)]
        for a, b in zip(*sides, strict=True):
            x, y = (piece.tensor.movedim(piece.dim("f"), 0).reshape(n, -1) for piece in (a, b))
            for k, sign in enumerate([1, -1 if "~f" in a.axes else 1]):
                squares[k] += (x[:, None] - sign * y[None, :]).square().sum(-1)
    orders = torch.tensor(list(itertools.permutations(range(n))))
    smallest = float(squares.amin(0)[torch.arange(n), orders].sum(1).min())
    after = distance(reference, aligned(layout, reference, other)) ** 2
    scale = length(reference) ** 2 + length(other) ** 2
    assert abs(after - smallest) <= tolerance(count(reference)) * scale


@every_form
@LAW
@given(n=st.integers(1, 12), seed=SEEDS, kind=ANY_KIND)
def test_distance_never_grows(form, n, seed, kind):
    layout = neurons(form, n, 4)
    reference, other = tensors(layout, seed), tensors(layout, seed + 1, kind)
    for a, b in [(reference, other), (other, reference)]:
        assert distance(a, aligned(layout, a, b)) <= distance(a, b) + rounding(a, b)


@every_form
@LAW
@given(n=st.integers(1, 12), seed=SEEDS)
def test_signs_only_where_legs_are_signed(form, n, seed):
    layout = neurons(form, n, 4)
    result = solve_neurons(tensors(layout, seed), tensors(layout, seed + 1), layout)
    allowed = {Permute, Sign} if form in GATED else {Permute}
    assert {type(element) for element in result} <= allowed
    for element in result:
        assert element.axis == "f"
        if isinstance(element, Sign):
            assert set(element.sign.tolist()) == {-1.0, 1.0} or (element.sign == -1).all()


# -- copies ---------------------------------------------------------------------------------

DEGENERATE = {
    "generic": lambda x: x,
    "all dead": torch.zeros_like,
    "some dead": lambda x: x * (torch.arange(len(x)) % 2)[:, None],
    "all equal": lambda x: x[:1].expand_as(x),
    "equal pairs": lambda x: x[torch.arange(len(x)) // 2],
    "opposite pairs": lambda x: (
        x[torch.arange(len(x)) // 2] * (1 - 2 * (torch.arange(len(x)) % 2))[:, None]
    ),
}


def degenerate(layout, change, seed):
    result = {}
    for name, tensor in tensors(layout, seed).items():
        pieces = layout.patterns[name].split(tensor, layout.sizes)
        changed = []
        for piece in pieces:
            rows = piece.tensor.movedim(piece.dim("f"), 0)
            flat = DEGENERATE[change](rows.reshape(len(rows), -1))
            changed.append(flat.reshape(rows.shape).movedim(0, piece.dim("f")))
        result[name] = layout.patterns[name].join(changed, layout.sizes)
    return result


@every_form
@pytest.mark.parametrize("change", DEGENERATE)
@LAW
@given(n=st.integers(1, 12), seed=SEEDS, dtype=st.sampled_from(DTYPES))
def test_copy_stays(form, change, n, seed, dtype):
    layout = neurons(form, n, 4)
    reference = {k: tensor.to(dtype) for k, tensor in degenerate(layout, change, seed).items()}
    copy = {name: tensor.clone() for name, tensor in reference.items()}
    assert solve_neurons(reference, copy, layout) == ()


@every_form
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_noise_moves_nothing(form, dtype):
    layout = neurons(form, 64, 48)
    reference, noise = tensors(layout, 0), tensors(layout, 1)
    other = {name: (reference[name] + 0.01 * noise[name]).to(dtype) for name in reference}
    reference = {name: tensor.to(dtype) for name, tensor in reference.items()}
    assert solve_neurons(reference, other, layout) == ()


# -- missing tensors ------------------------------------------------------------------------


@pytest.mark.parametrize("lacks", [("reference",), ("other",), ("reference", "other")])
def test_a_tensor_that_one_side_lacks_takes_no_part(lacks):
    layout = neurons("gated", 6, 4)
    sides = {"reference": tensors(layout, 0), "other": tensors(layout, 1)}
    bare = {k: {n: t for n, t in x.items() if "bias" not in n} for k, x in sides.items()}
    expected = solve_neurons(*bare.values(), layout)
    result = solve_neurons(*(bare[k] if k in lacks else x for k, x in sides.items()), layout)
    assert [type(element) for element in result] == [Permute, Sign]
    assert torch.equal(result[0].index, expected[0].index)
    assert torch.equal(result[1].sign, expected[1].sign)


def test_nothing_in_common_moves_nothing():
    layout = neurons("plain", 4, 3)
    assert solve_neurons({}, tensors(layout, 0), layout) == ()


def test_biases_count():
    """Neurons that differ in their biases alone are told apart by them."""
    layout = neurons("plain", 3, 2)
    reference = {
        "up": torch.ones(3, 2, dtype=DOUBLE),
        "up.bias": torch.tensor([1.0, 2.0, 3.0], dtype=DOUBLE),
        "down": torch.ones(2, 3, dtype=DOUBLE),
    }
    other = reference | {"up.bias": torch.tensor([3.0, 1.0, 2.0], dtype=DOUBLE)}
    (element,) = solve_neurons(reference, other, layout)
    assert element.index.tolist() == [1, 2, 0]


def test_inputs_are_left_alone():
    layout = neurons("fused", 5, 3)
    reference, other = tensors(layout, 0), tensors(layout, 1)
    before = [{n: t.clone() for n, t in side.items()} for side in (reference, other)]
    solve_neurons(reference, other, layout)
    for kept, side in zip(before, (reference, other), strict=True):
        assert all(torch.equal(kept[name], side[name]) for name in side)
