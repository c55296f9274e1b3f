"""Maps of the stream: how they act and compose, and that solving finds planted and best ones."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laws import (
    ANY_KIND,
    DOUBLE,
    LAW,
    SEEDS,
    inner,
    matrices,
    norm,
    normal,
    rng,
    tolerance,
)
from mergekit_rotation.symmetry import (
    Orthogonal,
    OrthogonalFixingOnes,
    OrthogonalMap,
    Pattern,
    SignedPermutation,
    SymmetryError,
    act_stream,
    composed,
    cross_gram,
    solve_permutation,
    solve_rotation,
)

BATCH = 4
DTYPES = [torch.bfloat16, torch.float16, torch.float32, DOUBLE]


def signed_permutation(size, seed):
    sign = 2.0 * torch.randint(2, (size,), generator=rng(seed)).to(DOUBLE) - 1.0
    return SignedPermutation(torch.randperm(size, generator=rng(seed + 1)), sign)


def permutation(size, seed):
    return SignedPermutation(torch.randperm(size, generator=rng(seed)), torch.ones(size).double())


def globally_signed(size, seed):
    sign = torch.ones(size, dtype=DOUBLE) * (1.0 if seed % 2 else -1.0)
    return SignedPermutation(torch.randperm(size, generator=rng(seed)), sign)


def rotation(size, seed):
    return OrthogonalMap(Orthogonal(size).sample(1, rng(seed))[0])


def rotation_fixing_ones(size, seed):
    return OrthogonalMap(OrthogonalFixingOnes(size).sample(1, rng(seed))[0])


MAPS = {
    "permutation": permutation,
    "signed permutation": signed_permutation,
    "one sign": globally_signed,
    "rotation": rotation,
    "rotation fixing ones": rotation_fixing_ones,
}
PERMUTATIONS = ["permutation", "signed permutation", "one sign"]
SIZES = st.integers(1, 7)
every_map = pytest.mark.parametrize("name", MAPS)


def close(a, b, terms, scale=1.0):
    return a.shape == b.shape and bool(((a - b).abs() <= tolerance(terms) * scale).all())


def multiplied(matrix, x, dim):
    return torch.tensordot(matrix, x, dims=([1], [dim])).movedim(0, dim)


# -- values ---------------------------------------------------------------------------------------


@every_map
@LAW
@given(size=SIZES, seed=SEEDS)
def test_matrices_are_orthogonal_and_inverses_transposed(name, size, seed):
    stream = MAPS[name](size, seed)
    matrix = stream.matrix()
    assert matrix.dtype == DOUBLE
    assert Orthogonal(size).contains(matrix, tolerance(size))
    assert torch.equal(stream.inverse().matrix(), matrix.mT)
    assert torch.equal(stream.inverse().inverse().matrix(), matrix)


@every_map
@LAW
@given(size=SIZES, seed=SEEDS, dim=st.integers(-3, 2))
def test_along_is_the_product_with_the_matrix(name, size, seed, dim):
    stream, shape = MAPS[name](size, seed), [2, 3, 4]
    shape[dim] = size
    x = normal(rng(seed + 2), *shape)
    moved = stream.along(x, dim)
    expected = multiplied(stream.matrix(), x, dim % 3)
    assert moved.dtype == x.dtype
    assert close(moved, expected, size, float(x.abs().max()))
    assert not stream.exact or torch.equal(moved, expected)


@every_map
@LAW
@given(size=SIZES, seed=SEEDS, dim=st.integers(0, 1))
def test_the_inverse_undoes(name, size, seed, dim):
    stream, x = MAPS[name](size, seed), normal(rng(seed + 2), size, size)
    back = stream.inverse().along(stream.along(x, dim), dim)
    assert close(back, x, size**2, float(x.abs().max()))
    assert not stream.exact or torch.equal(back, x)


@pytest.mark.parametrize("then", MAPS)
@pytest.mark.parametrize("first", MAPS)
@LAW
@given(size=SIZES, seed=SEEDS)
def test_composed_is_one_after_the_other(first, then, size, seed):
    a, b = MAPS[first](size, seed), MAPS[then](size, seed + 7)
    both, x = composed(a, b), normal(rng(seed + 2), 3, size)
    assert close(both.matrix(), b.matrix() @ a.matrix(), size)
    assert close(both.along(x, 1), b.along(a.along(x, 1), 1), size**2, float(x.abs().max()))
    assert both.exact == (a.exact and b.exact)
    assert not both.exact or torch.equal(both.along(x, 1), b.along(a.along(x, 1), 1))


@every_map
@LAW
@given(size=SIZES, seed=SEEDS)
def test_a_map_composed_with_its_inverse_is_the_identity(name, size, seed):
    stream = MAPS[name](size, seed)
    eye = torch.eye(size, dtype=DOUBLE)
    for both in (composed(stream, stream.inverse()), composed(stream.inverse(), stream)):
        assert close(both.matrix(), eye, size)


@pytest.mark.parametrize("name", PERMUTATIONS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64])
def test_permutations_round_nothing(name, dtype):
    stream = MAPS[name](6, 2)
    x = (100 * normal(rng(0), 3, 6)).to(dtype)
    moved = stream.along(x, 1)
    assert moved.dtype == dtype
    assert torch.equal(moved.double(), stream.along(x.double(), 1))
    assert torch.equal(stream.inverse().along(moved, 1), x)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_rotations_keep_the_dtype(dtype):
    stream, x = rotation(6, 0), normal(rng(1), 3, 6).to(dtype)
    moved = stream.along(x, 1)
    assert moved.dtype == dtype
    error = (moved.double() - multiplied(stream.matrix(), x.double(), 1)).abs()
    assert (error <= tolerance(6, dtype) * x.abs().max()).all()


@pytest.mark.parametrize("name", PERMUTATIONS)
@LAW
@given(size=SIZES, seed=SEEDS)
def test_unsigned_legs_follow_a_permutation_without_its_signs(name, size, seed):
    stream, x = MAPS[name](size, seed), normal(rng(seed + 2), size)
    assert torch.equal(stream.along(x, 0, signed=False), x[stream.index])


@pytest.mark.parametrize("name", ["rotation", "rotation fixing ones"])
def test_unsigned_legs_cannot_be_rotated(name):
    stream, x = MAPS[name](4, 0), normal(rng(1), 4, 4)
    with pytest.raises(SymmetryError, match="permutations"):
        stream.along(x, 0, signed=False)
    for pattern in ("e", "f e", "e f", "t ~e"):
        with pytest.raises(SymmetryError, match="permutations"):
            act_stream(stream, x[0] if pattern == "e" else x, Pattern.parse(pattern))


# -- patterns -------------------------------------------------------------------------------------


@every_map
@LAW
@given(size=SIZES, seed=SEEDS)
def test_readers_and_writers_take_the_whole_map(name, size, seed):
    stream = MAPS[name](size, seed)
    q, scale = stream.matrix(), 10.0
    x = normal(rng(seed + 2), 5, size).clamp(-10, 10)
    assert close(act_stream(stream, x, Pattern.parse("v ~e")), x @ q.mT, size, scale)
    writer = x[:4].mT.contiguous()
    assert close(act_stream(stream, writer, Pattern.parse("~e (kv vo)")), q @ writer, size, scale)
    assert close(act_stream(stream, x[0], Pattern.parse("~e")), q @ x[0], size, scale)
    assert close(act_stream(stream, x[0], Pattern.parse("~t")), q @ x[0], size, scale)


@pytest.mark.parametrize("name", PERMUTATIONS)
@LAW
@given(size=SIZES, seed=SEEDS)
def test_dense_layers_of_tied_heads_take_the_map_on_both_sides(name, size, seed):
    stream, x = MAPS[name](size, seed), normal(rng(seed + 2), size, size)
    q = stream.matrix()
    assert torch.equal(act_stream(stream, x, Pattern.parse("~t ~e")), q @ x @ q.mT)
    assert torch.equal(act_stream(stream, x, Pattern.parse("t ~e")), q.abs() @ x @ q.mT)
    assert torch.equal(act_stream(stream, x[0], Pattern.parse("e")), q.abs() @ x[0])
    assert torch.equal(act_stream(stream, x[0], Pattern.parse("t")), q.abs() @ x[0])


def test_rotations_take_both_sides_of_a_dense_layer_too():
    stream, x = rotation(5, 0), normal(rng(1), 5, 5)
    q = stream.matrix()
    expected = q @ x @ q.mT
    found = act_stream(stream, x, Pattern.parse("~t ~e"))
    assert close(found, expected, 25, float(norm(x)))


@every_map
def test_other_axes_are_left_alone(name):
    x = normal(rng(0), 4, 4)
    for pattern in ("f v", "(kv g qk) f", "[f | ~f] v"):
        assert torch.equal(act_stream(MAPS[name](4, 1), x, Pattern.parse(pattern)), x)


# -- cross-Gram matrix ----------------------------------------------------------------------------


def legs_of(seed, size, dtype=DOUBLE, dtype_of_other=None):
    generator = rng(seed)
    shapes = [((5, size), 1), ((size, 3), 0), ((2, size, 3), 1), ((size,), 0), ((11, size), -1)]
    for k, (shape, dim) in enumerate(shapes):
        x, y = normal(generator, *shape).to(dtype), normal(generator, *shape)
        yield x, y.to(dtype_of_other or dtype), dim, 0.5 + k


def dense(legs, size):
    """Sum of weight * x^T y, and the sum of the sizes of its products."""
    gram, products = torch.zeros(2, size, size, dtype=DOUBLE)
    for x, y, dim, weight in legs:
        a, b = (z.double().movedim(dim, -1).reshape(-1, size) for z in (x, y))
        gram = gram + weight * torch.einsum("nx,ny->xy", a, b)
        products = products + weight * torch.einsum("nx,ny->xy", a.abs(), b.abs())
    return gram, products


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 1 << 14])
@LAW
@given(size=SIZES, seed=SEEDS)
def test_cross_gram_is_the_weighted_sum_of_products(rows, size, seed):
    gram, noise = cross_gram(legs_of(seed, size), size, rows)
    expected, products = dense(legs_of(seed, size), size)
    assert gram.shape == (size, size) and gram.dtype == DOUBLE and gram.device.type == "cpu"
    assert ((gram - expected).abs() <= tolerance(11) * products).all()
    assert noise > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", DTYPES)
def test_half_precision_is_raised_before_it_is_multiplied(dtype, other):
    size, rows = 6, 4
    gram, noise = cross_gram(legs_of(3, size, dtype, other), size, rows)
    expected, products = dense(legs_of(3, size, dtype, other), size)
    work = DOUBLE if DOUBLE in (dtype, other) else torch.float32
    assert ((gram - expected).abs() <= tolerance(rows, work, c=2) * products + tolerance(11)).all()
    assert noise < 1e3 * torch.finfo(work).eps * float(products.sum())


def test_noise_is_the_size_of_rounding_errors():
    """Within a small factor above what float32 really loses, at every size of the weights."""
    for scale in (1e-8, 1.0, 1e8):
        x, y = (scale * normal(rng(seed), 4096, 8) for seed in (0, 1))
        legs = [(x.float(), y.float(), 1, 3.0)]
        gram, noise = cross_gram(legs, 8)
        error = gram - dense(legs, 8)[0]
        assert float(torch.linalg.matrix_norm(error, 2)) <= noise
        assert noise <= 1e-3 * float(norm(x) * norm(y))


def test_weights_scale_and_no_legs_are_zero():
    (leg, *_) = legs_of(0, 4)
    one, noise = cross_gram([leg], 4)
    two, twice = cross_gram([(*leg[:3], 2 * leg[3])], 4)
    assert torch.equal(two, 2 * one) and twice == 2 * noise
    nothing, none = cross_gram([], 4)
    assert torch.equal(nothing, torch.zeros(4, 4, dtype=DOUBLE)) and none == 0.0
    empty, none = cross_gram([(torch.zeros(0, 4), torch.zeros(0, 4), 1, 1.0)], 4)
    assert torch.equal(empty, nothing) and none == 0.0


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_are_not_finite_are_refused(side, bad, dtype):
    pair = [normal(rng(k), 9, 4).to(dtype) for k in (0, 1)]
    pair[side][7, 2] = bad
    with pytest.raises(SymmetryError, match="NaN or Inf"):
        cross_gram([(*pair, 1, 1.0)], 4, rows=2)


def test_weights_that_are_too_large_to_square_in_float32_are_not_in_float64():
    x = 1e20 * torch.ones(3, 4)
    gram, noise = cross_gram([(x, x, 1, 1.0)], 4)
    assert torch.allclose(gram, torch.full((4, 4), 3e40, dtype=torch.float64), rtol=1e-6)
    assert 0 < noise <= 4 * torch.finfo(torch.float64).eps * float(gram.norm())


def test_weights_that_are_too_large_to_square_are_refused():
    """An infinite noise would leave every direction undetermined, without a word."""
    x = torch.full((3, 4), 1e200, dtype=torch.float64)
    with pytest.raises(SymmetryError, match="square"):
        cross_gram([(x, x, 1, 1.0)], 4)


# -- solving --------------------------------------------------------------------------------------


def gram_of(planted, size, seed, shift=0.0):
    """Cross-Gram matrix of random tensors and of themselves before a planted map."""
    generator = rng(seed)
    legs = []
    for shape, dim in [((3 * size, size), 1), ((size, 2 * size), 0)]:
        x = normal(generator, *shape)
        y = planted.inverse().along(x, dim)
        row = [1 if k == dim % 2 else n for k, n in enumerate(shape)]
        x, y = (z + shift * normal(generator, *row) for z in (x, y))
        legs.append((x, y, dim, 1.0))
    return cross_gram(legs, size)


@pytest.mark.parametrize("name", PERMUTATIONS)
@LAW
@given(size=SIZES, seed=SEEDS)
def test_planted_permutations_are_found_with_their_signs(name, size, seed):
    planted = MAPS[name](size, seed)
    gram, _ = gram_of(planted, size, seed + 3)
    found = solve_permutation(gram, per_coordinate=True)
    assert torch.equal(found.matrix(), planted.matrix())


@pytest.mark.parametrize("shift", [0.0, 3.0])
@pytest.mark.parametrize("name", ["permutation", "one sign"])
@LAW
@given(size=st.integers(3, 7), seed=SEEDS)
def test_planted_permutations_of_one_sign_are_found_behind_any_mean(name, shift, size, seed):
    planted = MAPS[name](size, seed)
    gram, _ = gram_of(planted, size, seed + 3, shift)
    found = solve_permutation(gram, per_coordinate=False)
    assert torch.equal(found.matrix(), planted.matrix())


@LAW
@given(size=SIZES, seed=SEEDS)
def test_planted_rotations_are_found(size, seed):
    planted = rotation(size, seed)
    gram, noise = gram_of(planted, size, seed + 3)
    found = solve_rotation(gram, noise, fix_ones=False)
    terms = size**2 * float(torch.linalg.cond(gram))
    assert close(found.matrix(), planted.matrix(), terms)


@pytest.mark.parametrize("shift", [0.0, 3.0])
@LAW
@given(size=st.integers(2, 7), seed=SEEDS)
def test_planted_rotations_that_fix_ones_are_found_behind_any_mean(shift, size, seed):
    planted = rotation_fixing_ones(size, seed)
    gram, noise = gram_of(planted, size, seed + 3, shift)
    found = solve_rotation(gram, noise, fix_ones=True)
    spectrum = torch.linalg.svdvals(gram - gram.mean(0) - gram.mean(1)[:, None] + gram.mean())
    condition = (float(norm(gram)) + float(spectrum[0])) / float(spectrum[-2])
    assert close(found.matrix(), planted.matrix(), 4 * size**2 * condition)
    ones = torch.ones(size, dtype=DOUBLE)
    assert close(found.along(ones, 0), ones, size)


@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_a_mean_that_a_norm_sees_does_matter(shift):
    """Negative control: without the constraint, shifted writers lead to another map."""
    planted = rotation_fixing_ones(6, 0)
    gram, noise = gram_of(planted, 6, 1, shift)
    found = solve_rotation(gram, noise, fix_ones=False)
    assert close(found.matrix(), planted.matrix(), 6**2 * 1e3) == (shift == 0.0)


@LAW
@given(size=SIZES, seed=SEEDS, kind=ANY_KIND)
def test_solved_permutations_beat_random_ones(size, seed, kind):
    gram = matrices(kind, seed, size, size)
    atol = tolerance(size**2) * norm(gram)
    top = inner(solve_permutation(gram, per_coordinate=True).matrix(), gram)
    for k in range(200):
        assert inner(signed_permutation(size, seed + 3 * k).matrix(), gram) <= top + atol


@LAW
@given(size=SIZES, seed=SEEDS, kind=ANY_KIND)
def test_solved_permutations_of_one_sign_beat_random_ones(size, seed, kind):
    """Under a layer norm, whose mean is no difference of two models."""
    gram = matrices(kind, seed, size, size)
    centred = gram - gram.mean(0) - gram.mean(1)[:, None] + gram.mean()
    found = solve_permutation(gram, per_coordinate=False)
    assert found.sign.unique().numel() == 1
    top = inner(found.matrix(), centred)
    for k in range(200):
        other = globally_signed(size, seed + k).matrix()
        assert inner(other, centred) <= top + tolerance(size**2) * norm(gram)


@pytest.mark.parametrize("fix_ones", [False, True])
@LAW
@given(size=st.integers(2, 7), seed=SEEDS, kind=ANY_KIND)
def test_solved_rotations_beat_random_ones(fix_ones, size, seed, kind):
    group = (OrthogonalFixingOnes if fix_ones else Orthogonal)(size)
    gram = matrices(kind, seed, size, size)
    found = solve_rotation(gram, 0.0, fix_ones).matrix()
    assert group.contains(found, tolerance(size))
    others = group.sample(200, rng(seed + 1))
    assert (inner(others, gram) <= inner(found, gram) + tolerance(size**2) * norm(gram)).all()


@pytest.mark.parametrize("fix_ones", [False, True])
@LAW
@given(size=st.integers(3, 8), seed=SEEDS, data=st.data())
def test_directions_without_weights_stay_where_they_are(fix_ones, size, seed, data):
    """Models that differ by a rotation of the few directions that their weights span."""
    rank = data.draw(st.integers(1, size - 2))
    first = torch.cat([torch.ones(size, 1), normal(rng(seed), size, size - 1)], 1)
    span = torch.linalg.qr(first).Q[:, 1 : rank + 1]
    turn = Orthogonal(rank).sample(1, rng(seed + 1))[0]
    eye = torch.eye(size, dtype=DOUBLE)
    planted = eye - span @ span.mT + span @ turn @ span.mT
    x = normal(rng(seed + 2), 20, rank) @ span.mT
    gram, noise = cross_gram([(x @ planted.mT, x, 1, 1.0)], size)
    found = solve_rotation(gram, noise, fix_ones).matrix()
    spectrum = torch.linalg.svdvals(gram)[:rank]
    condition = float(spectrum[0] / spectrum[-1])
    assert close(found, planted, 20 * size**2 * condition)


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("size", range(1, 9))
def test_nothing_to_align_is_the_identity(layer_norm, size):
    zero, eye = torch.zeros(size, size, dtype=DOUBLE), torch.eye(size, dtype=DOUBLE)
    assert torch.equal(solve_permutation(zero, not layer_norm).matrix(), eye)
    assert close(solve_rotation(zero, 0.0, layer_norm).matrix(), eye, size)


@pytest.mark.parametrize("fix_ones", [False, True])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_the_scale_of_the_weights_does_not_matter(fix_ones, scale):
    gram = normal(rng(0), 6, 6)
    one = solve_rotation(gram, 0.0, fix_ones).matrix()
    spectrum = torch.linalg.svdvals(gram)
    found = solve_rotation(scale * gram, 0.0, fix_ones).matrix()
    assert close(found, one, 100 * 36 * float(spectrum[0] / spectrum[-1]))
    same = solve_permutation(gram, not fix_ones).matrix()
    assert torch.equal(solve_permutation(scale * gram, not fix_ones).matrix(), same)


# -- rotations that fix the vector of ones --------------------------------------------------------


@LAW
@given(size=SIZES, seed=SEEDS)
def test_samples_that_fix_ones_form_a_group(size, seed):
    group, atol = OrthogonalFixingOnes(size), tolerance(size)
    g, h = group.sample(BATCH, rng(seed)), group.sample(BATCH, rng(seed + 1))
    assert g.shape == (BATCH, size, size) and g.dtype == DOUBLE
    assert group.contains(g, atol)
    assert group.contains(g @ h, atol)
    assert group.contains(g.mT, atol)
    assert group.contains(torch.eye(size, dtype=DOUBLE), 0.0)
    assert Orthogonal(size).contains(g, atol)
    assert torch.equal(g, group.sample(BATCH, rng(seed)))


@LAW
@given(size=st.integers(2, 7), seed=SEEDS)
def test_what_moves_ones_or_is_not_orthogonal_is_not_in_the_group(size, seed):
    group = OrthogonalFixingOnes(size)
    g = group.sample(1, rng(seed))
    assert not group.contains(2 * g, 0.5)
    assert not group.contains(-g, 0.2)
    ones = torch.ones(size, size, dtype=DOUBLE) / size
    assert not group.contains(ones, 0.1)
    assert not group.contains(torch.cat([g, torch.zeros_like(g)]), 0.5)


def test_the_dimension_of_the_group_that_fixes_ones_is_that_of_its_complement():
    assert [OrthogonalFixingOnes(n).freedom for n in range(1, 7)] == [0, 0, 1, 3, 6, 10]
    assert all(OrthogonalFixingOnes(n).freedom == Orthogonal(n - 1).freedom for n in range(1, 7))


@LAW
@given(size=SIZES, seed=SEEDS, kind=ANY_KIND)
def test_projection_that_fixes_ones_is_the_best_of_the_group(size, seed, kind):
    group = OrthogonalFixingOnes(size)
    gram = matrices(kind, seed, BATCH, size, size)
    g, value = group.project(gram), group.value(gram)
    atol = tolerance(size**2) * norm(gram)
    assert g.shape == gram.shape and g.dtype == gram.dtype
    assert group.contains(g, tolerance(size))
    assert ((value - inner(g, gram)).abs() <= atol).all()
    for other in group.sample(16, rng(seed + 1)):
        assert (inner(other, gram) <= value + atol).all()


@LAW
@given(size=SIZES, seed=SEEDS, kind=ANY_KIND)
def test_the_best_value_is_the_nuclear_norm_of_the_complement(size, seed, kind):
    """In a basis of the complement the group is O(n - 1): an independent optimum."""
    gram = matrices(kind, seed, size, size)
    first = torch.cat([torch.ones(size, 1), normal(rng(seed + 1), size, size - 1)], 1)
    basis = torch.linalg.qr(first).Q[:, 1:]
    expected = torch.linalg.svdvals(basis.mT @ gram @ basis).sum() + gram.sum() / size
    error = OrthogonalFixingOnes(size).value(gram) - expected
    assert error.abs() <= tolerance(size**2) * norm(gram)


@LAW
@given(size=SIZES, seed=SEEDS)
def test_projection_that_fixes_ones_keeps_elements_and_is_idempotent(size, seed):
    group = OrthogonalFixingOnes(size)
    g = group.sample(BATCH, rng(seed))
    assert close(group.project(g), g, size)
    best = group.project(normal(rng(seed + 1), BATCH, size, size))
    assert close(group.project(best), best, size)


@LAW
@given(size=SIZES, seed=SEEDS, kind=ANY_KIND)
def test_what_layer_norm_does_not_see_does_not_turn_the_projection(size, seed, kind):
    group, generator = OrthogonalFixingOnes(size), rng(seed + 1)
    gram = matrices(kind, seed, size, size)
    scale = float(norm(gram)) if kind != "zero" else 1.0
    row, column = scale * normal(generator, 1, size), scale * normal(generator, size, 1)
    shifted = gram + row + column
    value, same = (inner(group.project(m), gram) for m in (gram, shifted))
    assert (value - same).abs() <= tolerance(size**2) * (norm(gram) + norm(shifted))


@LAW
@given(size=SIZES, seed=SEEDS, kind=ANY_KIND)
def test_batched_projection_that_fixes_ones_is_looped(size, seed, kind):
    group = OrthogonalFixingOnes(size)
    gram = matrices(kind, seed, 2, 3, size, size)
    looped = torch.stack([torch.stack([inner(group.project(m), m) for m in row]) for row in gram])
    batched = inner(group.project(gram), gram)
    assert ((batched - looped).abs() <= tolerance(size**2) * norm(gram)).all()


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_projection_that_fixes_ones_keeps_the_dtype(dtype):
    group = OrthogonalFixingOnes(5)
    g = group.project(normal(rng(0), BATCH, 5, 5).to(dtype))
    assert g.dtype == dtype
    assert group.contains(g, tolerance(5, dtype))
