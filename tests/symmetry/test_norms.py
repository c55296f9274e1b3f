"""Norms between writers and readers: which ones a moved model gets, and what carries its biases."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laws import DOUBLE, LAW, SEEDS, normal, rng, tolerance
from mergekit_rotation.symmetry import (
    Norm,
    OrthogonalFixingOnes,
    OrthogonalMap,
    Pattern,
    SignedPermutation,
    SymmetryError,
    target_norm,
)
from mergekit_rotation.symmetry.norms import LEAST_WEIGHT, carried_bias, contracted, scaled

D = 8
SHAPES = {"~e": (D,), "f ~e": (3, D), "~e f": (D, 3), "(h d) ~e": (6, D), "~e (h d)": (D, 6)}


def permutation(seed, size=D):
    sign = 2.0 * torch.randint(2, (size,), generator=rng(seed)).to(DOUBLE) - 1.0
    return SignedPermutation(torch.randperm(size, generator=rng(seed + 1)), sign)


def rotation(seed, size=D):
    return OrthogonalMap(OrthogonalFixingOnes(size).sample(1, rng(seed))[0])


STREAMS = {"permutation": permutation, "rotation": rotation}
both_kinds = pytest.mark.parametrize("kind", STREAMS)


def weights(seed, size=D):
    """Norm weights of either sign, between a half and two."""
    generator = rng(seed)
    sign = 2.0 * torch.randint(2, (size,), generator=generator).to(DOUBLE) - 1.0
    return sign * (0.5 + 1.5 * torch.rand(size, dtype=DOUBLE, generator=generator))


def moved(stream, x):
    """A norm weight along a permutation, by its matrix."""
    return stream.matrix().abs() @ x


def read(weight, norm, x):
    """What a reader without a bias makes of a normalised vector."""
    return weight @ (norm.weight * x + (0 if norm.bias is None else norm.bias))


# -- along the stream -----------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", SHAPES)
@LAW
@given(seed=SEEDS)
def test_scaled_is_the_product_with_a_diagonal_matrix(pattern, seed):
    x, vector = normal(rng(seed), *SHAPES[pattern]), weights(seed)
    diagonal = torch.diag(vector)
    expected = x @ diagonal if pattern.endswith("e") else diagonal @ x
    assert torch.equal(scaled(x, Pattern.parse(pattern), vector), expected)


@pytest.mark.parametrize("pattern", SHAPES)
@LAW
@given(seed=SEEDS)
def test_contracted_is_what_a_reader_makes_of_a_constant(pattern, seed):
    x, vector = normal(rng(seed), *SHAPES[pattern]), normal(rng(seed + 1), D)
    result = contracted(x, Pattern.parse(pattern), vector)
    expected = x @ vector if pattern.endswith("e") else x.mT @ vector
    bound = tolerance(D) * float(x.abs().max() * vector.abs().max())
    assert result.shape == expected.shape
    assert ((result - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, DOUBLE])
def test_the_dtype_of_the_tensor_is_kept(dtype):
    x, pattern = normal(rng(0), 3, D).to(dtype), Pattern.parse("f ~e")
    assert scaled(x, pattern, weights(0)).dtype == dtype
    assert contracted(x, pattern, weights(0)).dtype == dtype


def test_leading_dimensions_of_a_reader_are_kept():
    x, vector = normal(rng(0), 2, D, 5), weights(1)
    pattern = Pattern.parse("h ~e d")
    assert torch.equal(scaled(x, pattern, vector), x * vector[:, None])
    expected = torch.einsum("hed,e->hd", x, vector)
    result = contracted(x, pattern, vector)
    assert result.shape == (2, 5)
    assert ((result - expected).abs() <= tolerance(D) * 2 * x.abs().max()).all()


# -- targets --------------------------------------------------------------------------------------


@both_kinds
@LAW
@given(seed=SEEDS)
def test_usable_norms_of_the_reference_are_taken_exactly(kind, seed):
    stream = STREAMS[kind](seed)
    own = Norm(weights(seed), normal(rng(seed + 1), D))
    reference = Norm(weights(seed + 2), normal(rng(seed + 3), D))
    target = target_norm(own, reference, stream)
    assert torch.equal(target.weight, reference.weight)
    assert torch.equal(target.bias, reference.bias)


@both_kinds
@pytest.mark.parametrize("with_reference", [False, True])
def test_a_carried_bias_and_one_that_is_not_there_stay_out(kind, with_reference):
    reference = Norm(weights(1), normal(rng(1), D)) if with_reference else None
    assert target_norm(Norm(weights(0)), reference, STREAMS[kind](0)).bias is None


@LAW
@given(seed=SEEDS, bias=st.booleans())
def test_a_permuted_norm_stays_as_it_is_without_a_reference(seed, bias):
    stream, b = permutation(seed), normal(rng(seed), D)
    own = Norm(weights(seed), b if bias else None)
    target = target_norm(own, None, stream)
    assert torch.equal(target.weight, moved(stream, own.weight))
    assert torch.equal(target.bias, stream.matrix() @ b) if bias else target.bias is None


@LAW
@given(seed=SEEDS, bias=st.booleans())
def test_a_rotated_norm_becomes_a_constant_without_a_reference(seed, bias):
    own = Norm(weights(seed), normal(rng(seed), D) if bias else None)
    target = target_norm(own, None, rotation(seed))
    assert target.weight.shape == (D,)
    assert target.weight.unique().numel() == 1
    error = abs(float(target.weight[0]) - math.sqrt(float((own.weight**2).mean())))
    assert error <= tolerance(D)
    assert torch.equal(target.bias, torch.zeros(D).double()) if bias else target.bias is None
    target.weight[0] += 1  # storage of its own
    assert target.weight.unique().numel() == 2


@pytest.mark.parametrize("small", [0.0, 1e-30, -1e-30, 1e-6, -1e-6])
@LAW
@given(seed=SEEDS)
def test_a_permutation_keeps_its_own_weight_where_the_reference_has_none(small, seed):
    stream, own, reference = permutation(seed), Norm(weights(seed)), Norm(weights(seed + 1))
    reference.weight[:3] = small
    target = target_norm(own, reference, stream).weight
    assert torch.equal(target[:3], moved(stream, own.weight)[:3])
    assert torch.equal(target[3:], reference.weight[3:])


@pytest.mark.parametrize("small", [0.0, 1e-30, -1e-30, 1e-6, -1e-6])
@LAW
@given(seed=SEEDS)
def test_a_permutation_keeps_its_own_small_weights(small, seed):
    stream, own, reference = permutation(seed), Norm(weights(seed)), Norm(weights(seed + 1))
    own.weight[:3] = small
    there = moved(stream, own.weight) == small
    target = target_norm(own, reference, stream).weight
    assert int(there.sum()) == 3 and (target[there] == small).all()
    assert torch.equal(target[~there], reference.weight[~there])


@pytest.mark.parametrize("small", [0.0, 1e-30, -1e-30, 1e-6, -1e-6])
@LAW
@given(seed=SEEDS)
def test_a_rotation_lifts_small_weights_of_the_reference_to_the_least(small, seed):
    own, reference = Norm(weights(seed)), Norm(weights(seed + 1))
    reference.weight[:3] = small
    target = target_norm(own, reference, rotation(seed)).weight
    least = LEAST_WEIGHT * math.sqrt(float((reference.weight**2).mean()))
    sign = -1.0 if small < 0 else 1.0
    assert ((target[:3] - sign * least).abs() <= tolerance(D) * least).all()
    assert torch.equal(target[3:], reference.weight[3:])


@both_kinds
@pytest.mark.parametrize("whose", ["own", "reference", "both"])
def test_norms_that_are_zero_throughout_leave_weights_to_divide_by_or_their_own(kind, whose):
    zero, stream = torch.zeros(D, dtype=DOUBLE), STREAMS[kind](0)
    own = Norm(zero if whose != "reference" else weights(0))
    reference = Norm(zero if whose != "own" else weights(1))
    target = target_norm(own, reference, stream).weight
    assert torch.isfinite(target).all()
    if kind == "permutation":
        assert torch.equal(target, moved(stream, own.weight))
    else:
        assert (target.abs() >= LEAST_WEIGHT * 0.5).all()


@both_kinds
@LAW
@given(seed=SEEDS, exponent=st.integers(-100, 100))
def test_targets_do_not_depend_on_the_scale_of_both_norms(kind, seed, exponent):
    stream, scale = STREAMS[kind](seed), 2.0**exponent
    pair = [weights(seed), weights(seed + 1)]
    pair[0][0], pair[1][:2] = 0.0, torch.tensor([0.0, 1e-9])
    one = target_norm(Norm(pair[0]), Norm(pair[1]), stream).weight
    two = target_norm(Norm(scale * pair[0]), Norm(scale * pair[1]), stream).weight
    assert torch.equal(two, scale * one)


@both_kinds
@pytest.mark.parametrize("with_reference", [False, True])
def test_inputs_are_left_alone(kind, with_reference):
    own, reference = Norm(weights(0), weights(1)), Norm(weights(2), weights(3))
    reference.weight[0] = 0.0
    before = [x.clone() for n in (own, reference) for x in (n.weight, n.bias)]
    target_norm(own, reference if with_reference else None, STREAMS[kind](0))
    after = [x for n in (own, reference) for x in (n.weight, n.bias)]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


@both_kinds
def test_a_bias_that_readers_take_up_does_not_vanish_behind_a_norm_without_one(kind):
    """A target with bias None is carried: then nothing of the bias may be folded."""
    own, reference = Norm(weights(0), normal(rng(1), D)), Norm(weights(2))
    target = target_norm(own, reference, STREAMS[kind](0))
    assert target.bias is not None
    assert torch.equal(target.bias, torch.zeros(D, dtype=DOUBLE))


# -- carried biases -------------------------------------------------------------------------------


def folded(reader, own, target, stream):
    """W diag(w) Q^T diag(1/w'), written out, with a zero left where it stands."""
    nonzero = [torch.where(n == 0, torch.ones_like(n), n) for n in (own, target)]
    return reader * nonzero[0] @ stream.matrix().mT / nonzero[1]


@both_kinds
@LAW
@given(seed=SEEDS)
def test_a_carried_bias_reads_the_same_through_the_folded_reader(kind, seed):
    stream, reader = STREAMS[kind](seed), normal(rng(seed), 5, D)
    own, target, bias = weights(seed), weights(seed + 1), normal(rng(seed + 2), D)
    found = carried_bias(Norm(own), bias, stream, target)
    after = folded(reader, own, target, stream)
    bound = tolerance(D**2) * 16 * float(reader.abs().max() * bias.abs().max())
    assert found.shape == (D,)
    assert ((after @ found - reader @ bias).abs() <= bound).all()


@LAW
@given(seed=SEEDS, zeros=st.integers(0, D))
def test_a_permutation_carries_biases_behind_zero_weights_too(seed, zeros):
    stream, reader, bias = permutation(seed), normal(rng(seed), 5, D), normal(rng(seed + 2), D)
    own, reference = Norm(weights(seed)), Norm(weights(seed + 1))
    own.weight[:zeros] = 0.0
    target = target_norm(own, reference, stream)
    found = carried_bias(own, bias, stream, target.weight)
    after = folded(reader, own.weight, target.weight, stream)
    bound = tolerance(D**2) * 16 * float(reader.abs().max() * bias.abs().max())
    assert ((after @ found - reader @ bias).abs() <= bound).all()
    behind = moved(stream, own.weight) == 0
    assert torch.equal(found[behind], stream.along(bias, 0)[behind])


@LAW
@given(seed=SEEDS)
def test_a_rotation_refuses_a_bias_behind_a_zero_weight(seed):
    stream, own, bias = rotation(seed), Norm(weights(seed)), normal(rng(seed), D)
    for small in (0.0, 1e-9, -1e-9):
        own.weight[2] = small
        with pytest.raises(SymmetryError, match="bias where its weight is zero"):
            carried_bias(own, bias, stream, weights(seed + 1))


@LAW
@given(seed=SEEDS)
def test_zeros_of_weight_and_bias_together_are_no_reason_to_refuse(seed):
    stream, reader = rotation(seed), normal(rng(seed), 5, D)
    own, target, bias = weights(seed), weights(seed + 1), normal(rng(seed + 2), D)
    own[2] = bias[2] = 0.0
    found = carried_bias(Norm(own), bias, stream, target)
    after = reader * own @ stream.matrix().mT / target
    bound = tolerance(D**2) * 16 * float(reader.abs().max() * bias.abs().max())
    assert ((after @ found - reader @ bias).abs() <= bound).all()


@both_kinds
def test_a_bias_of_zeros_is_carried_as_zeros(kind):
    own, zero = Norm(torch.zeros(D, dtype=DOUBLE)), torch.zeros(D, dtype=DOUBLE)
    assert torch.equal(carried_bias(own, zero, STREAMS[kind](0), weights(0)), zero)


@both_kinds
def test_the_whole_norm_reads_the_same_with_a_carried_bias(kind):
    """W (w * x + b) of a normalised x, with the norm of another model."""
    stream, reader, bias = STREAMS[kind](3), normal(rng(0), 5, D), normal(rng(1), D)
    own, reference = Norm(weights(4), None), Norm(weights(5), normal(rng(6), D))
    target = target_norm(own, reference, stream)
    carried = Norm(target.weight, carried_bias(own, bias, stream, target.weight))
    after = folded(reader, own.weight, target.weight, stream)
    for seed in range(20):
        x = normal(rng(seed), D)
        expected = read(reader, Norm(own.weight, bias), x)
        found = read(after, carried, stream.matrix() @ x)
        assert ((found - expected).abs() <= tolerance(D**2) * 64 * reader.abs().max()).all()
