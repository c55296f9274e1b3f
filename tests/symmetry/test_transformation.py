"""Transformations of whole models: the function stays, and they compose and invert as values."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laws import DOUBLE, LAW, SEEDS, normal, rng, tolerance
from mergekit_rotation.symmetry import (
    ModelTransformation,
    Norm,
    Orthogonal,
    OrthogonalFixingOnes,
    OrthogonalMap,
    Pattern,
    Permute,
    Rotate,
    SignedPermutation,
    StreamLayout,
    SymmetryError,
    act,
    averaged_apart,
    bias_of,
    into_stream,
    out_of_stream,
    target_norm,
)

D, H, K = 8, 2, 3
SIZES = {"e": D, "h": H, "d": K, "f": 5}

#: two readers of one norm, a third of another, writers, embeddings
PATTERNS = {
    "embed.weight": "v ~e",
    "norm.weight": "e",
    "norm.bias": "~e",
    "query.weight": "(h d) ~e",
    "key.weight": "~e (h d)",
    "out.weight": "~e (h d)",
    "out.bias": "~e",
    "last.weight": "e",
    "last.bias": "~e",
    "head.weight": "f ~e",
}
READERS = {"norm.weight": ("query.weight", "key.weight"), "last.weight": ("head.weight",)}
#: what a block moves besides the stream
LEGS = {
    "query.weight": "(h d) ~e",
    "query.bias": "(h d)",
    "key.weight": "~e (h d)",
    "key.bias": "(h d)",
    "out.weight": "~e (h d)",
}
FOLDED = ("norm.weight", "norm.bias", "last.weight", "last.bias")


def layout(layer_norm=False, offset=0.0, carried=()):
    patterns = {name: Pattern.parse(text) for name, text in PATTERNS.items()}
    if not layer_norm:
        patterns = {n: p for n, p in patterns.items() if n not in ("norm.bias", "last.bias")}
    return StreamLayout(patterns, READERS, layer_norm, offset, frozenset(carried))


def norm_weights(seed):
    """Of either sign, between a half and two, so that nothing is divided by little."""
    generator = rng(seed)
    sign = 2.0 * torch.randint(2, (D,), generator=generator).to(DOUBLE) - 1.0
    return sign * (0.5 + 1.5 * torch.rand(D, dtype=DOUBLE, generator=generator))


def model(layout, seed, biases=True):
    """Draw a model; a carried norm has a reader without bias."""
    generator = rng(seed)
    shapes = {
        "embed.weight": (6, D),
        "query.weight": (H * K, D),
        "key.weight": (D, H * K),
        "out.weight": (D, H * K),
        "out.bias": (D,),
        "head.weight": (5, D),
    }
    if biases:
        shapes |= {"query.bias": (H * K,), "key.bias": (H * K,), "head.bias": (5,)}
    if layout.layer_norm:
        shapes |= {"norm.bias": (D,), "last.bias": (D,)}
    tensors = {name: normal(generator, *shape) for name, shape in shapes.items()}
    for reader in ("query.bias", "head.bias"):
        if ("norm" if reader == "query.bias" else "last") + ".weight" in layout.carried:
            tensors.pop(reader, None)
    for k, name in enumerate(READERS):
        tensors[name] = norm_weights(seed + k + 1) - layout.offset
    return tensors


def normalised(x, layer_norm):
    if layer_norm:
        x = x - x.mean(-1, keepdim=True)
    return x / x.square().mean(-1, keepdim=True).sqrt()


def read(tensors, layout, norm, reader, x, size=False):
    """y = W (w * normalise(x) + b) + c by hand; with ``size``, the sum of its products."""
    part = torch.abs if size else (lambda z: z)
    weight = tensors[reader] if PATTERNS[reader].endswith("~e") else tensors[reader].mT
    inner = part(tensors[norm] + layout.offset) * part(normalised(x, layout.layer_norm))
    if bias_of(norm) in tensors:
        inner = inner + part(tensors[bias_of(norm)])
    y = inner @ part(weight).mT
    return y + part(tensors[bias_of(reader)]) if bias_of(reader) in tensors else y


def run(tensors, layout, x, size=False):
    """Everything that a small model computes: queries, keys, what is written, the output."""
    queries = read(tensors, layout, "norm.weight", "query.weight", x, size)
    keys = read(tensors, layout, "norm.weight", "key.weight", x, size)
    scores = (queries * keys).unflatten(-1, (H, K)).sum(-1, keepdim=True)
    values = (scores * keys.unflatten(-1, (H, K))).flatten(-2)
    weight, bias = tensors["out.weight"], tensors["out.bias"]
    written = values @ (weight.abs() if size else weight).mT + (bias.abs() if size else bias)
    after = x + written
    return scores.squeeze(-1), written, read(tensors, layout, "last.weight", "head.weight", after)


def permutation(seed, one_sign=False):
    sign = 2.0 * torch.randint(2, (D,), generator=rng(seed)).to(DOUBLE) - 1.0
    index = torch.randperm(D, generator=rng(seed + 1))
    return SignedPermutation(index, sign[:1].expand(D).clone() if one_sign else sign)


def rotation(seed, group=Orthogonal):
    return OrthogonalMap(group(D).sample(1, rng(seed))[0])


#: norm, kind of map: what is a symmetry of it
STREAMS = {
    "rms, permutation": (False, permutation),
    "rms, rotation": (False, rotation),
    "layer norm, permutation": (True, lambda seed: permutation(seed, one_sign=True)),
    "layer norm, rotation": (True, lambda seed: rotation(seed, OrthogonalFixingOnes)),
}
every_stream = pytest.mark.parametrize("name", STREAMS)
offsets = pytest.mark.parametrize("offset", [0.0, 1.0])


def draw_target(layout, norm, seed):
    bias = layout.layer_norm and norm not in layout.carried
    return Norm(norm_weights(seed), normal(rng(seed + 50), D) if bias else None)


def draw_targets(layout, seed):
    return {norm: draw_target(layout, norm, seed + k) for k, norm in enumerate(READERS)}


def moved(tensors, layout, stream, targets):
    inside = into_stream(tensors, tensors, layout, stream)
    return out_of_stream(inside, tensors, tensors, layout, stream, targets)


def same(found, expected, terms=D**2, scale=None):
    """Equal up to the rounding of ``terms`` products of the given sizes."""
    bound = tolerance(terms) * (expected.abs().max() + 1 if scale is None else scale)
    return found.shape == expected.shape and bool(((found - expected).abs() <= bound).all())


def same_reading(before, after, layout, stream, norm, reader, seed=99):
    x = 3 * normal(rng(seed), 16, D) + 1
    y = stream.along(x, -1)
    scale = read(before, layout, norm, reader, x, size=True)
    scale = scale + read(after, layout, norm, reader, y, size=True)
    expected = read(before, layout, norm, reader, x)
    return same(read(after, layout, norm, reader, y), expected, D**2, scale)


# -- into the stream's coordinates and out again --------------------------------------------------


@every_stream
@offsets
@LAW
@given(seed=SEEDS, biases=st.booleans())
def test_readers_compute_the_same_behind_any_norm(name, offset, seed, biases):
    layer_norm, draw = STREAMS[name]
    shape = layout(layer_norm, offset, () if biases else READERS)
    tensors, stream = model(shape, seed, biases), draw(seed)
    targets = draw_targets(shape, seed + 10)
    after = moved(tensors, shape, stream, targets)
    assert set(after) == set(tensors)
    for norm, readers in READERS.items():
        assert same(after[norm] + offset, targets[norm].weight)
        for reader in readers:
            assert same_reading(tensors, after, shape, stream, norm, reader)


@every_stream
@LAW
@given(seed=SEEDS)
def test_a_norm_with_one_reader_without_a_bias_carries_its_own(name, seed):
    layer_norm, draw = STREAMS[name]
    shape = layout(layer_norm, 0.0, ["norm.weight"])
    tensors, stream = model(shape, seed), draw(seed)
    assert "query.bias" not in tensors and "key.bias" in tensors
    after = moved(tensors, shape, stream, draw_targets(shape, seed + 10))
    for norm, readers in READERS.items():
        for reader in readers:
            assert same_reading(tensors, after, shape, stream, norm, reader)
    assert torch.equal(after["key.bias"], tensors["key.bias"])


@every_stream
@LAW
@given(seed=SEEDS, offset=st.sampled_from([0.0, 1.0]))
def test_a_whole_model_computes_the_same(name, seed, offset):
    layer_norm, draw = STREAMS[name]
    shape = layout(layer_norm, offset)
    tensors, stream = model(shape, seed), draw(seed)
    after = moved(tensors, shape, stream, draw_targets(shape, seed + 10))
    x = tensors["embed.weight"]
    scores, written, output = run(tensors, shape, x)
    found = run(after, shape, after["embed.weight"])
    largest = run(tensors, shape, x, size=True)[1].max()
    largest = largest + run(after, shape, after["embed.weight"], size=True)[1].max()
    assert same(after["embed.weight"], stream.along(x, 1), D)
    assert same(found[0], scores, D**2, largest)
    assert same(found[1], stream.along(written, -1), D**2, largest)
    assert same(found[2], output, D**3, largest)


@every_stream
@LAW
@given(seed=SEEDS)
def test_the_norms_of_a_reference_are_taken_and_the_reading_stays(name, seed):
    layer_norm, draw = STREAMS[name]
    shape, stream = layout(layer_norm), draw(seed)
    tensors, reference = model(shape, seed), model(shape, seed + 5)
    for with_reference in (True, False):
        targets = {
            norm: target_norm(
                shape.norm(norm, tensors),
                shape.norm(norm, reference) if with_reference else None,
                stream,
            )
            for norm in READERS
        }
        after = moved(tensors, shape, stream, targets)
        for norm, readers in READERS.items():
            assert all(same_reading(tensors, after, shape, stream, norm, r) for r in readers)
            assert not with_reference or torch.equal(after[norm], reference[norm])


@pytest.mark.parametrize("name", [n for n in STREAMS if n.startswith("layer norm")])
@LAW
@given(seed=SEEDS)
def test_a_reference_whose_norm_has_no_bias_is_no_reason_to_count_it_twice(name, seed):
    _, draw = STREAMS[name]
    shape, stream = layout(layer_norm=True), draw(seed)
    tensors, reference = model(shape, seed), model(shape, seed + 5)
    del reference["norm.bias"]
    targets = {
        norm: target_norm(shape.norm(norm, tensors), shape.norm(norm, reference), stream)
        for norm in READERS
    }
    after = moved(tensors, shape, stream, targets)
    assert same_reading(tensors, after, shape, stream, "norm.weight", "query.weight")


@pytest.mark.parametrize("name", [n for n in STREAMS if n.endswith("permutation")])
@offsets
@LAW
@given(seed=SEEDS, zeros=st.integers(1, D), with_reference=st.booleans())
def test_what_stands_behind_zero_weights_is_only_permuted(
    name, offset, seed, zeros, with_reference
):
    """Bit by bit: a zero weight makes a reader's column invisible, and it has to come back."""
    layer_norm, draw = STREAMS[name]
    shape, stream = layout(layer_norm, offset), draw(seed)
    tensors, reference = model(shape, seed), model(shape, seed + 5)
    tensors["norm.weight"][:zeros] = -offset
    targets = {
        norm: target_norm(
            shape.norm(norm, tensors),
            shape.norm(norm, reference) if with_reference else None,
            stream,
        )
        for norm in READERS
    }
    after = moved(tensors, shape, stream, targets)
    behind = stream.index < zeros
    assert (after["norm.weight"][behind] == -offset).all()
    expected = stream.along(tensors["query.weight"], 1)
    assert torch.equal(after["query.weight"][:, behind], expected[:, behind])
    expected = stream.along(tensors["key.weight"], 0)
    assert torch.equal(after["key.weight"][behind], expected[behind])
    for reader in READERS["norm.weight"]:
        assert same_reading(tensors, after, shape, stream, "norm.weight", reader)


@every_stream
@LAW
@given(seed=SEEDS)
def test_zero_weights_of_either_side_leave_the_reading_as_it_is(name, seed):
    layer_norm, draw = STREAMS[name]
    shape, stream = layout(layer_norm), draw(seed)
    tensors, reference = model(shape, seed), model(shape, seed + 5)
    tensors["norm.weight"][:2] = 0.0
    reference["norm.weight"][1:3] = 0.0
    reference["last.weight"][:] = 0.0
    targets = {
        norm: target_norm(shape.norm(norm, tensors), shape.norm(norm, reference), stream)
        for norm in READERS
    }
    after = moved(tensors, shape, stream, targets)
    for norm, readers in READERS.items():
        assert all(same_reading(tensors, after, shape, stream, norm, r) for r in readers)


@every_stream
@pytest.mark.parametrize("tiny", [1e-30, 1e-37, 1e-39, 1e-42])
def test_tiny_weights_of_a_norm_do_not_overflow_in_single_precision(name, tiny):
    """Weights that decay has driven out of the range of 1 / w in float32."""
    layer_norm, draw = STREAMS[name]
    shape, stream = layout(layer_norm), draw(0)
    tensors = {n: x.float() for n, x in model(shape, 0).items()}
    tensors["norm.weight"][:2] = tiny
    assert (tensors["norm.weight"][:2] > 0).all()
    targets = {n: target_norm(shape.norm(n, tensors), None, stream) for n in READERS}
    after = moved(tensors, shape, stream, targets)
    assert all(bool(torch.isfinite(x).all()) for x in after.values())
    x = normal(rng(1), 16, D).float()
    size = read(tensors, shape, "norm.weight", "query.weight", x, size=True)
    y = stream.along(x, -1)
    size = size + read(after, shape, "norm.weight", "query.weight", y, size=True)
    expected = read(tensors, shape, "norm.weight", "query.weight", x)
    found = read(after, shape, "norm.weight", "query.weight", y)
    assert ((found - expected).abs() <= tolerance(D**2, torch.float32) * size).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_permuted_model_without_a_reference_keeps_its_half_precision_numbers(dtype):
    """Folding and unfolding in float32 rounds to the very numbers that were stored."""
    shape, stream = layout(), permutation(0)
    stored = {n: x.to(dtype) for n, x in model(shape, 0).items()}
    tensors = {n: x.float() for n, x in stored.items()}
    targets = {n: target_norm(shape.norm(n, tensors), None, stream) for n in READERS}
    after = moved(tensors, shape, stream, targets)
    for name, pattern in shape.patterns.items():
        dim = pattern.dim_of("e")
        expected = stream.along(stored[name], dim, signed=pattern.signed("e"))
        assert torch.equal(after[name].to(dtype), expected)


@every_stream
def test_a_bias_behind_a_zero_weight_cannot_be_carried_through_a_rotation(name):
    layer_norm, draw = STREAMS[name]
    shape, stream = layout(layer_norm, 0.0, READERS), draw(0)
    tensors = model(shape, 0, biases=False)
    tensors["norm.weight"][0] = 0.0
    targets = {n: target_norm(shape.norm(n, tensors), None, stream) for n in READERS}
    if name != "layer norm, rotation":
        after = moved(tensors, shape, stream, targets)
        assert same_reading(tensors, after, shape, stream, "norm.weight", "query.weight")
        return
    with pytest.raises(SymmetryError, match="bias"):
        moved(tensors, shape, stream, targets)


def test_a_bias_that_readers_take_up_is_no_reason_to_refuse_a_rotation():
    """Only what is carried has to be expressed by another weight."""
    _, draw = STREAMS["layer norm, rotation"]
    shape, stream = layout(layer_norm=True), draw(0)
    tensors = model(shape, 0)
    tensors["norm.weight"][:2] = 0.0
    targets = draw_targets(shape, 1)
    after = moved(tensors, shape, stream, targets)
    assert torch.equal(after["norm.bias"], targets["norm.weight"].bias)
    assert same_reading(tensors, after, shape, stream, "norm.weight", "query.weight")


@every_stream
@LAW
@given(seed=SEEDS)
def test_tensors_can_be_moved_one_at_a_time_with_what_is_needed(name, seed):
    layer_norm, draw = STREAMS[name]
    shape = layout(layer_norm, 0.0, ["last.weight"])
    tensors, stream = model(shape, seed), draw(seed)
    targets = draw_targets(shape, seed + 10)
    whole = moved(tensors, shape, stream, targets)
    for one in tensors:
        some = {n: tensors[n] for n in shape.needed([one]) if n in tensors}
        inside = into_stream(some, some, shape, stream)
        alone = out_of_stream(inside, some, [one], shape, stream, targets)
        assert list(alone) == [one]
        assert torch.equal(alone[one], whole[one])


@every_stream
def test_folding_alone_and_what_is_left_out(name):
    layer_norm, draw = STREAMS[name]
    shape, x = layout(layer_norm, offset=1.0), normal(rng(1), 4, D)
    tensors = model(shape, 0)
    plain = into_stream(tensors, tensors, shape, None)
    assert set(plain) == set(tensors) - set(FOLDED)
    expected = read(tensors, shape, "norm.weight", "query.weight", x)
    found = normalised(x, layer_norm) @ plain["query.weight"].mT + plain["query.bias"]
    assert same(found, expected, D**2, 100)
    for name_ in ("embed.weight", "out.weight", "out.bias"):
        assert torch.equal(plain[name_], tensors[name_])
    turned = into_stream(tensors, tensors, shape, draw(0))
    assert torch.equal(turned["query.bias"], plain["query.bias"])
    assert same(turned["query.weight"], draw(0).along(plain["query.weight"], 1), D)


@every_stream
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_dtypes_are_kept_and_inputs_are_left_alone(name, dtype):
    layer_norm, draw = STREAMS[name]
    shape = layout(layer_norm, 1.0, ["last.weight"])
    tensors = {n: x.to(dtype) for n, x in model(shape, 0).items()}
    before = {n: x.clone() for n, x in tensors.items()}
    after = moved(tensors, shape, draw(0), draw_targets(shape, 1))
    assert all(x.dtype == dtype for x in after.values())
    assert all(torch.equal(tensors[n], before[n]) for n in tensors)


def test_another_order_of_sign_and_mean_is_no_symmetry():
    """Negative control: signs per coordinate, and rotations that move ones, under a LayerNorm."""
    shape = layout(layer_norm=True)
    tensors = model(shape, 0)
    for stream in (permutation(2), rotation(0)):
        after = moved(tensors, shape, stream, draw_targets(shape, 1))
        assert not same_reading(tensors, after, shape, stream, "norm.weight", "query.weight")


# -- layouts --------------------------------------------------------------------------------------


def test_which_norm_a_tensor_belongs_to():
    shape = layout(layer_norm=True)
    for name in ("norm.weight", "norm.bias", "query.weight", "query.bias", "key.weight"):
        assert shape.norm_of(name) == "norm.weight"
    for name in ("last.weight", "last.bias", "head.weight", "head.bias"):
        assert shape.norm_of(name) == "last.weight"
    for name in ("embed.weight", "out.weight", "out.bias", "query", "bias"):
        assert shape.norm_of(name) is None
    assert bias_of("a.weight") == "a.bias" and bias_of("a.b") == "a.b.bias"


def test_what_is_needed_to_move_a_tensor():
    rms, with_bias = layout(), layout(layer_norm=True)
    norm = ["norm.weight", "norm.bias"]
    assert rms.needed(["embed.weight", "out.bias"]) == ["embed.weight", "out.bias"]
    assert rms.needed(["query.weight"]) == ["query.weight", "norm.weight"]
    assert with_bias.needed(["query.weight"]) == ["query.weight", *norm]
    assert with_bias.needed(["query.bias"]) == ["query.bias", "query.weight", *norm]
    assert with_bias.needed(["norm.weight"]) == norm
    assert sorted(with_bias.needed(["norm.bias"])) == sorted(norm)
    both = with_bias.needed(["query.weight", "key.bias", "query.weight"])
    assert sorted(both) == sorted({"query.weight", "key.bias", "key.weight", *norm})
    for shape in (rms, with_bias):
        assert set(shape.needed(PATTERNS)) >= set(PATTERNS) - {"norm.bias", "last.bias"}
        once = shape.needed(PATTERNS)
        assert shape.needed(once) == once and len(set(once)) == len(once)


def test_norms_are_effective_and_carry_no_bias_that_is_carried():
    shape = layout(True, offset=1.0, carried=["last.weight"])
    tensors = {n: x.half() for n, x in model(shape, 0).items()}
    one, other = (shape.norm(n, tensors) for n in READERS)
    assert one.weight.dtype == one.bias.dtype == DOUBLE
    assert torch.equal(one.weight, tensors["norm.weight"].double() + 1)
    assert torch.equal(one.bias, tensors["norm.bias"].double())
    assert other.bias is None
    del tensors["norm.bias"]
    assert shape.norm("norm.weight", tensors).bias is None


# -- transformations as values --------------------------------------------------------------------

OUTER = (-1, -1)


def draw_block(seed):
    generator = rng(seed)
    return (
        Permute("h", torch.randperm(H, generator=generator)),
        Rotate("d", Orthogonal(K).sample(H, generator), per="h"),
    )


def draw_norms(layout, seed, a, b):
    inner, last = draw_targets(layout, seed).values()
    return {("norm.weight", a, b): inner, ("last.weight", *OUTER): last}


def draw_transformation(layout, stream, seed, a, b):
    blocks = {("heads", a, b): draw_block(seed)}
    return ModelTransformation(stream, draw_norms(layout, seed, a, b), blocks)


def applied(transformation, tensors, layout, a, b):
    """Move a model of one layer, b, to a reference where it is layer a."""
    elements = transformation.blocks.get(("heads", a, b), ())

    def move(name, x):
        return act(elements, x, Pattern.parse(LEGS[name]), SIZES) if name in LEGS else x

    if transformation.stream is None:
        return {name: move(name, x) for name, x in tensors.items()}
    inside = into_stream(tensors, tensors, layout, transformation.stream)
    inside = {name: move(name, x) for name, x in inside.items()}
    targets = {
        "norm.weight": transformation.norms["norm.weight", a, b],
        "last.weight": transformation.norms[("last.weight", *OUTER)],
    }
    return out_of_stream(inside, tensors, tensors, layout, transformation.stream, targets)


def equal(found, expected):
    assert set(found) == set(expected)
    return all(same(found[n], x, D**3) for n, x in expected.items())


def norms_of(layout, tensors, a, b):
    inner, last = (layout.norm(name, tensors) for name in READERS)
    return {("norm.weight", a, b): inner, ("last.weight", *OUTER): last}


PAIRS = [
    ("rms, permutation", "rms, permutation"),
    ("rms, permutation", "rms, rotation"),
    ("rms, rotation", "rms, permutation"),
    ("rms, rotation", "rms, rotation"),
    ("layer norm, permutation", "layer norm, permutation"),
    ("layer norm, rotation", "layer norm, permutation"),
    ("layer norm, permutation", "layer norm, rotation"),
    ("layer norm, rotation", "layer norm, rotation"),
]
CARRIED = pytest.mark.parametrize("carried", [(), ("norm.weight",)], ids=["folded", "carried"])


@pytest.mark.parametrize(("first", "then"), PAIRS)
@CARRIED
@LAW
@given(seed=SEEDS, offset=st.sampled_from([0.0, 1.0]))
def test_then_is_one_after_the_other(first, then, carried, seed, offset):
    layer_norm, draw = STREAMS[first]
    shape = layout(layer_norm, offset, carried)
    tensors = model(shape, seed)
    one = draw_transformation(shape, draw(seed), seed + 1, 0, 0)
    two = draw_transformation(shape, STREAMS[then][1](seed + 9), seed + 2, 0, 0)
    expected = applied(two, applied(one, tensors, shape, 0, 0), shape, 0, 0)
    assert equal(applied(one.then(two), tensors, shape, 0, 0), expected)


@every_stream
@CARRIED
@LAW
@given(seed=SEEDS, offset=st.sampled_from([0.0, 1.0]))
def test_the_inverse_leads_back_to_the_original_tensors(name, carried, seed, offset):
    layer_norm, draw = STREAMS[name]
    shape = layout(layer_norm, offset, carried)
    tensors = model(shape, seed)
    there = draw_transformation(shape, draw(seed), seed + 1, 2, 5)
    back = there.inverse(norms_of(shape, tensors, 5, 2))
    after = applied(there, tensors, shape, 2, 5)
    assert not equal(after, tensors)
    assert equal(applied(back, after, shape, 5, 2), tensors)
    assert set(back.blocks) == {("heads", 5, 2)}


@every_stream
@LAW
@given(seed=SEEDS)
def test_composed_with_its_inverse_a_transformation_changes_nothing(name, seed):
    layer_norm, draw = STREAMS[name]
    shape = layout(layer_norm)
    tensors = model(shape, seed)
    there = draw_transformation(shape, draw(seed), seed + 1, 0, 0)
    back = there.inverse(norms_of(shape, tensors, 0, 0))
    assert equal(applied(there.then(back), tensors, shape, 0, 0), tensors)


@every_stream
@LAW
@given(seed=SEEDS)
def test_composition_is_associative(name, seed):
    layer_norm, draw = STREAMS[name]
    shape = layout(layer_norm)
    tensors = model(shape, seed)
    a, b, c = (draw_transformation(shape, draw(seed + k), seed + k, 0, 0) for k in range(3))
    left, right = a.then(b).then(c), a.then(b.then(c))
    assert equal(applied(left, tensors, shape, 0, 0), applied(right, tensors, shape, 0, 0))


@pytest.mark.parametrize(("first", "then"), [PAIRS[1], PAIRS[-1]])
def test_layers_are_followed_through_the_one_in_between(first, then):
    """Layer 5 goes to layer 2 and from there to layer 0; so do its norms."""
    layer_norm, draw = STREAMS[first]
    shape = layout(layer_norm)
    tensors = model(shape, 0)
    one = draw_transformation(shape, draw(0), 1, 2, 5)
    two = draw_transformation(shape, STREAMS[then][1](9), 2, 0, 2)
    both = one.then(two)
    expected = applied(two, applied(one, tensors, shape, 2, 5), shape, 0, 2)
    assert set(both.blocks) == {("heads", 0, 5)}
    assert set(both.norms) == {("norm.weight", 0, 5), ("last.weight", *OUTER)}
    assert equal(applied(both, tensors, shape, 0, 5), expected)


@pytest.mark.parametrize("name", ["rms, permutation", "layer norm, rotation"])
@pytest.mark.parametrize("missing", [0, 1])
def test_blocks_that_only_one_of_two_moves_are_moved(name, missing):
    """What a transformation does not name it leaves as it is."""
    layer_norm, draw = STREAMS[name]
    shape = layout(layer_norm)
    tensors = model(shape, 0)
    both = [draw_transformation(shape, draw(k), k + 1, 0, 0) for k in range(2)]
    both[missing] = replace(both[missing], blocks={})
    one, two = both
    expected = applied(two, applied(one, tensors, shape, 0, 0), shape, 0, 0)
    assert equal(applied(one.then(two), tensors, shape, 0, 0), expected)


@every_stream
@pytest.mark.parametrize("missing", ["first", "then"])
def test_a_stream_that_only_one_of_two_moves_is_moved(name, missing):
    layer_norm, draw = STREAMS[name]
    shape = layout(layer_norm)
    tensors = model(shape, 0)
    whole = draw_transformation(shape, draw(0), 1, 0, 0)
    heads = ModelTransformation(blocks={("heads", 0, 0): draw_block(2)})
    one, two = (heads, whole) if missing == "first" else (whole, heads)
    expected = applied(two, applied(one, tensors, shape, 0, 0), shape, 0, 0)
    assert equal(applied(one.then(two), tensors, shape, 0, 0), expected)


def test_blocks_alone_compose_and_invert():
    shape = layout()
    tensors = model(shape, 0)
    one = ModelTransformation(blocks={("heads", 2, 5): draw_block(1)})
    two = ModelTransformation(blocks={("heads", 0, 2): draw_block(2)})
    both = one.then(two)
    assert both.stream is None and not both.norms
    after = applied(one, tensors, shape, 2, 5)
    expected = applied(two, after, shape, 0, 2)
    assert equal(applied(both, tensors, shape, 0, 5), expected)
    back = one.inverse(norms_of(shape, tensors, 5, 2))
    assert back.stream is None and not back.norms
    assert equal(applied(back, after, shape, 5, 2), tensors)


def test_nothing_is_the_identity():
    shape = layout()
    tensors, nothing = model(shape, 0), ModelTransformation()
    assert applied(nothing, tensors, shape, 0, 0) == tensors
    again = nothing.then(nothing)
    assert again.stream is None and not again.norms and not again.blocks
    back = nothing.inverse({})
    assert back.stream is None and not back.norms and not back.blocks


@pytest.mark.parametrize("name", [n for n in STREAMS if n.endswith("permutation")])
def test_zero_weights_survive_the_way_there_and_back(name):
    layer_norm, draw = STREAMS[name]
    shape = layout(layer_norm)
    tensors, reference = model(shape, 0), model(shape, 5)
    tensors["norm.weight"][:3] = 0.0
    stream = draw(0)
    norms = {
        (norm, *((0, 0) if norm == "norm.weight" else OUTER)): target_norm(
            shape.norm(norm, tensors), shape.norm(norm, reference), stream
        )
        for norm in READERS
    }
    there = ModelTransformation(stream, norms, {("heads", 0, 0): draw_block(1)})
    back = there.inverse(norms_of(shape, tensors, 0, 0))
    after = applied(there, tensors, shape, 0, 0)
    again = applied(back, after, shape, 0, 0)
    assert equal(again, tensors)
    assert torch.equal(again["norm.weight"], tensors["norm.weight"])


@pytest.mark.parametrize("layer_norm", [False, True])
@given(seed=SEEDS)
@LAW
def test_what_averaging_norms_and_readers_apart_costs(layer_norm, seed):
    here = layout(layer_norm, offset=0.5)
    first, second = model(here, seed), model(here, seed + 10)
    middle = {name: (first[name] + second[name]) / 2 for name in first}
    readers = [name for name in first if here.norm_of(name) and name not in FOLDED]
    folded = [into_stream(side, readers, here, None) for side in (first, second, middle)]
    for name in readers:
        a, b, average = (side[name] for side in folded)
        missed = 4 * (average - (a + b) / 2).square().sum()
        # Squares of sums of D products of numbers below ten, which cancel.
        size = sum(side[name].square().sum() for side in folded) + D * 10**2
        cost = averaged_apart(name, first, second, here)
        assert abs(cost - missed) <= tolerance(D * len(a)) * size
        if not layer_norm and name.endswith("bias"):
            assert cost == 0
        else:
            assert cost > 0
    assert averaged_apart("out.weight", first, second, here) == 0
