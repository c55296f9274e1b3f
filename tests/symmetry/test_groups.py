"""Groups: laws, optimality certificates, brute force, and what commutes with rotary embedding."""

import itertools
import math

import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st

from laws import (
    ANY_KIND,
    DOUBLE,
    GROUPS,
    KINDS,
    LAW,
    PAIRINGS,
    SEEDS,
    SIZES,
    inner,
    matrices,
    norm,
    normal,
    rng,
    tolerance,
)
from mergekit_rotation.symmetry import (
    DirectSum,
    Orthogonal,
    PlaneRotations,
    PlaneSigns,
    Trivial,
    rotary_pairs,
)

BATCH = 4
every_group = pytest.mark.parametrize("name", GROUPS)
rotary = pytest.mark.parametrize("pairing", PAIRINGS)


@every_group
@LAW
@given(size=SIZES, seed=SEEDS)
def test_samples_form_a_group(name, size, seed):
    group = GROUPS[name](size)
    atol = tolerance(group.n)
    g, h = group.sample(BATCH, rng(seed)), group.sample(BATCH, rng(seed + 1))
    eye = torch.eye(group.n, dtype=DOUBLE)
    assert g.shape == (BATCH, group.n, group.n) and g.dtype == DOUBLE
    assert group.contains(g, atol)
    assert group.contains(g @ h, atol)
    assert group.contains(g.mT, atol)
    assert group.contains(eye, 0.0)
    assert torch.allclose(g @ g.mT, eye.expand_as(g), rtol=0, atol=atol)


@every_group
@LAW
@given(size=SIZES, seed=SEEDS)
def test_samples_are_reproducible(name, size, seed):
    group = GROUPS[name](size)
    assert torch.equal(group.sample(BATCH, rng(seed)), group.sample(BATCH, rng(seed)))


@every_group
@LAW
@given(size=SIZES, seed=SEEDS)
def test_contains_refuses_what_is_not_in_the_group(name, size, seed):
    group = GROUPS[name](size)
    g = group.sample(1, rng(seed))
    assert not group.contains(2 * g, 0.5)
    assert not group.contains(torch.cat([g, torch.zeros_like(g)]), 0.5)


@every_group
@LAW
@given(size=SIZES, seed=SEEDS, kind=ANY_KIND)
def test_projection_lands_in_the_group_and_attains_the_value(name, size, seed, kind):
    group = GROUPS[name](size)
    gram = matrices(kind, seed, BATCH, group.n, group.n)
    g, value = group.project(gram), group.value(gram)
    atol = tolerance(group.n**2) * norm(gram)
    assert g.shape == gram.shape and g.dtype == gram.dtype
    assert group.contains(g, tolerance(group.n))
    assert ((value - inner(g, gram)).abs() <= atol).all()
    for other in group.sample(16, rng(seed + 1)):
        assert (inner(other, gram) <= value + atol).all()


@every_group
@LAW
@given(size=SIZES, seed=SEEDS)
def test_projection_keeps_elements(name, size, seed):
    group = GROUPS[name](size)
    g = group.sample(BATCH, rng(seed))
    assert torch.allclose(group.project(g), g, rtol=0, atol=tolerance(group.n))


@every_group
@LAW
@given(size=SIZES, seed=SEEDS)
def test_projection_recovers_a_planted_element(name, size, seed):
    """<h, g S> with S positive definite has its only maximum at h = g."""
    group = GROUPS[name](size)
    g = group.sample(BATCH, rng(seed))
    x = normal(rng(seed + 1), group.n, group.n)
    positive = torch.eye(group.n, dtype=DOUBLE) + x @ x.mT
    atol = tolerance(group.n) * float(torch.linalg.cond(positive))
    assert torch.allclose(group.project(g @ positive), g, rtol=0, atol=atol)


@every_group
@LAW
@given(size=SIZES, seed=SEEDS, kind=ANY_KIND)
def test_batched_is_looped(name, size, seed, kind):
    group = GROUPS[name](size)
    gram = matrices(kind, seed, 2, 3, group.n, group.n)
    for method in (group.project, group.value, group.bound):
        looped = torch.stack([torch.stack([method(m) for m in row]) for row in gram])
        scale = 1.0 if method == group.project else float(norm(gram).max())
        assert torch.allclose(method(gram), looped, rtol=0, atol=tolerance(group.n**2) * scale)


@every_group
@LAW
@given(size=SIZES, seed=SEEDS, kind=ANY_KIND)
def test_bound_is_subadditive_and_above_the_value(name, size, seed, kind):
    group = GROUPS[name](size)
    a = matrices(kind, seed, BATCH, group.n, group.n)
    b = matrices("generic", seed + 1, BATCH, group.n, group.n)
    atol = tolerance(group.n**2)
    assert (group.bound(a) >= group.value(a) - atol * norm(a)).all()
    assert (
        group.bound(a + b) <= group.bound(a) + group.bound(b) + atol * (norm(a) + norm(b))
    ).all()


@every_group
@LAW
@given(size=SIZES, seed=SEEDS, kind=ANY_KIND)
def test_a_group_is_the_product_of_its_factors(name, size, seed, kind):
    group = GROUPS[name](size)
    gram = matrices(kind, seed, BATCH, group.n, group.n)
    index = torch.cat([cells.flatten() for cells, _ in group.factors()])
    assert torch.equal(index.sort().values, torch.arange(group.n))
    value, bound = torch.zeros(2, BATCH, dtype=DOUBLE)
    for cells, part in group.factors():
        assert cells.shape[1] == part.n
        blocks = gram[:, cells[:, :, None], cells[:, None, :]]
        value = value + part.value(blocks).sum(1)
        bound = bound + part.bound(blocks).sum(1)
    atol = tolerance(group.n**2) * norm(gram)
    assert ((value - group.value(gram)).abs() <= atol).all()
    assert (bound >= group.value(gram) - atol).all()


@every_group
@LAW
@given(size=SIZES, seed=SEEDS, kind=ANY_KIND, share=st.sampled_from([0.0, 1e-3, 1.0]))
def test_no_element_gains_more_than_the_most_gain(name, size, seed, kind, share):
    group = GROUPS[name](size)
    x = matrices(kind, seed, BATCH, group.n, group.n)
    gram = x @ x.mT + share * norm(x)[:, None, None] * matrices(
        "generic", seed + 1, group.n, group.n
    )
    gain = 2 * (group.value(gram) - gram.diagonal(dim1=-2, dim2=-1).sum(-1))
    atol = tolerance(group.n**2) * norm(gram)
    assert (group.most_gain(gram) >= gain - atol).all()


@LAW
@given(size=st.integers(2, 12), seed=SEEDS)
def test_the_most_gain_of_a_small_turn_is_that_gain(size, seed):
    """Up to the third order: 2 (|M|_* - tr M) where M differs little from a positive matrix."""
    x = normal(rng(seed), size, size)
    positive = torch.eye(size, dtype=DOUBLE) + x @ x.mT / size
    turn = normal(rng(seed + 1), size, size)
    gram = positive + 1e-3 * (turn - turn.mT) / norm(turn)
    gain = float(2 * (Orthogonal(size).value(gram) - gram.trace()))
    most = float(Orthogonal(size).most_gain(gram))
    assert gain <= most <= gain * 1.01 * float(torch.linalg.cond(positive)) + 1e-12
    assert float(Orthogonal(size).most_gain(-positive)) == math.inf
    assert float(Orthogonal(size).most_gain(torch.zeros(size, size, dtype=DOUBLE))) == math.inf


@every_group
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_projection_keeps_the_dtype(name, dtype):
    group = GROUPS[name](3)
    gram = normal(rng(0), BATCH, group.n, group.n).to(dtype)
    g = group.project(gram)
    assert g.dtype == group.value(gram).dtype == group.bound(gram).dtype == dtype
    assert group.contains(g, tolerance(group.n, dtype))


@every_group
@LAW
@given(size=SIZES, seed=SEEDS)
def test_exact_groups_hold_signs_only(name, size, seed):
    group = GROUPS[name](size)
    if group.exact:
        assert set(group.sample(BATCH, rng(seed)).unique().tolist()) <= {-1.0, 0.0, 1.0}


def test_freedom_is_the_dimension_of_the_group():
    planes = PlaneRotations(6, rotary_pairs(6, "half"))
    assert [Trivial(5).freedom, Orthogonal(5).freedom, planes.freedom] == [0, 10, 3]
    assert PlaneSigns(6, planes.pairs).freedom == 0
    assert DirectSum((planes, Orthogonal(4))).freedom == 3 + 6


@LAW
@given(size=SIZES, seed=SEEDS, kind=ANY_KIND)
def test_orthogonal_is_procrustes(size, seed, kind):
    """SciPy minimises ||A R - B||: with A, B = other^T, reference^T its R is our g transposed."""
    reference = matrices(kind, seed, size, 6)
    other = normal(rng(seed + 1), size, 6)
    gram = reference @ other.mT
    expected, scale = scipy.linalg.orthogonal_procrustes(other.mT.numpy(), reference.mT.numpy())
    g = Orthogonal(size).project(gram)
    atol = tolerance(6 * size**2) * float(norm(reference) * norm(other))
    assert abs(float(inner(torch.from_numpy(expected).mT, gram) - inner(g, gram))) <= atol
    assert abs(float(Orthogonal(size).value(gram)) - scale) <= atol
    nuclear = torch.linalg.matrix_norm(gram, "nuc")
    assert abs(float(Orthogonal(size).value(gram) - nuclear)) <= atol


@LAW
@given(size=SIZES, seed=SEEDS)
def test_orthogonal_projection_itself_is_procrustes_where_it_is_unique(size, seed):
    gram = normal(rng(seed), size, size)
    expected, _ = scipy.linalg.orthogonal_procrustes(torch.eye(size).numpy(), gram.mT.numpy())
    g = Orthogonal(size).project(gram)
    atol = tolerance(size**2) * float(torch.linalg.cond(gram))
    assert torch.allclose(g, torch.from_numpy(expected).mT, rtol=0, atol=atol)


def test_reflections_are_reached():
    mirror = torch.diag(torch.tensor([1.0, 1.0, -1.0], dtype=DOUBLE))
    assert torch.allclose(Orthogonal(3).project(mirror), mirror, rtol=0, atol=tolerance(3))


@rotary
@LAW
@given(size=SIZES, seed=SEEDS, kind=ANY_KIND)
def test_plane_rotations_against_a_grid_of_angles(pairing, size, seed, kind):
    """Planes are independent, so the best grid angle of each misses the optimum by half a step."""
    steps = 720
    pairs = rotary_pairs(2 * size, pairing)
    gram = matrices(kind, seed, 2 * size, 2 * size)
    angle = torch.arange(steps, dtype=DOUBLE) * (2 * math.pi / steps)
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).view(-1, 2, 2)
    blocks = torch.stack([gram[list(pair)][:, list(pair)] for pair in pairs])
    best = inner(turn[:, None], blocks).amax(0).sum()
    value = PlaneRotations(2 * size, pairs).value(gram)
    atol = tolerance(size) * norm(gram)
    assert value * math.cos(math.pi / steps) - atol <= best <= value + atol


@rotary
@LAW
@given(size=SIZES, seed=SEEDS, kind=ANY_KIND)
def test_plane_signs_against_all_signs(pairing, size, seed, kind):
    group = PlaneSigns(2 * size, rotary_pairs(2 * size, pairing))
    gram = matrices(kind, seed, 2 * size, 2 * size)
    best = -math.inf
    for signs in itertools.product([1.0, -1.0], repeat=size):
        diagonal = torch.empty(2 * size, dtype=DOUBLE)
        for sign, pair in zip(signs, group.pairs, strict=True):
            diagonal[list(pair)] = sign
        best = max(best, float(diagonal @ gram.diagonal()))
    assert abs(float(group.value(gram)) - best) <= tolerance(size) * float(norm(gram))


@LAW
@given(size=SIZES, seed=SEEDS, kind=ANY_KIND)
def test_direct_sum_is_its_blocks(size, seed, kind):
    planes = PlaneRotations(2 * size, rotary_pairs(2 * size, "half"))
    blocks = (planes, Orthogonal(size), Trivial(2))
    group = DirectSum(blocks)
    gram = matrices(kind, seed, group.n, group.n)
    parts, start = [], 0
    for block in blocks:
        parts.append(gram[start : start + block.n, start : start + block.n])
        start += block.n
    pairs = list(zip(blocks, parts, strict=True))
    expected = torch.block_diag(*(block.project(part) for block, part in pairs))
    assert start == group.n
    assert torch.equal(group.project(gram), expected)
    assert torch.equal(group.value(gram), torch.stack([b.value(p) for b, p in pairs]).sum())
    assert torch.equal(group.bound(gram), torch.stack([b.bound(p) for b, p in pairs]).sum())


@pytest.mark.parametrize("name", [name for name in GROUPS if "orthogonal" not in name])
@LAW
@given(size=SIZES)
def test_nothing_to_align_gives_the_identity(name, size):
    group = GROUPS[name](size)
    planes = group.blocks[0] if isinstance(group, DirectSum) else group
    zero = torch.zeros(planes.n, planes.n, dtype=DOUBLE)
    assert torch.equal(planes.project(zero), torch.eye(planes.n, dtype=DOUBLE))
    assert float(planes.value(zero)) == 0.0


def test_rotary_pairs():
    assert rotary_pairs(6, "half") == ((0, 3), (1, 4), (2, 5))
    assert rotary_pairs(6, "interleaved") == ((0, 1), (2, 3), (4, 5))


def rotary_matrix(pairing: str, angle: torch.Tensor) -> torch.Tensor:
    """Rotary embedding as models write it, x cos + turned(x) sin, applied to the unit vectors."""
    x = torch.eye(2 * len(angle), dtype=DOUBLE)
    if pairing == "half":
        first, second = x.chunk(2, dim=-1)
        turned, angles = torch.cat([-second, first], -1), torch.cat([angle, angle])
    else:
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        angles = angle.repeat_interleave(2)
    return (x * angles.cos() + turned * angles.sin()).mT


@rotary
@pytest.mark.parametrize("kind", [PlaneRotations, PlaneSigns])
@LAW
@given(size=SIZES, seed=SEEDS)
def test_planes_commute_with_rotary_embedding(pairing, kind, size, seed):
    g = kind(2 * size, rotary_pairs(2 * size, pairing)).sample(BATCH, rng(seed))
    turn = rotary_matrix(pairing, 10 * normal(rng(seed + 1), size))
    assert torch.allclose(g @ turn, turn @ g, rtol=0, atol=tolerance(size))


@rotary
def test_other_rotations_do_not_commute_with_rotary_embedding(pairing):
    """Negative control: O(n), and the planes of the other pairing, are no symmetry of rotary."""
    (wrong,) = set(PAIRINGS) - {pairing}
    turn = rotary_matrix(pairing, normal(rng(0), 3))
    for group in (Orthogonal(6), PlaneRotations(6, rotary_pairs(6, wrong))):
        g = group.sample(BATCH, rng(1))
        assert (norm(g @ turn - turn @ g) > tolerance(6, torch.float16)).all()


def test_every_matrix_class_is_what_it_says():
    assert torch.linalg.matrix_rank(matrices("low rank", 0, 4, 4)) == 1
    spectrum = torch.linalg.svdvals(matrices("repeated singular values", 0, 4, 4))
    assert torch.allclose(spectrum, torch.ones(4, dtype=DOUBLE), rtol=0, atol=tolerance(4))
    assert set(KINDS) >= {"generic", "zero", "signs", "huge", "small"}
