"""Aligning the heads of one attention layer.

Axes: ``kv`` key/value heads, ``g`` query heads inside a key/value group, ``qk`` and ``vo`` the
dimensions of a head that queries share with keys and values share with the output projection.
One matrix per key/value head acts on ``qk``, another on ``vo``; groups are permuted among
themselves, and query heads inside their group.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from mergekit_rotation.symmetry.action import Element, Permute, Rotate, Transformation
from mergekit_rotation.symmetry.assignment import lazy_assignment, linear_assignment
from mergekit_rotation.symmetry.axes import Pattern, Piece
from mergekit_rotation.symmetry.groups import Group, Trivial, inner
from mergekit_rotation.symmetry.head_gram import HeadAxis, HeadBounds, PairGram
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
    Bounds from some columns of the weights tell which pairs and orders cannot be better than what
    is known; only the others are looked at, so related models take few products.

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
    return _Solver(reference, other, layout, query_key, value_output, heads, stored).solve()


@dataclass(frozen=True)
class _Match:
    """The best that was found for k pairs of key/value heads.

    Attributes
    ----------
    value : Tensor, shape (k,)
        The objective, float64.
    order : Tensor of int64, shape (k, m)
        Of the query heads.
    elements : sequence of Tensor, shape (k, d, d)
        What acts on each axis.
    """

    value: torch.Tensor
    order: torch.Tensor
    elements: Sequence[torch.Tensor]

    def where(self, better: torch.Tensor, new: "_Match") -> "_Match":
        """Return another one's pairs where that is better, shape (k,)."""
        return _Match(
            torch.where(better, new.value, self.value),
            torch.where(better[:, None], new.order, self.order),
            [
                torch.where(better[:, None, None], x, y)
                for x, y in zip(new.elements, self.elements, strict=True)
            ],
        )

    def put(self, places: torch.Tensor, new: "_Match") -> "_Match":
        """Return pairs with those at some places replaced."""
        pairs = zip(new.elements, self.elements, strict=True)
        return _Match(
            self.value.index_copy(0, places, new.value),
            self.order.index_copy(0, places, new.order),
            [y.index_copy(0, places, x) for x, y in pairs],
        )


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
        self.heads = heads and self.kv * self.m > 1
        #: best order of query heads, and elements, of the pairs of groups that were compared
        self.known: dict[tuple[int, int], tuple[torch.Tensor, list[torch.Tensor]]] = {}
        names = [name for name in layout.patterns if name in reference and name in other]
        self.legs = [(reference[n], other[n], layout.patterns[n]) for n in names]
        dtypes = [tensor.dtype for leg in self.legs for tensor in leg[:2]]
        work = working_dtype(*dtypes)
        self.stored = stored or dtypes[1]
        chosen = {
            "qk": layout.query_key if query_key else Trivial(layout.query_key.n),
            "vo": layout.value_output if value_output else Trivial(layout.value_output.n),
        }
        self.device = self.legs[0][0].device
        self.axes = {
            name: HeadAxis(self._pieces(name), name, group, (self.kv, self.m), work, self.device)
            for name, group in chosen.items()
        }
        # Rounding errors of the objective of a head: what a change must gain at least.
        scale = torch.stack([axis.norms.prod(0) for axis in self.axes.values()]).sum(0)
        depth = float(max(group.n for group in chosen.values())) ** 0.5
        double = torch.finfo(torch.float64)
        self.tie: torch.Tensor = 8 * torch.finfo(work).eps * depth * scale
        self.tie += 64 * double.eps * scale.max() + double.tiny  # those of the assignment itself
        self.bounds: HeadBounds | None = None
        #: whether these bounds settled the order of query heads of no pair that was compared last
        self.unsettled = False

    def solve(self) -> Transformation:
        straight = torch.arange(self.kv, device=self.device)
        choice = straight
        if self.heads:
            bound = self._bounds(every_column=False)
            choice = lazy_assignment(bound, self._scores, self._tighter)
        else:
            self._scores(torch.stack([straight, straight], 1))
        found = [self.known[pair] for pair in enumerate(choice.tolist())]
        order = torch.stack([one for one, _ in found])
        result: list[Element] = []
        if not torch.equal(choice, straight):
            result.append(Permute("kv", choice))
        if not torch.equal(order, torch.arange(self.m, device=self.device).expand(self.kv, -1)):
            result.append(Permute("g", order, per="kv"))
        for position, (name, axis) in enumerate(self.axes.items()):
            matrix = torch.stack([elements[position] for _, elements in found])
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

    # -- bounds -----------------------------------------------------------------------------------

    def _bounds(self, *, every_column: bool) -> torch.Tensor:
        """Upper bound of the objective for every pair of key/value heads, (kv, kv)."""
        found = [axis.bounds(every_column=every_column) for axis in self.axes.values()]
        shared, query = zip(*((one.shared, one.query) for one in found), strict=True)
        self.bounds = HeadBounds(torch.stack(shared).sum(0), torch.stack(query).sum(0))
        self.unsettled = False
        total = self.bounds.shared + self.bounds.query.amax(-1).sum(-1)
        # The scores below carry the bonus of the diagonal, and rounding errors: bound them too.
        return total + 2 * self.tie.max()

    def _tighter(self) -> torch.Tensor:
        return self._bounds(every_column=True)

    def _likely(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Order of query heads that the bounds are for, (k, m)."""
        straight = torch.arange(self.m, device=a.device).expand(len(a), -1)
        if self.m == 1 or self.bounds is None:
            return straight
        bound = self.bounds.query[a, b]
        bound = bound + torch.diag_embed(self.tie[a, None].expand_as(straight))
        return torch.stack([linear_assignment(one) for one in bound])

    def _settled(self, a: torch.Tensor, b: torch.Tensor, found: _Match) -> torch.Tensor:
        """Tell of which pairs no other order of the query heads can have a larger value, (k,)."""
        if self.m == 1 or self.bounds is None:
            return torch.ones_like(a, dtype=torch.bool)
        bound = self.bounds.query[a, b]
        bound = bound.gather(2, found.order[:, None].expand_as(bound))
        stay = bound.diagonal(dim1=1, dim2=2)
        # Half of it as a price of rows and columns: what any other entry has less.
        less = (stay[:, :, None] + stay[:, None]) / 2 - bound
        less.diagonal(dim1=1, dim2=2).fill_(torch.inf)
        less, _ = less.amin(2).sort(1)
        # In another order at least two query heads are elsewhere, and any others may be.
        least = less[:, :2].sum(1) + less[:, 2:].clamp(max=0).sum(1)
        other = self.bounds.shared[a, b] + stay.sum(1) - least
        return other < found.value - self.tie[a]

    # -- pairs of heads ---------------------------------------------------------------------------

    def _scores(self, pairs: torch.Tensor) -> torch.Tensor:
        a, b = pairs.unbind(1)
        found = self._match(a, b)
        for k, (i, j) in enumerate(pairs.tolist()):
            self.known[i, j] = (found.order[k], [x[k] for x in found.elements])
        return found.value + self.tie[a] * (a == b)

    def _match(self, a: torch.Tensor, b: torch.Tensor) -> _Match:
        """Best match of the pairs (a, b), each of shape (k,)."""
        if self.unsettled:
            return self._search(a, b)
        found = self._value(a, b, self._likely(a, b))
        (open_,) = torch.nonzero(~self._settled(a, b, found), as_tuple=True)
        self.unsettled = len(open_) == len(a)
        return found.put(open_, self._search(a[open_], b[open_])) if len(open_) else found

    def _value(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        order: torch.Tensor,
        pairs: Sequence[PairGram] | None = None,
    ) -> _Match:
        """Match pairs with query heads in a given order."""
        total = torch.zeros(len(a), dtype=torch.float64, device=a.device)
        elements = []
        for position, axis in enumerate(self.axes.values()):
            gram = pairs[position].total(order) if pairs else axis.gram(a, b, order)
            # As it will be applied: a head that would not be rotated must not win by rotation.
            elements.append(axis.rotation(a, b, gram, self.stored))
            total += inner(elements[-1], gram)
        return _Match(total, order, elements)

    # -- orders of query heads --------------------------------------------------------------------

    def _search(self, a: torch.Tensor, b: torch.Tensor) -> _Match:
        """Look for the best order of query heads, from two starts."""
        pairs = [axis.pairs(a, b) for axis in self.axes.values()]
        straight = torch.arange(self.m, device=a.device).expand(len(a), -1)
        best = self._alternate(a, b, pairs, straight)
        alone = [
            axis.project(a, b, pair.shared.double())
            for axis, pair in zip(self.axes.values(), pairs, strict=True)
        ]
        start = self._reorder(a, pairs, alone)
        if torch.equal(start, straight):
            return best
        second = self._alternate(a, b, pairs, start)
        return best.where(second.value > best.value, second)

    def _alternate(
        self, a: torch.Tensor, b: torch.Tensor, pairs: Sequence[PairGram], order: torch.Tensor
    ) -> _Match:
        """Alternate order and rotation until the objective stops rising."""
        found = self._value(a, b, order, pairs)
        for _ in range(4 * self.m):
            proposal = self._reorder(a, pairs, found.elements)
            if torch.equal(proposal, found.order):
                break
            new = self._value(a, b, proposal, pairs)
            better = new.value > found.value
            if not bool(better.any()):
                break
            found = found.where(better, new)
        return found

    def _reorder(
        self, a: torch.Tensor, pairs: Sequence[PairGram], elements: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Best order of the query heads for given rotations, (k, m)."""
        score = torch.diag_embed((self.tie[a, None] / self.m).expand(-1, self.m))
        for pair, g in zip(pairs, elements, strict=True):
            if pair.query is not None:
                score = score + torch.einsum("kxy,kijxy->kij", g, pair.query.double())
        return torch.stack([linear_assignment(one) for one in score])
