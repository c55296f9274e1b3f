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
from mergekit_rotation.symmetry.head_gram import head_gram
from mergekit_rotation.symmetry.precision import single_thread, working_dtype

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
    shifted : frozenset of str
        Tensors whose parts with the exponent ``qk^-1``, biases of keys, can be shifted.
    folded : frozenset of str
        Tensors whose parts with the exponent ``vo^1``, biases of values, can be moved into the
        bias of the output.
    """

    patterns: Mapping[str, Pattern]
    sizes: Mapping[str, int]
    query_key: Group
    value_output: Group
    shifted: frozenset[str] = frozenset()
    folded: frozenset[str] = frozenset()


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
    in ``stored`` will move them by rounding, and by more than fitting a rotation to differences
    without any structure can gain (p of N numbers fitted explain p/N of their energy on average).
    So models in the same coordinates stay there. Ties and directions that the weights do
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

    Raises
    ------
    SymmetryError
        If the weights are not finite, or a tensor does not have the shape of its pattern.

    References
    ----------
    "Beyond the Permutation Symmetry of Transformers: The Role of Rotation for Model Fusion",
    arXiv 2502.00264 (rotations in closed form, one per head).
    """
    if not any(name in reference and name in other for name in layout.patterns):
        return ()
    solver = _Solver(reference, other, layout, query_key, value_output, heads, stored)
    with single_thread(solver.device):  # all that is left works on matrices of a head's size
        return solver.solve()


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
        #: best order of query heads of the pairs of groups that were compared
        self.orders: dict[tuple[int, int], torch.Tensor] = {}
        names = [name for name in layout.patterns if name in reference and name in other]
        self.legs = [(reference[n], other[n], layout.patterns[n]) for n in names]
        dtypes = [tensor.dtype for leg in self.legs for tensor in leg[:2]]
        self.work = working_dtype(*dtypes)
        self.stored = stored or dtypes[1]
        chosen = {
            "qk": layout.query_key if query_key else Trivial(layout.query_key.n),
            "vo": layout.value_output if value_output else Trivial(layout.value_output.n),
        }
        self.device = self.legs[0][0].device
        self.axes = {
            axis: head_gram(
                self._pieces(axis),
                axis,
                group,
                (self.kv, self.m),
                all_pairs=heads and self.kv * self.m > 1,
                work=self.work,
                device=self.device,
            )
            for axis, group in chosen.items()
        }
        # Rounding errors of the objective of a head: what a change must gain at least.
        scale = torch.stack([g.norm_ref * g.norm_other for g in self.axes.values()]).sum(0)
        depth = float(max(g.group.n for g in self.axes.values())) ** 0.5
        double = torch.finfo(torch.float64)
        self.tie: torch.Tensor = 8 * torch.finfo(self.work).eps * depth * scale
        self.tie += 64 * double.eps * scale.max() + double.tiny  # those of the assignment itself

    def solve(self) -> Transformation:
        straight = torch.arange(self.kv, device=self.device)
        choice = straight
        order = torch.arange(self.m, device=self.device).expand(self.kv, -1)
        if self.heads and self.kv * self.m > 1:
            choice = lazy_assignment(self._bounds(), self._scores)
            order = torch.stack([self.orders[pair] for pair in enumerate(choice.tolist())])
        result: list[Element] = []
        if not torch.equal(choice, straight):
            result.append(Permute("kv", choice))
        if not torch.equal(order, torch.arange(self.m, device=self.device).expand(self.kv, -1)):
            result.append(Permute("g", order, per="kv"))
        for name, axis in self.axes.items():
            matrix = axis.rotation(straight, choice, order, self.stored)
            eye = torch.eye(axis.group.n, dtype=matrix.dtype, device=self.device)
            if not torch.equal(matrix, eye.expand_as(matrix)):
                result.append(Rotate(name, matrix, per="kv"))
        return tuple(result)

    def _pieces(self, axis: str) -> Iterator[tuple[Piece, Piece]]:
        """Yield the pieces of all legs that have an axis, reference and other."""
        for a, b, pattern in self.legs:
            if axis in pattern.axes:
                pairs = zip(pattern.split(a, self.sizes), pattern.split(b, self.sizes), strict=True)
                yield from (pair for pair in pairs if axis in pair[0].axes)

    def _bounds(self) -> torch.Tensor:
        """Upper bound of the objective for every pair of key/value heads, (kv, kv)."""
        kv, m = self.kv, self.m
        total = torch.zeros(kv, kv, dtype=torch.float64, device=self.device)
        queries = torch.zeros(kv, kv, m, m, dtype=torch.float64, device=self.device)
        for axis in self.axes.values():
            total += axis.group.bound(axis.shared.double())
            if axis.query is not None:
                queries += axis.group.bound(axis.query.double())
        total += queries.amax(-1).sum(-1)
        # The scores below carry the bonus of the diagonal, and rounding errors: bound them too.
        return total + 2 * self.tie.max()

    def _scores(self, pairs: torch.Tensor) -> torch.Tensor:
        a, b = pairs.unbind(1)
        value, order = self._match(a, b)
        self.orders |= zip(zip(a.tolist(), b.tolist(), strict=True), order, strict=True)
        return value + self.tie[a] * (a == b)

    def _match(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Best value and order of query heads for the pairs (a, b): (k,) and (k, m)."""
        straight = torch.arange(self.m, device=a.device).expand(len(a), -1)
        value, elements = self._value(a, b, straight)
        if self.m == 1:
            return value, straight
        best, order = self._alternate(a, b, straight, value, elements)
        alone = [axis.project(a, b, axis.shared[a, b].double()) for axis in self.axes.values()]
        start = self._reorder(a, b, alone)
        if not torch.equal(start, straight):
            value, elements = self._value(a, b, start)
            second, other = self._alternate(a, b, start, value, elements)
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
            # As it will be applied: a head that would not be rotated must not win by rotation.
            elements.append(axis.rotation(a, b, order, self.stored))
            total += inner(elements[-1], axis.gram(a, b, order))
        return total, elements

    def _reorder(
        self, a: torch.Tensor, b: torch.Tensor, elements: list[torch.Tensor]
    ) -> torch.Tensor:
        """Best order of the query heads for given rotations, (k, m)."""
        score = torch.diag_embed((self.tie[a, None] / self.m).expand(-1, self.m))
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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Alternate order and rotation until the objective stops rising."""
        for _ in range(4 * self.m):
            proposal = self._reorder(a, b, elements)
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
