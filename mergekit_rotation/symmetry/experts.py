"""Aligning the experts of one mixture-of-experts layer.

Axes: ``x`` the experts, ``f`` the neurons inside each expert. Experts are permuted, and with them
their rows of the router and their biases; then the neurons of each expert take their own
permutation, and their own signs on legs ``~f``. Experts that are routed in groups change places
inside their group, and whole groups with each other.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

import torch

from mergekit_rotation.symmetry.action import Element, Permute, Sign, Transformation
from mergekit_rotation.symmetry.assignment import lazy_assignment, linear_assignment, paying_cycles
from mergekit_rotation.symmetry.axes import Names, Pattern, Piece
from mergekit_rotation.symmetry.errors import SymmetryError
from mergekit_rotation.symmetry.neurons import NeuronLayout, neuron_rows, solve_neurons
from mergekit_rotation.symmetry.precision import all_finite, working_dtype

Tensors = Mapping[str, torch.Tensor]

#: Most multiplications that comparing all pairs of experts neuron by neuron may take: about ten
#: seconds on one core. An assignment of n neurons counts as n^3, which is what it takes in time.
AFFORDABLE = 2.0**38

#: To how many dimensions the legs of a neuron are projected before their products are taken.
WIDTH = 128


@dataclass(frozen=True)
class ExpertLayout:
    """Where the experts of a layer are stored.

    Parameters
    ----------
    patterns : mapping of tensor name to Pattern
        With the axis ``x``: the router and biases of whole experts; with ``x`` and ``f``: the
        neurons inside. Tensors without ``x`` take no part.
    sizes : mapping of axis name to int
        ``x``, ``f`` and the axes of the stream.
    groups : int
        Number of groups of consecutive experts that are routed as one.
    shifted : frozenset of str
        Tensors whose mean over the experts is invisible, as that of a router before a softmax
        over all experts; they are compared without it.

    Raises
    ------
    SymmetryError
        If the groups do not have the same number of experts.
    """

    patterns: Mapping[str, Pattern]
    sizes: Mapping[str, int]
    groups: int = 1
    shifted: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.groups < 1 or self.sizes["x"] % self.groups:
            raise SymmetryError(f"{self.sizes['x']} experts do not form {self.groups} groups")


def solve_experts(
    reference: Tensors,
    other: Tensors,
    layout: ExpertLayout,
    *,
    experts: bool = True,
    neurons: bool = True,
) -> Transformation:
    """Find the transformation of ``other`` that brings its experts closest to the reference's.

    The score of a pair of experts is the inner product of their router rows and biases, plus the
    best that a (signed) permutation of neurons makes of the rest; the experts are assigned to
    maximise the sum of scores. Where E^2 I^2 (L + I) <= `AFFORDABLE`, with E experts of I neurons
    of L numbers, that sum is maximised exactly: scores are solved only for pairs that an optimum
    can use, given that no score exceeds the sum of the products of the sorted norms of neurons.

    Larger layers are assigned by estimated scores, which cost E I L WIDTH multiplications and E^2
    inner products. With p and s the plain and the signed legs of a neuron, sum_i s_i s_i^T and
    sum_i p_i p_i^T depend on neither order nor signs, and only their blocks between different
    legs (up and down projection) are used where there are any: unrelated experts have nothing in
    common there. The estimate is the cosine between these, for each of the two kinds of legs,
    times the norms. Twins have cosine one, and noise is averaged over all neurons. The cosine
    falls with the square of the correlation of the weights, so weak likeness is lost: random
    twins of 64 neurons are recognised down to a correlation of 0.25 where the directions of the
    stream are alike, and of 0.7 where their sizes fall like k^-0.7, against 0.12 and 0.45 with
    true scores. Which gate goes with which up projection is not seen at all. A choice by
    estimates is kept only where its true score is the better one.

    Cycles of experts that gain no more than rounding errors are undone, so equal and dead
    experts stay where they are, and the distance never grows by moving experts.

    At no time is more than one pair of experts held in the working precision, and one matrix
    of scores of their neurons.

    Parameters
    ----------
    reference, other : mapping of tensor name to Tensor
        The names of ``layout.patterns``; a name that either side lacks does not take part.
    experts, neurons : bool
        Which freedoms may be used.

    Returns
    -------
    tuple of elements
        Of Permute("x"), Permute("f", per="x") and Sign("f", per="x") those that move anything.

    Raises
    ------
    SymmetryError
        If the weights are not finite, or a tensor does not have the shape of its pattern.

    References
    ----------
    Ainsworth, Hayase, Srinivasa, "Git Re-Basin: Merging Models modulo Permutation Symmetries",
    arXiv 2209.04836, section 3.2, applied at two levels.
    """
    solver = _Solver(reference, other, layout, neurons)
    return solver.solve(experts) if experts or neurons else ()


@dataclass(frozen=True)
class _Leg:
    """A tensor of both models, experts first: views of shape (E, ...)."""

    axes: Names  # of one expert
    sides: tuple[torch.Tensor, torch.Tensor]

    @property
    def signed(self) -> bool:
        return "~f" in self.axes

    @property
    def pattern(self) -> Pattern:
        return Pattern.parse(" ".join(self.axes))

    def rows(self, side: int, expert: int) -> torch.Tensor:
        """View one expert as (neurons, rest)."""
        return neuron_rows(Piece(self.axes, self.sides[side][expert]))


@dataclass(frozen=True)
class _Inside:
    """The best motion of the neurons of one expert onto those of another."""

    value: float
    index: torch.Tensor
    sign: torch.Tensor
    gap: float


class _Solver:
    def __init__(
        self, reference: Tensors, other: Tensors, layout: ExpertLayout, neurons: bool
    ) -> None:
        self.sizes, self.groups = layout.sizes, layout.groups
        self.count, self.neurons = layout.sizes["x"], neurons
        self.legs: list[_Leg] = []  # with neurons
        whole: list[_Leg] = []
        for name, leg in _legs(reference, other, layout):
            if Piece(leg.axes, leg.sides[0]).dim("f") is not None:
                self.legs.append(leg)
            else:
                whole.append(_exact(leg, centred=name in layout.shifted))
        tensors = [x for leg in self.legs + whole for x in leg.sides]
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self.work = working_dtype(*(x.dtype for leg in self.legs for x in leg.sides))
        self.eps = torch.finfo(self.work if self.legs else torch.float64).eps
        self.memo: dict[tuple[int, int], _Inside] = {}

        # Scores of pairs of experts but for what the motion of neurons adds.
        self.outer = torch.zeros(self.count, self.count, dtype=torch.float64, device=self.device)
        square = torch.zeros(2, self.count, dtype=torch.float64, device=self.device)
        for leg in whole:
            a, b = (x.reshape(self.count, -1) for x in leg.sides)
            self.outer += a @ b.mT
            square += torch.stack([x.square().sum(1) for x in (a, b)])
        #: norms of neurons by kind of leg (signed, plain) and side, float64
        self.profiles = [
            [self._profile(side, signed) for side in range(2)] for signed in (True, False)
        ]
        square += sum(torch.stack(kind).square().sum(2) for kind in self.profiles)
        norm = square.sqrt()
        if not (all_finite(norm) and all_finite(self.outer)):
            raise SymmetryError(
                "the weights of an expert hold NaN or Inf, or are too large to square"
            )
        length = sum(leg.rows(0, 0).shape[1] for leg in self.legs)
        if not neurons:
            for leg in self.legs:
                length = max(length, self._add_straight(leg))
        #: rounding errors of the score of expert i of the reference with expert j of the other
        self.noise = 4 * self.eps * float(max(length, 1)) ** 0.5 * norm[0][:, None] * norm[1]
        pairs = self.count**2 * (self.sizes["f"] ** 2 if self.legs else 0)
        self.exact = not neurons or pairs * (length + self.sizes.get("f", 0)) <= AFFORDABLE

    def solve(self, experts: bool) -> Transformation:
        straight = torch.arange(self.count, device=self.device)
        choice = self._match() if experts and self.count > 1 else straight
        inside = [self._inside(*pair) for pair in enumerate(choice.tolist())]
        result: list[Element] = []
        if not torch.equal(choice, straight):
            result.append(Permute("x", choice))
        index = torch.stack([one.index for one in inside])
        if bool((index != torch.arange(index.shape[1], device=self.device)).any()):
            result.append(Permute("f", index, per="x", gap=max(one.gap for one in inside)))
        sign = torch.stack([one.sign for one in inside])
        if bool((sign < 0).any()):
            result.append(Sign("f", sign, per="x"))
        return tuple(result)

    # -- scores -----------------------------------------------------------------------------

    def _profile(self, side: int, signed: bool) -> torch.Tensor:
        """Norm of every neuron of every expert over the legs of one kind, (E, I)."""
        legs = [leg for leg in self.legs if leg.signed == signed]
        if not legs:
            return torch.zeros(self.count, 1, dtype=torch.float64, device=self.device)
        result = []
        for expert in range(self.count):
            rows = [leg.rows(side, expert) for leg in legs]
            norms = [torch.linalg.vector_norm(x, dim=1, dtype=self.work).double() for x in rows]
            result.append(torch.linalg.vector_norm(torch.stack(norms), dim=0))
        return torch.stack(result)

    def _add_straight(self, leg: _Leg) -> int:
        """Add the inner products of a leg with all neurons in place, a few neurons at a time.

        Returns the number of products that are summed in the working precision.
        """
        dim = Piece(("x", *leg.axes), leg.sides[0]).dim("f")
        assert dim is not None
        width = leg.rows(0, 0).shape[1]
        step = max(1, 2**22 // (self.count * width))
        for a, b in zip(*(x.split(step, dim) for x in leg.sides), strict=True):
            x, y = (side.flatten(1).to(self.work) for side in (a, b))
            self.outer += x @ y.mT
        return min(step, self.sizes["f"]) * width

    def _inside(self, a: int, b: int) -> _Inside:
        """Solve for the neurons of expert a of the reference and b of the other."""
        if (a, b) not in self.memo:
            self.memo[a, b] = self._solve_inside(a, b)
        return self.memo[a, b]

    def _solve_inside(self, a: int, b: int) -> _Inside:
        n = self.sizes["f"] if self.legs and self.neurons else 1
        index = torch.arange(n, device=self.device)
        sign = torch.ones(n, dtype=self.work, device=self.device)
        gap = 0.0
        if not self.neurons:
            return _Inside(0.0, index, sign, gap)
        names = [str(k) for k in range(len(self.legs))]
        legs = dict(zip(names, self.legs, strict=True))
        layout = NeuronLayout({name: legs[name].pattern for name in names}, self.sizes)
        reference = {name: leg.sides[0][a] for name, leg in legs.items()}
        other = {name: leg.sides[1][b] for name, leg in legs.items()}
        for element in solve_neurons(reference, other, layout):
            if isinstance(element, Permute):
                index, gap = element.index, element.gap or 0.0
            elif isinstance(element, Sign):
                sign = element.sign
        value = 0.0
        for leg in self.legs:
            x, y = leg.rows(0, a).to(self.work), leg.rows(1, b)[index].to(self.work)
            overlap = (x * y).sum(1)
            value += float((overlap * sign if leg.signed else overlap).sum(dtype=torch.float64))
        return _Inside(value, index, sign, gap)

    def _score(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Scores of the pairs (a, b), (k,)."""
        pairs = zip(a.tolist(), b.tolist(), strict=True)
        values = [self._inside(*pair).value for pair in pairs]
        return self.outer[a, b] + torch.tensor(values, dtype=torch.float64, device=self.device)

    def _bounds(self) -> torch.Tensor:
        """Upper bounds of the scores, and of what ties and rounding errors add, (E, E)."""
        result: torch.Tensor = self.outer + self.noise + 2 * self.noise.diagonal().max()
        if not self.neurons:
            return result
        kinds = [[x.sort(1).values for x in kind] for kind in self.profiles]
        parts = sum((a @ b.mT for a, b in kinds), torch.zeros_like(self.outer))
        norms = [torch.hypot(x, y).sort(1).values for x, y in zip(*self.profiles, strict=True)]
        result += torch.minimum(parts, norms[0] @ norms[1].mT)
        return result

    def _estimates(self) -> torch.Tensor:
        """Estimated scores, (E, E); see `solve_experts`."""
        result = self.outer.clone()
        for signed, kind in zip((True, False), self.profiles, strict=True):
            legs = [leg for leg in self.legs if leg.signed == signed]
            if legs:
                norm = [torch.linalg.vector_norm(x, dim=1) for x in kind]
                a, b = (self._sketch(legs, side, norm[side]) for side in range(2))
                result += (a @ b.mT) * norm[0][:, None] * norm[1]
        return result

    def _sketch(self, legs: list[_Leg], side: int, norm: torch.Tensor) -> torch.Tensor:
        """Projected products of legs, summed over neurons, of length one; (E, numbers)."""
        generator = torch.Generator().manual_seed(0)
        widths = [leg.rows(side, 0).shape[1] for leg in legs]
        projections = [
            torch.randn(n, WIDTH, generator=generator, device="cpu").to(self.device, self.work)
            if n > WIDTH
            else None
            for n in widths
        ]
        pairs = list(combinations(range(len(legs)), 2)) or [(0, 0)]
        result = []
        for expert in range(self.count):
            scale = 1 / max(float(norm[expert]), torch.finfo(self.work).tiny)
            short = []
            for leg, projection in zip(legs, projections, strict=True):
                x = leg.rows(side, expert).to(self.work) * scale  # squares must not underflow
                short.append(x if projection is None else x @ projection)
            parts = [(short[k].mT @ short[m]).flatten() for k, m in pairs]
            result.append(torch.nn.functional.normalize(torch.cat(parts).double(), dim=0))
        return torch.stack(result)

    # -- assignments ------------------------------------------------------------------------

    def _match(self) -> torch.Tensor:
        """Assign the experts, groups as a whole; (E,)."""
        size = self.count // self.groups
        bound = self._bounds() if self.exact else self._estimates()
        blocks = bound.unflatten(1, (self.groups, size)).unflatten(0, (self.groups, size))
        blocks = blocks.transpose(1, 2)  # (groups, groups, size, size)
        members = torch.arange(self.count, device=self.device).view(self.groups, size)
        known: dict[tuple[int, int], torch.Tensor] = {}

        def within(pair: tuple[int, int]) -> torch.Tensor:
            """Assign the members of one group of the reference and one of the other."""
            if pair not in known:
                a, b = members[pair[0]], members[pair[1]]
                known[pair] = b[self._assign(blocks[pair], a, b)]
            return known[pair]

        def score(pairs: torch.Tensor) -> torch.Tensor:
            result = []
            for a, b in pairs.tolist():
                value = self._score(members[a], within((a, b))).sum()
                result.append(value + self.noise[members[a], members[a]].sum() * (a == b))
            return torch.stack(result)

        straight = torch.arange(self.groups, device=self.device)
        choice = straight
        if self.groups > 1:
            best = torch.stack([torch.stack([_best(x) for x in row]) for row in blocks])
            choice = lazy_assignment(best, score) if self.exact else linear_assignment(best)
        chosen = torch.stack([within(pair) for pair in enumerate(choice.tolist())])
        if torch.equal(choice, straight):
            return chosen.flatten()
        stay = torch.stack([within((a, a)) for a in range(self.groups)])
        rows = members.flatten()
        gain = self._score(rows, chosen.flatten()) - self._score(rows, stay.flatten())
        least = self.noise[members, chosen] + self.noise[members, stay]
        pays = paying_cycles(choice, gain.view_as(members).sum(1), least.sum(1))
        return torch.where(pays[:, None], chosen, stay).flatten()

    def _assign(self, bound: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Assign experts b of the other to experts a, by bounds or estimates of their scores."""
        rows = torch.arange(len(a), device=self.device)

        def score(pairs: torch.Tensor) -> torch.Tensor:
            i, j = pairs.unbind(1)
            result = self._score(a[i], b[j])
            result += self.noise[a[i], b[j]] * (i == j)  # ties go to the identity
            return result

        index = lazy_assignment(bound, score) if self.exact else linear_assignment(bound)
        if torch.equal(index, rows):
            return index
        gain = self._score(a, b[index]) - self._score(a, b)
        pays = paying_cycles(index, gain, self.noise[a, b[index]] + self.noise[a, b])
        return torch.where(pays, index, rows)


def _legs(reference: Tensors, other: Tensors, layout: ExpertLayout) -> Iterator[tuple[str, _Leg]]:
    for name, pattern in layout.patterns.items():
        if name not in reference or name not in other:
            continue
        split = [pattern.split(side[name], layout.sizes) for side in (reference, other)]
        for a, b in zip(*split, strict=True):
            dim = a.dim("x")
            if dim is not None:
                axes = a.axes[:dim] + a.axes[dim + 1 :]
                yield name, _Leg(axes, (a.tensor.movedim(dim, 0), b.tensor.movedim(dim, 0)))


def _exact(leg: _Leg, centred: bool) -> _Leg:
    """Raise a small leg to float64, and take away its mean over the experts if asked."""
    a, b = (x.double() for x in leg.sides)
    return _Leg(leg.axes, (a - a.mean(0), b - b.mean(0)) if centred else (a, b))


def _best(score: torch.Tensor) -> torch.Tensor:
    """Largest sum that an assignment attains."""
    return score[torch.arange(len(score), device=score.device), linear_assignment(score)].sum()
