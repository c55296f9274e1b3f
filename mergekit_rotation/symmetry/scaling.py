"""Aligning models up to invertible changes of coordinates that are not orthogonal.

Where a layer uses the product of two factors (queries and keys, values and outputs, the two sides
of a neuron), any invertible map of the coordinates between them leaves the product unchanged.
Both models are brought to the coordinates in which their factors are equally large (`balance`);
there only an orthogonal map is left between models with equal products, and the usual solvers
find it. The reference's own balancing is undone at the end, so the reference never moves.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from mergekit_rotation.symmetry.action import Linear, Permute, Rotate, Scale, Transformation, act
from mergekit_rotation.symmetry.attention import AttentionLayout
from mergekit_rotation.symmetry.axes import Pattern
from mergekit_rotation.symmetry.chance import chance_share
from mergekit_rotation.symmetry.experts import ExpertLayout
from mergekit_rotation.symmetry.factorisation import eigenvalues
from mergekit_rotation.symmetry.groups import Group, inner
from mergekit_rotation.symmetry.neurons import NeuronLayout
from mergekit_rotation.symmetry.precision import working_dtype
from mergekit_rotation.symmetry.vectors import row_sums

Tensors = Mapping[str, torch.Tensor]
Solver = Callable[[Tensors, Tensors], Transformation]

#: Rounding error of a squared distance, added up in float64, as a share of the squares.
SUMS = 16 * torch.finfo(torch.float64).eps

#: How often rotation and scale of a head are improved in turn; the gain falls geometrically.
SWEEPS = 16


def best_scale(
    p: torch.Tensor, u: torch.Tensor, q: torch.Tensor, v: torch.Tensor, power: int = 1
) -> torch.Tensor:
    """Return the s > 0 that minimises p s^2 - 2 u s + q s^-2m - 2 v s^-m, entry by entry.

    With p = |x'|^2, u = <x, x'>, q = |y'|^2, v = <y, y'> and m = ``power`` that is the distance of
    (s x', s^-m y') from (x, y). The stationary points are roots of
    p s^(2m+2) - u s^(2m+1) + m v s^m - m q, found as eigenvalues of its companion matrix.

    Parameters
    ----------
    p, u, q, v : Tensor, all of the same shape
    power : int

    Returns
    -------
    Tensor
        float64; 1 where p or q is 0.
    """
    p, u, q, v = (x.double() for x in (p, u, q, v))
    alive = (p > 0) & (q > 0)
    one = torch.ones_like(p)
    p, q = torch.where(alive, p, one), torch.where(alive, q, one)
    degree = 2 * power + 2
    unit = (q / p) ** (1 / degree)  # in which the coefficients are of one size
    size = p * unit**2
    u, v = u * unit / size, v * unit**-power / size
    matrix = torch.diag_embed(torch.ones(degree - 1, dtype=p.dtype, device=p.device), offset=-1)
    matrix = matrix.repeat(*p.shape, 1, 1)
    matrix[..., 0, -1] = power
    matrix[..., power, -1] = -power * v
    matrix[..., degree - 1, -1] += u
    roots = eigenvalues(matrix)
    roots = torch.cat([roots, one[..., None]], dim=-1)
    positive = roots > 0
    s = torch.where(positive, roots, torch.ones_like(roots))
    cost = s**2 - 2 * u[..., None] * s + s ** (-2 * power) - 2 * v[..., None] * s**-power
    best = s.gather(-1, cost.argmin(-1, keepdim=True))[..., 0]
    return torch.where(alive, best * unit, one)


# -- heads -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Products:
    """Gram matrices of the legs with exponents 1 and -1, (2, kv, n, n), float64."""

    reference: torch.Tensor
    cross: torch.Tensor
    other: torch.Tensor

    def distance(self, pair: torch.Tensor) -> torch.Tensor:
        """Squared distance of each head when other is moved by (A, A^-T) = ``pair``, (kv,)."""
        square = inner(pair @ self.other, pair) - 2 * inner(pair, self.cross)
        return (square + self.reference.diagonal(dim1=-2, dim2=-1).sum(-1)).sum(0)


def solve_scaled_attention(
    reference: Tensors,
    other: Tensors,
    layout: AttentionLayout,
    solve: Solver,
    stored: torch.dtype,
    *,
    closest: bool = False,
) -> Transformation:
    """Align heads by invertible maps: `solve` as it is, and in balanced coordinates.

    Each head takes the closest of: the rotation that ``solve`` found, the rotation and common
    scale (one per frequency pair under rotary embedding) that are optimal together, and the map
    that undoes the balancing of both models; a map that is not orthogonal only where it gains more
    than fitting as many numbers to unstructured differences would, and more than rounding the
    moved weights costs.

    Parameters
    ----------
    reference, other : mapping of tensor name to Tensor
    layout : AttentionLayout
        With the groups that may be used.
    solve : callable
        Aligns by permutations and orthogonal maps, as `solve_attention` does.
    stored : torch.dtype
        Precision of the moved tensors.
    closest : bool
        Take the closest map whether its gain could be chance or not.

    References
    ----------
    arXiv 2502.00264 (rescaling after rotation; here both are optimal together).
    """
    sides = [_balanced(side, layout) for side in (reference, other)]
    candidates = [
        _fitted(reference, other, layout, solution, None if closest else stored)
        for solution in (solve(reference, other), solve(*sides))
    ]
    return min(candidates, key=lambda candidate: candidate[0])[1]


def _axes(layout: AttentionLayout) -> dict[str, Group]:
    """Return the groups that allow for scaling, by axis."""
    groups = {"qk": layout.query_key, "vo": layout.value_output}
    powers = [one for pattern in layout.patterns.values() for one in pattern.powers]
    return {a: g for a, g in groups.items() if g.cells and any(a in one for one in powers)}


def _balanced(tensors: Tensors, layout: AttentionLayout) -> dict[str, torch.Tensor]:
    """Return a model's legs in balanced coordinates."""
    gauge = []
    for axis, group in _axes(layout).items():
        matrix = group.balance(*_gram(tensors, tensors, layout, axis))
        gauge.append(Linear(axis, matrix, torch.linalg.inv(matrix).mT, "kv"))
    return _moved(tuple(gauge), tensors, layout)


def _fitted(
    reference: Tensors,
    other: Tensors,
    layout: AttentionLayout,
    solution: Transformation,
    stored: torch.dtype | None,
) -> tuple[float, Transformation]:
    """Return a solution with its rotations replaced by the closest maps, and its distance.

    Maps that are not orthogonal have to pay, unless ``stored`` is None.
    """
    fixed = tuple(e for e in solution if isinstance(e, Permute))
    found = {e.axis: e for e in solution if isinstance(e, Rotate)}
    other = _moved(fixed, other, layout)
    result: list[Rotate | Linear] = []
    for axis, group in _axes(layout).items():
        products = _Products(
            _gram(reference, reference, layout, axis),
            _gram(reference, other, layout, axis),
            _gram(other, other, layout, axis),
        )
        eye = torch.eye(group.n, dtype=torch.float64, device=products.cross.device)
        rotation = (
            found[axis].matrix.double() if axis in found else eye.expand_as(products.cross[0])
        )
        first = torch.stack([rotation, rotation])
        options = torch.stack([first, _jointly(group, rotation, products)])
        options = torch.cat([options, _unbalanced(group, rotation, products)[None]])
        distances = torch.stack([products.distance(pair) for pair in options])
        needed = torch.zeros_like(distances)
        if stored is not None:
            entries = _entries(reference, other, layout, axis)
            square = products.other.diagonal(dim1=-2, dim2=-1).sum((0, -1))
            for k, freedom in enumerate((len(group.cells), group.freedom + group.stretches), 1):
                needed[k] = chance_share(freedom, entries) * distances[0].clamp(min=0)
                needed[k] += (torch.finfo(stored).eps ** 2 / 12 + SUMS) * square
        pays = distances[0] - distances >= needed
        choice = torch.where(pays, distances, torch.inf).argmin(0)
        if not bool(choice.any()):
            continue
        pair = options[choice, :, torch.arange(len(choice), device=choice.device)]
        found.pop(axis, None)
        result.append(Linear(axis, pair[:, 0], pair[:, 1], "kv"))
    transformation = (*fixed, *found.values(), *result)
    moved = _moved((*found.values(), *result), other, layout)
    return _distance(reference, moved, layout), transformation


def _entries(reference: Tensors, other: Tensors, layout: AttentionLayout, axis: str) -> int:
    """Return how many numbers of a head a map of an axis multiplies."""
    return sum(
        piece.tensor.numel() // layout.sizes["kv"]
        for name in reference
        if name in other
        for piece in layout.patterns[name].split(other[name], layout.sizes)
        if axis in piece.powers
    )


def _unbalanced(group: Group, rotation: torch.Tensor, products: _Products) -> torch.Tensor:
    """Balance the other model, rotate, undo the reference's balancing: (A, A^-T)."""
    own, theirs = (group.balance(*side) for side in (products.reference, products.other))
    matrix = torch.linalg.solve(own, rotation @ theirs)
    return torch.stack([matrix, torch.linalg.inv(matrix).mT])


def _jointly(group: Group, rotation: torch.Tensor, products: _Products) -> torch.Tensor:
    """Best rotation and scale per cell together, by turns from a rotation: (A, A^-T)."""
    cells = torch.zeros(len(group.cells), group.n, dtype=torch.float64, device=rotation.device)
    for number, cell in enumerate(group.cells):
        cells[number, list(cell)] = 1
    free = cells.sum(0)
    p, q = products.other.diagonal(dim1=-2, dim2=-1) @ cells.mT
    scale = torch.ones_like(rotation[..., 0])
    for _ in range(SWEEPS):
        u, v = (rotation * products.cross).sum(-1) @ cells.mT
        scale = best_scale(p, u, q, v) @ cells + (1 - free)
        gram = scale[..., None] * products.cross[0] + products.cross[1] / scale[..., None]
        rotation = group.project(gram)
    return torch.stack([scale[..., None] * rotation, rotation / scale[..., None]])


def _gram(a: Tensors, b: Tensors, layout: AttentionLayout, axis: str) -> torch.Tensor:
    """Gram matrices of the legs with exponent 1 and with exponent -1, (2, kv, n, n), float64."""
    n, kv = layout.sizes[axis], layout.sizes["kv"]
    device = next(iter(a.values())).device
    result = torch.zeros(2, kv, n, n, dtype=torch.float64, device=device)
    for name, pattern in layout.patterns.items():
        if name not in a or name not in b:
            continue
        split = (pattern.split(side[name], layout.sizes) for side in (a, b))
        for x, y in zip(*split, strict=True):
            power, per, dim = x.powers.get(axis), x.dim("kv"), x.dim(axis)
            if power is None or per is None or dim is None:
                continue
            rows = [z.tensor.movedim((per, dim), (0, 1)).reshape(kv, n, -1) for z in (x, y)]
            for head, (one, two) in enumerate(zip(*rows, strict=True)):
                result[0 if power > 0 else 1, head] += one.double() @ two.double().mT
    return result


# -- neurons ---------------------------------------------------------------------------------------


def solve_scaled_neurons(
    reference: Tensors, other: Tensors, layout: NeuronLayout | ExpertLayout, solve: Solver
) -> Transformation:
    """Align neurons with a positive factor for each: `solve` as it is, and in balanced coordinates.

    Given an order and signs, the best factor of every neuron has a closed form (`best_scale`).

    Parameters
    ----------
    reference, other : mapping of tensor name to Tensor
    layout : NeuronLayout or ExpertLayout
    solve : callable
        Aligns by permutations and signs, as `solve_neurons` and `solve_experts` do.
    """
    powers = _exponents(layout)
    plain = solve(reference, other)
    if not powers:
        return plain
    power, per = -min(powers), "x" if isinstance(layout, ExpertLayout) else None
    sides = []
    for side in (reference, other):
        up, down = _overlaps(side, side, layout, per)
        alive = (up > 0) & (down > 0)
        ratio = torch.where(alive, down / up, torch.ones_like(up))
        sides.append(_moved((Scale("f", ratio ** (1 / (2 * power + 2)), per),), side, layout))
    best: tuple[float, Transformation] = (float("inf"), ())
    for solution in (plain, solve(sides[0], sides[1])):
        moved = _moved(solution, other, layout)
        (p, q), (u, v) = (_overlaps(x, moved, layout, per) for x in (moved, reference))
        factor = best_scale(p, u, q, v, power)
        gain = (p - 2 * u + q - 2 * v) - (
            factor**2 * p - 2 * factor * u + factor ** (-2 * power) * q - 2 * factor**-power * v
        )
        one, two = _overlaps(reference, reference, layout, per)
        distance = (one + two + p + q - 2 * u - 2 * v).clamp(min=0)
        entries = sum(x.numel() for x in reference.values()) // factor.numel()
        # Rounding: that of numbers in the other model's dtype, and of the gain's terms in float64.
        eps = max(torch.finfo(x.dtype).eps for x in other.values())
        cost = chance_share(1, entries) * distance + (eps**2 + SUMS) * (p + q)
        factor = torch.where(gain > cost, factor, torch.ones_like(factor))
        scaling = (Scale("f", factor, per),) if bool((factor != 1).any()) else ()
        total = _distance(reference, _moved(scaling, moved, layout), layout)
        if total < best[0]:
            best = total, (*solution, *scaling)
    return best[1]


def _exponents(layout: NeuronLayout | ExpertLayout) -> set[int]:
    """Return the exponents of all legs that have one."""
    powers = (one for pattern in layout.patterns.values() for one in pattern.powers)
    return {k for one in powers for k in one.values()}


def _overlaps(
    a: Tensors, b: Tensors, layout: NeuronLayout | ExpertLayout, per: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inner products of every neuron over legs with exponents above and below 0."""
    totals: list[torch.Tensor | None] = [None, None]
    for name, pattern in layout.patterns.items():
        if name not in a or name not in b:
            continue
        split = (pattern.split(side[name], layout.sizes) for side in (a, b))
        for x, y in zip(*split, strict=True):
            power, dim = x.powers.get("f"), x.dim("f")
            if power is None or dim is None:
                continue
            lead = [k for k in (None if per is None else x.dim(per), dim) if k is not None]
            one, two = (z.tensor.movedim(lead, [*range(len(lead))]) for z in (x, y))
            shape = one.shape[: len(lead)]
            one, two = (z.reshape(shape.numel(), -1) for z in (one, two))
            product = row_sums(one, two, torch.float64)[2].view(shape)
            side = 0 if power > 0 else 1
            before = totals[side]
            totals[side] = product if before is None else before + product
    assert totals[0] is not None and totals[1] is not None
    return totals[0], totals[1]


# -- what is left undone ----------------------------------------------------------------------


def same_products(reference: Tensors, other: Tensors, layout: "_Layout") -> bool:
    """Tell whether the products of all pairs of factors could be equal, whatever their order.

    Rounding X and Y of a product to eps moves its singular values by 2 eps |X| |Y| at most
    (Mirsky), and that of a neuron by as much per factor; what agrees better is taken as equal.

    Returns
    -------
    bool
        False where no factors can be scaled.
    """
    eps = max(torch.finfo(x.dtype).eps for x in (*reference.values(), *other.values()))
    if isinstance(layout, AttentionLayout):
        axes = _axes(layout).items()
        return bool(axes) and all(
            _same_heads(reference, other, layout, axis, group, eps) for axis, group in axes
        )
    powers = _exponents(layout)
    if not powers:
        return False
    per = "x" if isinstance(layout, ExpertLayout) else None
    sizes = []
    for side in (reference, other):
        up, down = _overlaps(side, side, layout, per)
        sizes.append((up ** -min(powers) * down).sqrt().flatten().sort().values)
    error = 2 * (1 - min(powers)) * eps * sizes[0]
    return bool(((sizes[0] - sizes[1]).abs() <= error).all())


def _same_heads(
    reference: Tensors,
    other: Tensors,
    layout: AttentionLayout,
    axis: str,
    group: Group,
    eps: float,
) -> bool:
    """Tell whether the products on one axis of the heads could be equal, whatever their order."""
    sizes, errors = [], []
    for side in (reference, other):
        s, t = _gram(side, side, layout, axis)
        values = group.invariants(s, t)
        order = values.sum(-1).argsort()
        norms = (x.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt() for x in (s, t))
        sizes.append(values[order])
        errors.append((2 * eps * next(norms) * next(norms))[order])
    return bool(((sizes[0] - sizes[1]).norm(dim=-1) <= errors[0] + errors[1]).all())


# -- both ------------------------------------------------------------------------------------------

_Layout = AttentionLayout | NeuronLayout | ExpertLayout


def _moved(
    transformation: Transformation, side: Tensors, layout: _Layout
) -> dict[str, torch.Tensor]:
    """Apply a transformation to the legs of a model, in the working dtype."""
    result = {}
    for name, x in side.items():
        pattern: Pattern | None = layout.patterns.get(name)
        if pattern is not None:
            x = act(transformation, x.to(working_dtype(x.dtype)), pattern, layout.sizes)
        result[name] = x
    return result


def _distance(reference: Tensors, other: Tensors, layout: _Layout) -> float:
    """Squared distance of the legs that both models have."""
    return sum(
        float((reference[n].to(other[n].dtype) - other[n]).double().square().sum())
        for n in layout.patterns
        if n in reference and n in other
    )
