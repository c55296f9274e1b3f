"""Aligning the heads of one attention layer.

Axes: ``kv`` key/value heads, ``g`` query heads inside a key/value group, ``qk`` and ``vo`` the
dimensions of a head that queries share with keys and values share with the output projection.
One matrix per key/value head acts on ``qk``, another on ``vo``; groups are permuted among
themselves, and query heads inside their group.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from mergekit_rotation.symmetry.action import Element, Permute, Rotate, Transformation
from mergekit_rotation.symmetry.assignment import lazy_assignment, linear_assignment
from mergekit_rotation.symmetry.axes import Pattern, Piece
from mergekit_rotation.symmetry.groups import Group, Trivial, inner
from mergekit_rotation.symmetry.precision import working_dtype

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class AttentionLayout:
    """Where the heads of a layer are stored, and which groups act on them.

    Parameters
    ----------
    patterns : mapping of tensor name to Pattern
    sizes : mapping of axis name to int
        ``kv``, ``qk``, ``vo`` and, for grouped queries, ``g``; and the axes of the stream.
    query_key, value_output : Group
        What acts on ``qk`` and on ``vo``, one element per key/value head.
    """

    patterns: Mapping[str, Pattern]
    sizes: Mapping[str, int]
    query_key: Group
    value_output: Group


def solve_attention(
    reference: Tensors,
    other: Tensors,
    layout: AttentionLayout,
    *,
    query_key: bool = True,
    value_output: bool = True,
    heads: bool = True,
    stored: torch.dtype | None = None,
) -> Transformation:
    """Find the transformation of ``other`` that brings its heads closest to the reference's.

    Maximises sum over legs of <reference, g . other> over head permutations and the groups of
    the layout. For a given pair of heads the best rotation has a closed form; the permutation of
    groups is a linear assignment over these optima. With several query heads per group, their
    order and the common rotation are found by alternation, started from the identity and from
    the rotation that key and value heads alone ask for; each step can only raise the objective.

    A head is rotated only where that brings it closer by more than storing the rotated numbers
    in ``stored`` will move them by rounding, and by more than twice what fitting a rotation to
    unstructured differences gains on average: p of N numbers fitted explain p/N of their
    energy. So models in the same coordinates stay there. Ties and directions that the weights do
    not determine (dead or rank-deficient heads) resolve to the identity.

    Parameters
    ----------
    reference, other : mapping of tensor name to Tensor
        The names of ``layout.patterns``; a name that either side lacks does not take part.
    query_key, value_output, heads : bool
        Which freedoms may be used.
    stored : torch.dtype, optional
        Precision of the moved tensors; by default that of the inputs.

    Returns
    -------
    tuple of elements
        Empty if nothing moves. Computed in float32 or better.

    References
    ----------
    "Beyond the Permutation Symmetry of Transformers: The Role of Rotation for Model Fusion",
    arXiv 2502.00264, section 3 (rotations in closed form, one per head).
    """
    return _Solver(reference, other, layout, query_key, value_output, heads, stored).solve()


@dataclass
class _Axis:
    """Cross-Gram matrices of one head axis, in the working dtype."""

    group: Group
    shared: torch.Tensor  # (a, b, d, d): legs without query axis (keys, values)
    query: torch.Tensor | None  # (a, b, i, j, d, d): legs of query head i of a and j of b
    norm_ref: torch.Tensor  # (kv,) Frobenius norms over all legs
    norm_other: torch.Tensor
    length: int  # number of products summed into one entry
    entries: int  # number of weights per key/value head

    def gram(self, a: torch.Tensor, b: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """M of the pairs (a, b), each of shape (k,), with query heads in ``order`` (k, m)."""
        gram = self.shared[a, b]
        if self.query is not None:
            i = torch.arange(order.shape[1], device=a.device)
            gram = gram + self.query[a[:, None], b[:, None], i, order].sum(1)
        return gram.double() + self._slack(a, b)

    def _slack(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Multiple of the identity at the level of the rounding errors of M.

        Adding it leaves what the weights determine as it is and makes the projection choose the
        identity in the directions that they do not determine.
        """
        d = self.group.n
        scale = self.norm_ref[a] * self.norm_other[b]
        noise = 4 * torch.finfo(self.shared.dtype).eps * d**-0.5 * scale
        noise = noise.double() + torch.finfo(torch.float64).tiny
        return noise[:, None, None] * torch.eye(d, dtype=torch.float64, device=a.device)

    def rotation(
        self, a: torch.Tensor, b: torch.Tensor, order: torch.Tensor, stored: torch.dtype
    ) -> torch.Tensor:
        """Best element for each pair, or the identity where moving does not pay; (k, d, d)."""
        gram = self.gram(a, b, order)
        g = self.group.project(gram)
        eye = torch.eye(self.group.n, dtype=g.dtype, device=g.device)
        # Decrease of the squared distance, 2 <g - 1, M>, written without cancellation: at the
        # optimum g^T M is symmetric on the group's algebra and (g - 1)^T (g - 1) = 2 - g - g^T.
        gain = inner((g - eye).mT @ (g - eye), g.mT @ gram)
        # Mean square of a rounding error is at most (eps |x|)^2 / 12 per entry.
        rounding = 0.0 if self.group.exact else torch.finfo(stored).eps ** 2 / 12
        # The gain is of second order in the errors of M once the slack is added.
        noise = self.length * torch.finfo(self.shared.dtype).eps ** 2
        cost = rounding * self.norm_other[b] ** 2 + noise * self.norm_ref[a] * self.norm_other[b]
        # What fitting as many numbers to differences without any structure would gain, twice.
        square = self.norm_ref[a] ** 2 + self.norm_other[b] ** 2
        distance = square.double() - 2 * gram.diagonal(dim1=-2, dim2=-1).sum(-1)
        chance = 2 * self.group.freedom / max(self.entries, 1) * distance.clamp(min=0)
        keep = (gain > cost.double() + chance)[:, None, None]
        return torch.where(keep, g, eye)


class _Solver:
    def __init__(
        self,
        reference: Tensors,
        other: Tensors,
        layout: AttentionLayout,
        query_key: bool,
        value_output: bool,
        heads: bool,
        stored: torch.dtype | None,
    ) -> None:
        self.sizes = layout.sizes
        self.kv = layout.sizes["kv"]
        self.m = layout.sizes.get("g", 1)
        self.heads = heads
        names = [name for name in layout.patterns if name in reference and name in other]
        self.legs = [(reference[n], other[n], layout.patterns[n]) for n in names]
        dtypes = [tensor.dtype for leg in self.legs for tensor in leg[:2]]
        self.work = working_dtype(*dtypes)
        self.stored = stored or (dtypes[0] if dtypes else self.work)
        chosen = {
            "qk": layout.query_key if query_key else Trivial(layout.query_key.n),
            "vo": layout.value_output if value_output else Trivial(layout.value_output.n),
        }
        self.axes = {axis: self._accumulate(axis, group) for axis, group in chosen.items()}

    def solve(self) -> Transformation:
        device = self.axes["qk"].shared.device
        straight = torch.arange(self.kv, device=device)
        choice = straight
        order = torch.arange(self.m, device=device).expand(self.kv, -1)
        if self.heads and self.kv * self.m > 1:
            choice = lazy_assignment(self._bounds(), self._scores)
            order = self._match(straight, choice)[1]
        result: list[Element] = []
        if not torch.equal(choice, straight):
            result.append(Permute("kv", choice))
        if not torch.equal(order, torch.arange(self.m, device=device).expand(self.kv, -1)):
            result.append(Permute("g", order, per="kv"))
        for name, axis in self.axes.items():
            matrix = axis.rotation(straight, choice, order, self.stored)
            eye = torch.eye(axis.group.n, dtype=matrix.dtype, device=device)
            if not torch.equal(matrix, eye.expand_as(matrix)):
                result.append(Rotate(name, matrix, per="kv"))
        return tuple(result)

    # -- accumulation ---------------------------------------------------------------------

    def _pieces(self, axis: str) -> Iterator[tuple[Piece, Piece]]:
        for a, b, pattern in self.legs:
            if axis in pattern.axes:
                pairs = zip(
                    pattern.split(a, self.sizes), pattern.split(b, self.sizes), strict=True
                )
                yield from (pair for pair in pairs if axis in pair[0].axes)

    def _accumulate(self, axis: str, group: Group) -> _Axis:
        device = self.legs[0][0].device
        kv, m, d = self.kv, self.m, group.n
        all_pairs = self.heads and kv * m > 1
        others = kv if all_pairs else 1
        shared = torch.zeros(kv, others, d, d, dtype=self.work, device=device)
        query = None
        square = torch.zeros(2, kv, dtype=self.work, device=device)
        length, entries = d, 0
        for ref, oth in self._pieces(axis):
            x, y = (_rows(piece, axis).to(self.work) for piece in (ref, oth))
            square += torch.stack([z.square().sum(dim=(1, 2, 3)) for z in (x, y)])
            length += x.shape[1] * x.shape[3]
            entries += x[0].numel()
            if x.shape[1] == 1:
                shared += _cross(x, y, all_pairs)[:, :, 0, 0]
            else:
                term = _cross(x, y, all_pairs)
                query = term if query is None else query.add_(term)
        norm = square.sqrt()
        if not all_pairs:  # broadcast the diagonal: only pairs (a, a) are ever looked up
            shared = shared.expand(kv, kv, d, d)
            query = None if query is None else query.expand(kv, kv, m, m, d, d)
        return _Axis(group, shared, query, norm[0], norm[1], length, entries)

    # -- matching -------------------------------------------------------------------------

    def _bounds(self) -> torch.Tensor:
        """Upper bound of the objective for every pair of key/value heads, (kv, kv)."""
        total = torch.zeros(self.kv, self.kv, dtype=torch.float64, device=self._device)
        queries = torch.zeros(
            self.kv, self.kv, self.m, self.m, dtype=torch.float64, device=self._device
        )
        for axis in self.axes.values():
            total += axis.group.bound(axis.shared.double())
            if axis.query is not None:
                queries += axis.group.bound(axis.query).double()
        total += queries.amax(-1).sum(-1)
        # The scores below carry the slack and the bonus of the diagonal: bound them as well.
        return total + 3 * self._tie()[:, None].maximum(self._tie()[None, :])

    @property
    def _device(self) -> torch.device:
        return self.axes["qk"].shared.device

    def _tie(self) -> torch.Tensor:
        """Rounding error of the objective per head: what a change must gain at least, (kv,)."""
        scale = sum(axis.norm_ref.max() * axis.norm_other.max() for axis in self.axes.values())
        eps = torch.finfo(self.work).eps
        depth = max(axis.group.n for axis in self.axes.values()) ** 0.5
        tie = torch.as_tensor(scale).double() * 8 * eps * depth + torch.finfo(torch.float64).tiny
        return tie.expand(self.kv)

    def _scores(self, pairs: torch.Tensor) -> torch.Tensor:
        a, b = pairs.unbind(1)
        value, _ = self._match(a, b)
        return value + torch.where(a == b, self._tie()[a], torch.zeros_like(value))

    def _match(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Best value and order of query heads for the pairs (a, b): (k,) and (k, m)."""
        straight = torch.arange(self.m, device=a.device).expand(len(a), -1)
        value, elements = self._value(a, b, straight)
        if self.m == 1:
            return value, straight
        bonus = self._tie()[a] / self.m
        best, order = self._alternate(a, b, straight, value, elements, bonus)
        alone = [
            axis.group.project(axis.shared[a, b].double() + axis._slack(a, b))
            for axis in self.axes.values()
        ]
        start = self._reorder(a, b, alone, bonus)
        if not torch.equal(start, straight):
            value, elements = self._value(a, b, start)
            second, other = self._alternate(a, b, start, value, elements, bonus)
            better = second > best
            best = torch.where(better, second, best)
            order = torch.where(better[:, None], other, order)
        return best, order

    def _value(
        self, a: torch.Tensor, b: torch.Tensor, order: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        total = torch.zeros(len(a), dtype=torch.float64, device=a.device)
        elements = []
        for axis in self.axes.values():
            gram = axis.gram(a, b, order)
            elements.append(axis.group.project(gram))
            total += inner(elements[-1], gram)
        return total, elements

    def _reorder(
        self, a: torch.Tensor, b: torch.Tensor, elements: list[torch.Tensor], bonus: torch.Tensor
    ) -> torch.Tensor:
        """Best order of the query heads for given rotations, (k, m)."""
        score = torch.diag_embed(bonus[:, None].expand(-1, self.m))
        for axis, g in zip(self.axes.values(), elements, strict=True):
            if axis.query is not None:
                score = score + torch.einsum("kxy,kijxy->kij", g, axis.query[a, b].double())
        return torch.stack([linear_assignment(one) for one in score])

    def _alternate(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        order: torch.Tensor,
        value: torch.Tensor,
        elements: list[torch.Tensor],
        bonus: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Alternate order and rotation until the objective stops rising."""
        for _ in range(4 * self.m):
            proposal = self._reorder(a, b, elements, bonus)
            if torch.equal(proposal, order):
                break
            new_value, new_elements = self._value(a, b, proposal)
            better = new_value > value
            if not bool(better.any()):
                break
            value = torch.where(better, new_value, value)
            order = torch.where(better[:, None], proposal, order)
            elements = [
                torch.where(better[:, None, None], new, old)
                for new, old in zip(new_elements, elements, strict=True)
            ]
        return value, order


def _rows(piece: Piece, axis: str) -> torch.Tensor:
    """View a piece as (kv, g, d, rest) with g = 1 where it has no query axis."""
    lead = [piece.dim("kv"), piece.dim("g"), piece.dim(axis)]
    known = [dim for dim in lead if dim is not None]
    rest = [dim for dim in range(piece.tensor.dim()) if dim not in known]
    x = piece.tensor.permute(*known, *rest)
    if lead[1] is None:
        x = x.unsqueeze(1)
    return x.flatten(3) if x.dim() > 3 else x.unsqueeze(3)


def _cross(x: torch.Tensor, y: torch.Tensor, all_pairs: bool) -> torch.Tensor:
    """Cross-Gram matrices of all pairs of heads, (a, b, i, j, d, d); only b = a if not asked.

    Without ``all_pairs`` the result has shape (a, 1, m, m, d, d) and holds i = j alone.
    """
    kv, m, d, _ = x.shape
    if all_pairs:
        gram = x.flatten(0, 2) @ y.flatten(0, 2).mT
        return gram.view(kv, m, d, kv, m, d).permute(0, 3, 1, 4, 2, 5)
    diagonal = torch.diag_embed((x @ y.mT).permute(0, 2, 3, 1))  # (a, d, d, m, m)
    return diagonal.permute(0, 3, 4, 1, 2).unsqueeze(1)
