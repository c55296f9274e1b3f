"""Laws of the maps of the residual stream, and of transformations as values."""

import pytest
import torch

from mergekit_rotation.symmetry import (
    ModelTransformation,
    Norm,
    Orthogonal,
    OrthogonalFixingOnes,
    OrthogonalMap,
    Pattern,
    Permute,
    SignedPermutation,
    StreamLayout,
    SymmetryError,
    act_stream,
    chance_share,
    composed,
    cross_gram,
    into_stream,
    out_of_stream,
    solve_permutation,
    solve_rotation,
    target_norm,
)

D = 12
EPS = torch.finfo(torch.float64).eps


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def permutation(seed=0, one_sign=False):
    g = generator(seed)
    sign = 2.0 * torch.randint(2, (D,), generator=g).double() - 1
    return SignedPermutation(torch.randperm(D, generator=g), -sign.abs() if one_sign else sign)


def rotation(seed=0, group=Orthogonal):
    return OrthogonalMap(group(D).sample(1, generator(seed))[0])


def normal(*shape, seed=1):
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def close(a, b, terms=D):
    return bool(((a - b).abs() <= 8 * terms * EPS * (1 + b.abs().max())).all())


MAPS = [permutation(1), rotation(2), rotation(3, OrthogonalFixingOnes)]


@pytest.mark.parametrize("stream", MAPS)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_map_multiplies_by_its_matrix_along_any_dimension(stream, dim):
    shape = [3, 4, 5]
    shape[dim] = D
    x = normal(*shape)
    expected = (stream.matrix() @ x.movedim(dim, 0).flatten(1)).view(x.movedim(dim, 0).shape)
    assert close(stream.along(x, dim), expected.movedim(0, dim))
    assert close(stream.inverse().along(stream.along(x, dim), dim), x)


@pytest.mark.parametrize("first", MAPS)
@pytest.mark.parametrize("then", MAPS)
def test_composition_is_the_product_of_the_matrices(first, then):
    assert close(composed(first, then).matrix(), then.matrix() @ first.matrix())


def test_legs_without_signs_follow_permutations_only():
    stream, x = permutation(4), normal(D)
    assert torch.equal(act_stream(stream, x, Pattern.parse("e")), x[stream.index])
    assert torch.equal(act_stream(stream, x, Pattern.parse("~e")), stream.sign * x[stream.index])
    both = act_stream(stream, normal(D, D), Pattern.parse("t ~e"))
    assert torch.equal(both, (stream.sign * normal(D, D)[:, stream.index])[stream.index])
    with pytest.raises(SymmetryError):
        act_stream(rotation(), x, Pattern.parse("e"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_cross_gram_matrix_does_not_depend_on_how_rows_are_cut(dtype):
    x, y = normal(50, D).to(dtype), normal(50, D, seed=2).to(dtype)
    exact = x.double().mT @ y.double()
    for rows in (7, 50, 1000):
        gram, noise = cross_gram([(x, y, 1, 1.0), (x.mT, y.mT, 0, 2.0)], D, rows)
        assert ((gram - 3 * exact).abs() <= 4 * noise + 8 * 50 * EPS * exact.abs().max()).all()
    with pytest.raises(SymmetryError):
        cross_gram([(x * float("nan"), y, 1, 1.0)], D)


@pytest.mark.parametrize("seed", range(5))
def test_planted_maps_are_found(seed):
    x = normal(40, D)
    for planted, per_coordinate in ((permutation(seed), True), (permutation(seed, True), False)):
        moved = planted.inverse().along(x, 1)
        gram, _ = cross_gram([(x, moved, 1, 1.0)], D)
        found = solve_permutation(gram, per_coordinate)
        assert torch.equal(found.index, planted.index)
        assert torch.equal(found.sign, planted.sign)
    for group in (Orthogonal, OrthogonalFixingOnes):
        planted = rotation(seed, group)
        gram, noise = cross_gram([(x, planted.inverse().along(x, 1), 1, 1.0)], D)
        found = solve_rotation(gram, noise, group is OrthogonalFixingOnes)
        assert close(found.q, planted.q, 40 * D)


def test_what_a_layer_norm_does_not_see_does_not_matter():
    x, planted = normal(40, D), rotation(6, OrthogonalFixingOnes)
    shifted = planted.inverse().along(x, 1) + 5 * normal(40, 1, seed=9)
    gram, noise = cross_gram([(x, shifted, 1, 1.0)], D)
    assert close(solve_rotation(gram, noise, True).q, planted.q, 400 * D)


def test_rotations_that_fix_the_ones_are_the_best_of_their_group():
    group, gram = OrthogonalFixingOnes(D), normal(D, D)
    best = group.project(gram)
    assert group.contains(best, 8 * D * EPS)
    assert close(group.project(best), best, D * D)
    for g in group.sample(200, generator(8)):
        assert group.contains(g, 8 * D * EPS)
        assert (g * gram).sum() <= (best * gram).sum() + 8 * D * D * EPS


def test_undetermined_directions_stay():
    x = normal(3, D)
    gram, noise = cross_gram([(x, x, 1, 1.0)], D)
    assert close(solve_rotation(gram, noise, False).q, torch.eye(D, dtype=torch.float64), 100)


def test_chance_explains_the_share_that_was_fitted():
    assert chance_share(0, 100) == 0
    assert chance_share(50, 10) == 0.5
    assert chance_share(66, 10**5) < chance_share(66, 10**4)
    group, rows = Orthogonal(D), 400
    for seed in range(50):
        x, y = normal(rows, D, seed=seed), normal(rows, D, seed=seed + 1000)
        share = chance_share(group.freedom, x.numel())
        noisy = x + 0.1 * y  # the same coordinates
        g = group.project(x.mT @ noisy)
        before, after = ((x - z).square().sum() for z in (noisy, noisy @ g.mT))
        assert before - after <= share * before


# -- norms and their readers -----------------------------------------------------------------------


def branch(tensors, layer_norm, x, offset=0.0):
    """Return what a branch reads and writes: W2 (W1 norm(x) + c1)."""
    y = x - x.mean(-1, keepdim=True) if layer_norm else x
    y = y / y.square().mean(-1, keepdim=True).sqrt()
    y = y * (tensors["norm.weight"] + offset) + tensors.get("norm.bias", 0.0)
    inner = y @ tensors["in.weight"].mT + tensors.get("in.bias", 0.0)
    return inner @ tensors["out.weight"].mT


PATTERNS = {
    "norm.weight": "e",
    "norm.bias": "~e",
    "in.weight": "f ~e",
    "out.weight": "~e f",
}


def layout(layer_norm, offset=0.0, carried=False):
    return StreamLayout(
        patterns={name: Pattern.parse(text) for name, text in PATTERNS.items()},
        readers={"norm.weight": ("in.weight",)},
        layer_norm=layer_norm,
        offset=offset,
        carried=frozenset(["norm.weight"] if carried else []),
    )


def tensors(layer_norm, bias, seed=0):
    state = {
        "norm.weight": 1 + 0.3 * normal(D, seed=seed),
        "in.weight": normal(7, D, seed=seed + 1),
        "out.weight": normal(D, 7, seed=seed + 2),
    }
    if layer_norm:
        state["norm.bias"] = normal(D, seed=seed + 3)
    if bias:
        state["in.bias"] = normal(7, seed=seed + 4)
    return state


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("layer_norm", "stream"),
    [(False, MAPS[0]), (False, MAPS[1]), (True, permutation(5, True)), (True, MAPS[2])],
)
@pytest.mark.parametrize("with_reference", [True, False])
def test_a_branch_computes_the_same_in_new_coordinates(
    layer_norm, stream, bias, offset, with_reference
):
    shape = layout(layer_norm, offset, carried=layer_norm and not bias)
    mine, theirs = tensors(layer_norm, bias), tensors(layer_norm, bias, seed=20)
    own = shape.norm("norm.weight", mine)
    reference = shape.norm("norm.weight", theirs) if with_reference else None
    targets = {"norm.weight": target_norm(own, reference, stream)}
    inside = into_stream(mine, mine, shape, stream)
    moved = out_of_stream(inside, mine, mine, shape, stream, targets)
    assert set(moved) == set(mine)
    if with_reference:
        assert torch.equal(moved["norm.weight"], theirs["norm.weight"] + offset - offset)
    x = normal(9, D, seed=30)
    expected = stream.along(branch(mine, layer_norm, x, offset), 1)
    found = branch(moved, layer_norm, stream.along(x, 1), offset)
    assert (found - expected).abs().max() <= 1e3 * D * EPS * expected.abs().max()


def test_what_stands_behind_a_zero_weight_is_kept_by_a_permutation():
    shape, mine, stream = layout(False), tensors(False, False), permutation(3)
    mine["norm.weight"][:3] = 0.0
    own = shape.norm("norm.weight", mine)
    there = Norm(stream.along(own.weight, 0, signed=False))
    inside = into_stream(mine, mine, shape, stream)
    moved = out_of_stream(inside, mine, mine, shape, stream, {"norm.weight": there})
    expected = stream.along(mine["in.weight"], 1)
    behind = there.weight == 0
    assert behind.any()
    assert torch.equal(moved["in.weight"][:, behind], expected[:, behind])


def test_a_rotation_puts_small_weights_in_the_place_of_zeros():
    own, reference = Norm(torch.ones(D).double()), Norm(torch.ones(D).double())
    reference.weight[2] = 0.0
    target = target_norm(own, reference, rotation())
    assert 0 < target.weight[2] < 1e-3
    assert (target.weight[3:] == 1).all()


def test_a_bias_behind_a_zero_weight_cannot_be_carried():
    shape, mine, stream = layout(True, carried=True), tensors(True, False), MAPS[2]
    mine["norm.weight"][0] = 0.0
    targets = {"norm.weight": target_norm(shape.norm("norm.weight", mine), None, stream)}
    inside = into_stream(mine, mine, shape, stream)
    with pytest.raises(SymmetryError, match="bias"):
        out_of_stream(inside, mine, mine, shape, stream, targets)


def test_names_that_are_needed():
    shape = layout(True)
    assert set(shape.needed(["in.bias"])) == {"in.bias", "in.weight", "norm.weight", "norm.bias"}
    assert shape.needed(["out.weight"]) == ["out.weight"]
    assert layout(False).needed(["in.weight"]) == ["in.weight", "norm.weight"]


# -- transformations as values ---------------------------------------------------------------------


def value(stream, seed, a, b):
    order = torch.randperm(7, generator=generator(seed))
    norms = {("norm.weight", a, b): Norm(1 + 0.1 * normal(D, seed=seed).abs())}
    return ModelTransformation(stream, norms, {("neurons", a, b): (Permute("f", order),)})


@pytest.mark.parametrize("streams", [(MAPS[0], permutation(7)), (MAPS[0], MAPS[1]), (MAPS[1],) * 2])
def test_transformations_are_composed_and_undone(streams):
    first, second = value(streams[0], 1, a=2, b=5), value(streams[1], 2, a=0, b=2)
    both = first.then(second)
    assert close(both.stream.matrix(), streams[1].matrix() @ streams[0].matrix())
    (element,) = (e.index for e in both.blocks["neurons", 0, 5][:1])
    assert torch.equal(element, first.blocks["neurons", 2, 5][0].index)
    assert len(both.blocks["neurons", 0, 5]) == 2
    back = first.inverse({("norm.weight", 5, 2): Norm(torch.ones(D).double())})
    identity = first.then(back)
    assert close(identity.stream.matrix(), torch.eye(D, dtype=torch.float64))
    elements = identity.blocks["neurons", 5, 5]
    assert torch.equal(elements[0].index[elements[1].index], torch.arange(7))
