"""The action: an isometric group action, equal to dense matrices, differentiable, exact in type."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laws import (
    DOUBLE,
    FORMS,
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
    normal,
    rng,
    tolerance,
)
from mergekit_rotation.symmetry import (
    Orthogonal,
    Pattern,
    PatternError,
    Permute,
    Rotate,
    Sign,
    act,
    inverse,
    moves,
)


def signs(n: int, seed: int) -> torch.Tensor:
    return 2.0 * torch.randint(2, (n,), generator=rng(seed)).to(DOUBLE) - 1.0


@LAW
@given(layout=attentions(), seed=SEEDS)
def test_inverse_undoes(layout, seed):
    patterns, sizes = layout.patterns, layout.sizes
    x = draw_tensors(patterns, sizes, seed)
    motion = draw_motion(layout, seed + 1)
    atol = tolerance(count(x)) * length(x)
    there = move(motion, x, patterns, sizes)
    assert distance(move(inverse(motion), there, patterns, sizes), x) <= atol
    back = move(inverse(motion), x, patterns, sizes)
    assert distance(move(motion, back, patterns, sizes), x) <= atol


@LAW
@given(layout=attentions(), seed=SEEDS)
def test_composition_is_concatenation(layout, seed):
    patterns, sizes = layout.patterns, layout.sizes
    x = draw_tensors(patterns, sizes, seed)
    first, second = draw_motion(layout, seed + 1), draw_motion(layout, seed + 2)
    at_once = move(first + second, x, patterns, sizes)
    in_turn = move(second, move(first, x, patterns, sizes), patterns, sizes)
    assert distance(at_once, in_turn) <= tolerance(count(x)) * length(x)


@LAW
@given(layout=attentions(), seed=SEEDS)
def test_action_keeps_lengths_and_distances(layout, seed):
    patterns, sizes = layout.patterns, layout.sizes
    x, y = draw_tensors(patterns, sizes, seed), draw_tensors(patterns, sizes, seed + 1)
    motion = draw_motion(layout, seed + 2)
    moved = [move(motion, tensors, patterns, sizes) for tensors in (x, y)]
    atol = tolerance(count(x)) * (length(x) + length(y))
    assert abs(length(moved[0]) - length(x)) <= atol
    assert abs(distance(*moved) - distance(x, y)) <= atol


@LAW
@given(n=st.integers(1, 6), seed=SEEDS)
def test_signed_permutations_are_undone_exactly(n, seed):
    x, pattern, sizes = normal(rng(seed), 2 * n, 3), Pattern.parse("[f | ~f] e"), {"f": n, "e": 3}
    motion = (Permute("f", torch.randperm(n, generator=rng(seed))), Sign("f", signs(n, seed)))
    moved = act(motion, x, pattern, sizes)
    assert torch.equal(act(inverse(motion), moved, pattern, sizes), x)
    assert torch.equal(moved.abs().sort(0).values, x.abs().sort(0).values)


@LAW
@given(kv=st.integers(1, 3), g=st.integers(1, 3), d=st.integers(1, 3), seed=SEEDS)
def test_action_is_multiplication_by_dense_matrices(kv, g, d, seed):
    layout = attention(Orthogonal(d), Orthogonal(d), kv=kv, g=g, e=4)
    motion = draw_motion(layout, seed)
    groups, order, query_key, value_output = motion
    unit = torch.eye(kv, dtype=DOUBLE)[groups.index]
    inside = [torch.eye(g, dtype=DOUBLE)[index] for index in order.index]
    shared = torch.block_diag(*query_key.matrix) @ torch.kron(unit, torch.eye(d, dtype=DOUBLE))
    query, output = (
        torch.block_diag(*(torch.kron(p, r) for p, r in zip(inside, element.matrix, strict=True)))
        @ torch.kron(unit, torch.eye(g * d, dtype=DOUBLE))
        for element in (query_key, value_output)
    )
    x = draw_tensors(layout.patterns, layout.sizes, seed + 1)
    y = move(motion, x, layout.patterns, layout.sizes)
    atol = tolerance(kv * g * d) * length(x)
    for name, expected in {
        "q": query @ x["q"],
        "q.bias": query @ x["q.bias"],
        "k": shared @ x["k"],
        "k.bias": shared @ x["k.bias"],
        "o": x["o"] @ output.mT,
    }.items():
        assert torch.allclose(y[name], expected, rtol=0, atol=atol), name


@pytest.mark.parametrize("form", FORMS)
def test_action_is_differentiable(form):
    layout = attention(Orthogonal(2), Orthogonal(2), form=form, kv=2, g=2, e=2)
    groups, order, query_key, value_output = draw_motion(layout, 0)
    weights = draw_tensors(layout.patterns, layout.sizes, 1)

    def moved(first, second, *tensors):
        motion = (groups, order, Rotate("qk", first, "kv"), Rotate("vo", second, "kv"))
        named = dict(zip(weights, tensors, strict=True))
        return tuple(move(motion, named, layout.patterns, layout.sizes).values())

    inputs = [query_key.matrix, value_output.matrix, *weights.values()]
    assert torch.autograd.gradcheck(moved, [x.clone().requires_grad_() for x in inputs])


def test_signs_are_differentiable():
    pattern, sign = Pattern.parse("[f | ~f] e"), torch.tensor([1.0, -1.0], dtype=DOUBLE)
    x = normal(rng(0), 4, 2).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda t: act((Sign("f", sign),), t, pattern, {"f": 2, "e": 2}), x
    )


@pytest.mark.parametrize(
    ("motion", "text"),
    [
        ((), "(kv qk) e"),
        ((Permute("kv", torch.tensor([1, 0])),), "e f"),
        ((Permute("f", torch.tensor([1, 0])),), "(kv qk) e"),
        ((Rotate("vo", torch.eye(2).expand(2, 2, 2), "kv"),), "(kv qk) e"),
        ((Sign("f", -torch.ones(2)),), "f e"),
        ((Sign("f", -torch.ones(2)),), "(kv qk) e"),
    ],
)
def test_a_tensor_without_the_axis_is_returned_as_it_is(motion, text):
    pattern, sizes = Pattern.parse(text), dict.fromkeys(("kv", "qk", "vo", "e", "f"), 2)
    x = torch.zeros(pattern.shape(sizes))
    assert not moves(motion, pattern)
    assert act(motion, x, pattern, sizes) is x


def test_the_input_is_left_alone():
    layout = attention(Orthogonal(3), Orthogonal(2), kv=3, g=2)
    x = draw_tensors(layout.patterns, layout.sizes, 0)
    kept = {name: tensor.clone() for name, tensor in x.items()}
    move(draw_motion(layout, 1), x, layout.patterns, layout.sizes)
    assert all(torch.equal(x[name], kept[name]) for name in x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, DOUBLE])
def test_dtype_is_kept(dtype):
    layout = attention(Orthogonal(3), Orthogonal(2), kv=3, g=2)
    x = draw_tensors(layout.patterns, layout.sizes, 0)
    exact = move(draw_motion(layout, 1), x, layout.patterns, layout.sizes)
    low = {name: tensor.to(dtype) for name, tensor in x.items()}
    moved = move(draw_motion(layout, 1), low, layout.patterns, layout.sizes)
    assert {tensor.dtype for tensor in moved.values()} == {dtype}
    assert distance(exact, moved) <= tolerance(3, dtype) * length(x)
    signed = act((Sign("f", signs(2, 0)),), low["k"][:2], Pattern.parse("~f e"), {"f": 2, "e": 8})
    assert signed.dtype == dtype


def test_a_tensor_of_another_shape_is_refused():
    motion = (Permute("f", torch.tensor([1, 0])),)
    with pytest.raises(PatternError):
        act(motion, torch.zeros(3, 2), Pattern.parse("f e"), {"f": 2, "e": 2})


# By hand: rows numbered from 0; kv heads swap, then a quarter turn acts on qk of the first head,
# (x0, x1) -> (-x1, x0).

SWAP = torch.tensor([1, 0])
TURN = Rotate("qk", torch.tensor([[[0.0, -1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]]), per="kv")


def test_fused_blocks_by_hand():
    """q: kv0 (g0: 0 1, g1: 2 3) kv1 (g0: 4 5, g1: 6 7), k: 8 9, 10 11, v: 12, 13."""
    pattern = Pattern.parse("[(kv g qk) | (kv qk) | (kv vo)]")
    sizes, x = {"kv": 2, "g": 2, "qk": 2, "vo": 1}, torch.arange(14.0)
    swapped = [4, 5, 6, 7, 0, 1, 2, 3, 10, 11, 8, 9, 13, 12]
    turned = [-5, 4, -7, 6, 0, 1, 2, 3, -11, 10, 8, 9, 13, 12]
    ordered = [-5, 4, -7, 6, 2, 3, 0, 1, -11, 10, 8, 9, 13, 12]
    second_group = Permute("g", torch.tensor([[0, 1], [1, 0]]), per="kv")
    motion = (Permute("kv", SWAP), TURN, second_group)
    for stop, expected in enumerate([swapped, turned, ordered], start=1):
        assert act(motion[:stop], x, pattern, sizes).tolist() == expected


def test_fused_per_head_by_hand():
    """kv0: q 0 1, k 2 3, v 4; kv1: q 5 6, k 7 8, v 9."""
    pattern, sizes = Pattern.parse("(kv [qk | qk | vo])"), {"kv": 2, "qk": 2, "vo": 1}
    moved = act((Permute("kv", SWAP), TURN), torch.arange(10.0), pattern, sizes)
    assert moved.tolist() == [-6, 5, -8, 7, 9, 0, 1, 2, 3, 4]


def test_fused_gate_and_up_by_hand():
    """gate 1 2, up 3 4: neurons swap, then the sign of the new first one turns in up alone."""
    motion = (Permute("f", SWAP), Sign("f", torch.tensor([-1.0, 1.0])))
    moved = act(motion, torch.arange(1.0, 5.0), Pattern.parse("[f | ~f]"), {"f": 2})
    assert moved.tolist() == [2, 1, -4, 3]


def test_signs_of_each_expert_by_hand():
    """Two experts of two neurons: gate 1 2, up 3 4 and gate 5 6, up 7 8; also transposed."""
    sign, sizes = Sign("f", torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), per="x"), {"x": 2, "f": 2}
    rows = torch.arange(1.0, 9.0).view(2, 4)
    expected = torch.tensor([[1.0, 2, 3, -4], [5, 6, -7, 8]])
    pattern, turned = Pattern.parse("x [f | ~f]"), Pattern.parse("[f | ~f] x")
    assert torch.equal(act((sign,), rows, pattern, sizes), expected)
    assert torch.equal(act((sign,), rows.mT, turned, sizes), expected.mT)
    assert torch.equal(act(inverse((sign,)), expected, pattern, sizes), rows)
