"""Axis patterns: what can be written, what is refused, and where every number of a tensor goes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laws import LAW, SEEDS, rng
from mergekit_rotation.symmetry import Pattern, PatternError, SymmetryError, base_axis

SIZES = {"kv": 2, "g": 3, "qk": 4, "vo": 5, "e": 7, "f": 6}

#: pattern, its axes, its shape for SIZES, the axes of its pieces
FORMS = [
    ("e", "e", (7,), ["e"]),
    ("e f", "e f", (7, 6), ["e f"]),
    ("(e)", "e", (7,), ["e"]),
    ("~f e", "e f", (6, 7), ["~f e"]),
    ("(kv qk) e", "e kv qk", (8, 7), ["kv qk e"]),
    ("(kv g qk)", "g kv qk", (24,), ["kv g qk"]),
    ("e (kv g vo)", "e g kv vo", (7, 30), ["e kv g vo"]),
    ("[qk | vo]", "qk vo", (9,), ["qk", "vo"]),
    ("[f | ~f] e", "e f", (12, 7), ["f e", "~f e"]),
    (
        "[(kv g qk) | (kv qk) | (kv vo)] e",
        "e g kv qk vo",
        (42, 7),
        ["kv g qk e", "kv qk e", "kv vo e"],
    ),
    ("(kv [qk | qk | vo]) e", "e kv qk vo", (26, 7), ["kv qk e", "kv qk e", "kv vo e"]),
    ("(kv [qk | (g vo)] f)", "f g kv qk vo", (228,), ["kv qk f", "kv g vo f"]),
    ("e [(kv qk) | (kv vo)]", "e kv qk vo", (7, 18), ["e kv qk", "e kv vo"]),
    ("  [ f|~f ]e ", "e f", (12, 7), ["f e", "~f e"]),
]
every_form = pytest.mark.parametrize(("text", "axes", "shape", "pieces"), FORMS)


@every_form
def test_forms(text, axes, shape, pieces):
    pattern = Pattern.parse(text)
    assert pattern.text == text
    assert pattern.axes == set(axes.split())
    assert pattern.shape(SIZES) == shape
    split = pattern.split(torch.zeros(shape), SIZES)
    assert [piece.axes for piece in split] == [tuple(names.split()) for names in pieces]
    for piece in split:
        sizes = [SIZES[name.removeprefix("~")] for name in piece.axes]
        assert list(piece.tensor.shape) == sizes


@every_form
@LAW
@given(seed=SEEDS, sizes=st.tuples(*[st.integers(1, 3)] * len(SIZES)))
def test_split_and_join_are_inverse(text, axes, shape, pieces, seed, sizes):
    pattern, extents = Pattern.parse(text), dict(zip(SIZES, sizes, strict=True))
    tensor = torch.randn(pattern.shape(extents), generator=rng(seed))
    split = pattern.split(tensor, extents)
    assert sum(piece.tensor.numel() for piece in split) == tensor.numel()
    assert torch.equal(pattern.join([piece.tensor for piece in split], extents), tensor)


def test_parsing_is_remembered():
    assert Pattern.parse("(kv qk) e") is Pattern.parse("(kv qk) e")


def test_dim_ignores_the_sign_mark():
    (piece,) = Pattern.parse("e ~f").split(torch.zeros(7, 6), SIZES)
    assert (piece.dim("e"), piece.dim("f"), piece.dim("kv")) == (0, 1, None)


@pytest.mark.parametrize(
    "text",
    [
        *("", "  ", "E", "1a", "a-b", "a.b", "a, b", "~", "~~a", "~ a"),
        *("(a", "a)", "[a", "a]", "a | b", "(])", "(a]", "[a)"),
        *("[]", "[a |]", "[| a]", "[a b]"),
        *("((a b) c)", "[(a (b c)) | d]"),
        *("[[a | b] | c]", "[(a [b | c]) | d]", "[a | b] [c | d]", "([a | b] [c | d])"),
    ],
)
def test_what_is_no_pattern(text):
    with pytest.raises(PatternError, match="pattern"):
        Pattern.parse(text)


@every_form
def test_a_tensor_of_another_shape_is_refused(text, axes, shape, pieces):
    pattern = Pattern.parse(text)
    for wrong in [(*shape, 1), shape[:-1], (shape[0] + 1, *shape[1:])]:
        with pytest.raises(PatternError) as caught:
            pattern.split(torch.zeros(wrong), SIZES)
        assert str(tuple(wrong)) in str(caught.value) and str(shape) in str(caught.value)
        assert isinstance(caught.value, SymmetryError)


# The rows of fused projections are numbered 0, 1, 2, ...; every piece is written out by hand.
#
#   blocks        kv0 g0 | kv0 g1 | kv1 g0 | kv1 g1 || k kv0 | k kv1 || v kv0 | v kv1
#                   0 1      2 3      4 5      6 7      8 9    10 11     12      13
#
#   interleaved   kv0: q 0 1, k 2 3, v 4   kv1: q 5 6, k 7 8, v 9


def rows(pattern: str, sizes: dict[str, int], total: int) -> list[list]:
    split = Pattern.parse(pattern).split(torch.arange(total), sizes)
    return [piece.tensor.tolist() for piece in split]


def test_fused_blocks_by_hand():
    sizes = {"kv": 2, "g": 2, "qk": 2, "vo": 1}
    query, key, value = rows("[(kv g qk) | (kv qk) | (kv vo)]", sizes, 14)
    assert query == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert key == [[8, 9], [10, 11]]
    assert value == [[12], [13]]


def test_fused_per_head_by_hand():
    query, key, value = rows("(kv [qk | qk | vo])", {"kv": 2, "qk": 2, "vo": 1}, 10)
    assert query == [[0, 1], [5, 6]]
    assert key == [[2, 3], [7, 8]]
    assert value == [[4], [9]]


def test_fused_gate_and_up_by_hand():
    assert rows("[f | ~f]", {"f": 3}, 6) == [[0, 1, 2], [3, 4, 5]]


def test_fused_columns_by_hand():
    sizes = {"e": 2, "kv": 2, "qk": 1, "vo": 2}
    tensor = torch.tensor([[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]])
    key, value = Pattern.parse("e [(kv qk) | (kv vo)]").split(tensor, sizes)
    assert key.tensor.tolist() == [[[0], [1]], [[6], [7]]]
    assert value.tensor.tolist() == [[[2, 3], [4, 5]], [[8, 9], [10, 11]]]


# -- any pattern ------------------------------------------------------------------------------


@st.composite
def written_patterns(draw):
    """Draw the parts of a pattern, and a text that says them with any white space."""
    names = draw(st.permutations(["a", "b2", "c_", "d", "e", "f"]))
    marks = st.tuples(st.sampled_from(["", "~"]), st.sampled_from(["", "^1", "^-1", "^-2"]))

    def axis(pool):
        sign, power = draw(marks)
        return sign + pool.pop() + power

    pool, dims, concat = list(names), [], draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        dims.append([axis(pool) for _ in range(draw(st.integers(1, min(2, len(pool)))))])
        if not pool:
            break
    if concat and pool:  # its parts may name the same axes, but none that stands outside
        parts = [
            [axis(rest) for _ in range(draw(st.integers(1, len(pool))))]
            for rest in (list(draw(st.permutations(pool))) for _ in range(draw(st.integers(1, 3))))
        ]
        place = draw(st.sampled_from(dims))
        place.insert(draw(st.integers(0, len(place))), parts)
    space = st.sampled_from(["", " ", "  "])

    def text_of(factor):
        if isinstance(factor, str):
            return factor
        parts = (part[0] if len(part) == 1 else f"({' '.join(part)})" for part in factor)
        return "[" + "|".join(f"{draw(space)}{part}{draw(space)}" for part in parts) + "]"

    words = [" ".join(map(text_of, dim)) for dim in dims]
    plain = [word if len(dim) == 1 else f"({word})" for word, dim in zip(words, dims, strict=True)]
    return dims, draw(space) + " ".join(plain) + draw(space)


@LAW
@given(drawn=written_patterns(), seed=SEEDS, extents=st.tuples(*[st.integers(1, 3)] * 6))
def test_any_pattern_says_where_every_number_goes(drawn, seed, extents):
    dims, text = drawn
    pattern = Pattern.parse(text)
    read = [
        [f if isinstance(f, str) else [list(p) for p in f.parts] for f in d] for d in pattern.dims
    ]
    assert read == dims
    sizes = dict(zip(["a", "b2", "c_", "d", "e", "f"], extents, strict=True))
    x = torch.randn(pattern.shape(sizes), generator=rng(seed))
    pieces = pattern.split(x, sizes)
    for piece, axes, powers in zip(pieces, pattern.pieces, pattern.powers, strict=True):
        assert piece.axes == axes and piece.powers == powers
        assert piece.tensor.shape == tuple(sizes[base_axis(name)] for name in axes)
    assert torch.equal(pattern.join([piece.tensor for piece in pieces], sizes), x)
    again = pattern.split(pattern.join([2 * piece.tensor for piece in pieces], sizes), sizes)
    for once, twice in zip(pieces, again, strict=True):
        assert torch.equal(2 * once.tensor, twice.tensor)
    for piece in pieces:  # views: what is written there is written into the tensor
        piece.tensor.zero_()
    assert not x.any()
