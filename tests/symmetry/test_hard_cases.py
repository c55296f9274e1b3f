"""Hard cases of the solvers that were wrong once: each is small, exact and named."""

import pytest
import torch

from laws import attention, distance, draw_motion, draw_tensors, length, move, tolerance
from mergekit_rotation.symmetry import (
    AttentionLayout,
    NeuronLayout,
    Orthogonal,
    Pattern,
    PatternError,
    PlaneRotations,
    Rotate,
    Sign,
    SymmetryError,
    Trivial,
    inverse,
    moves,
    rotary_pairs,
    solve_attention,
    solve_neurons,
)

DOUBLE = torch.float64


def after(layout, a, b):
    return distance(a, move(solve_attention(a, b, layout), b, layout.patterns, layout.sizes))


def test_heads_swap_only_if_what_is_applied_gains():
    """The swap is chosen for rotations that are then refused: distance^2 6 becomes 8."""
    v = Pattern.parse("(kv vo) e")
    sizes = {"kv": 2, "qk": 1, "vo": 2, "e": 1}
    layout = AttentionLayout({"v": v}, sizes, Trivial(1), Orthogonal(2))
    a = {"v": torch.tensor([[2.0], [0], [1], [0]], dtype=DOUBLE)}
    b = {"v": torch.tensor([[1.0], [0], [0], [2]], dtype=DOUBLE)}
    assert after(layout, a, b) <= distance(a, b)


def test_distance_never_grows_where_heads_are_nearly_equal():
    layout = attention(Orthogonal(16), Orthogonal(16), kv=2, e=32, biases=False)
    grown = []
    for seed in range(60):
        base, first, second = (
            draw_tensors(layout.patterns, layout.sizes, 3 * seed + k) for k in range(3)
        )
        for name, tensor in base.items():
            (piece,) = layout.patterns[name].split(tensor, layout.sizes)
            dim = piece.dim("kv")
            one = piece.tensor.narrow(dim, 0, 1).expand_as(piece.tensor)
            base[name] = layout.patterns[name].join([one], layout.sizes)
        a = {name: base[name] + 0.01 * first[name] for name in base}
        b = {name: base[name] + 0.01 * second[name] for name in base}
        if after(layout, a, b) > distance(a, b) * (1 + tolerance(100)):
            grown.append(seed)
    assert not grown


def test_float64_copy_of_full_rank_stays():
    layout = attention(Orthogonal(8), Orthogonal(8), kv=2, g=2, e=16)
    moved = []
    for seed in range(100):
        a = draw_tensors(layout.patterns, layout.sizes, seed)
        if solve_attention(a, a, layout) != ():
            moved.append(seed)
    assert not moved


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, DOUBLE])
def test_copy_with_rank_one_heads_stays(dtype):
    """Every weight column equal: heads of rank one, 200 columns."""
    layout = attention(Orthogonal(8), Orthogonal(8), kv=4, e=200, biases=False)
    moved = []
    for seed in range(30):
        a = draw_tensors(layout.patterns, layout.sizes, seed)
        for name, tensor in a.items():
            dim = 0 if name == "o" else 1
            a[name] = tensor.narrow(dim, 0, 1).expand_as(tensor).to(dtype)
        result = solve_attention(a, a, layout)
        moved += [(seed, float((e.matrix - torch.eye(8)).abs().max())) for e in result]
    assert not moved


def test_noise_moves_nothing_for_rotary_heads_of_usual_size():
    """32 planes (head_dim 64): P(chi2_32 > 64) = 7e-4 a head, one or more in most whole models."""
    for d in (16, 32, 64):
        layout = attention(
            PlaneRotations(d, rotary_pairs(d, "half")), Trivial(d), kv=8, e=2 * d, biases=False
        )
        rotated = heads = 0
        for seed in range(40):
            a, noise = (draw_tensors(layout.patterns, layout.sizes, 2 * seed + k) for k in (0, 1))
            b = {name: a[name] + 0.01 * noise[name] for name in a}
            heads += 8
            for element in solve_attention(a, b, layout):
                if isinstance(element, Rotate):
                    eye = torch.eye(d, dtype=DOUBLE)
                    rotated += int((element.matrix != eye).any(-1).any(-1).sum())
        assert rotated == 0, (d, rotated, heads)


@pytest.mark.parametrize(("n", "e", "dtype"), [(130, 1, DOUBLE), (5, 1001, torch.bfloat16)])
def test_copy_with_equal_neurons_stays(n, e, dtype):
    patterns = {"up": Pattern.parse("~f e"), "down": Pattern.parse("e ~f")}
    layout = NeuronLayout(patterns | {"gate": Pattern.parse("f e")}, {"f": n, "e": e})
    moved = []
    for seed in range(40):
        a = draw_tensors(layout.patterns, layout.sizes, seed)
        index = torch.arange(n) % max(1, n // 3)
        a = {k: (x[:, index] if k == "down" else x[index]).to(dtype) for k, x in a.items()}
        if solve_neurons(a, a, layout) != ():
            moved.append(seed)
    assert not moved


def test_noise_of_small_float32_weights_does_not_underflow():
    layout = NeuronLayout({"up": Pattern.parse("f e")}, {"f": 257, "e": 3})
    moved = []
    for seed in range(40):
        x = draw_tensors(layout.patterns, layout.sizes, seed)["up"][torch.arange(257) % 85]
        a = {"up": (1e-12 * x).float()}
        if solve_neurons(a, a, layout) != ():
            moved.append(seed)
    assert not moved


@pytest.mark.parametrize(("scale", "dtype"), [(1e10, torch.float32), (1e-13, torch.float32)])
def test_bounds_neither_overflow_nor_underflow(scale, dtype):
    layout = attention(Orthogonal(4), Orthogonal(4), kv=3, g=2, e=8)
    a = {
        n: (scale * t).to(dtype) for n, t in draw_tensors(layout.patterns, layout.sizes, 0).items()
    }
    exact = {n: t.double() for n, t in a.items()}
    b = move(inverse(draw_motion(layout, 1)), exact, layout.patterns, layout.sizes)
    b = {n: t.to(dtype) for n, t in b.items()}
    found = solve_attention(a, b, layout)
    moved = move(found, {n: t.double() for n, t in b.items()}, layout.patterns, layout.sizes)
    assert distance(exact, moved) <= tolerance(8, dtype) * length(exact)


@pytest.mark.parametrize("text", ["()", "[a | ()] e", "e e", "(f ~f) e"])
def test_patterns_that_cannot_be_acted_on_are_refused(text):
    with pytest.raises(PatternError):
        Pattern.parse(text)


def test_sign_of_another_axis_does_not_touch():
    assert not moves((Sign("f", -torch.ones(2)),), Pattern.parse("~ff e"))


def test_nothing_in_common():
    layout = attention(Orthogonal(2), Orthogonal(2))
    assert solve_attention({}, {}, layout) == ()


def test_pairs_cover_every_dimension_once():
    for pairs in ([(0, 1)], [(0, 1), (1, 2)]):
        with pytest.raises(SymmetryError):
            PlaneRotations(3, tuple(pairs))


def test_not_a_number_is_refused_by_name():
    layout = attention(Orthogonal(2), Orthogonal(2))
    a = draw_tensors(layout.patterns, layout.sizes, 0)
    b = a | {"k": a["k"] * float("nan")}
    with pytest.raises(SymmetryError):
        solve_attention(a, b, layout)
