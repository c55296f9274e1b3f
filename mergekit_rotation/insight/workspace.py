"""What solving and merging take besides the tensors that go in and come out."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mergekit_rotation.graph.block import BlockSpec
from mergekit_rotation.symmetry import Orthogonal, Pattern, assignment, nearest, working_dtype
from mergekit_rotation.symmetry.head_gram import ENTRIES, WEIGHTS, columns
from mergekit_rotation.symmetry.neurons import MANY
from mergekit_rotation.symmetry.vectors import TILE

_DOUBLE = 8


@dataclass(frozen=True)
class Cost:
    """What one step takes.

    Attributes
    ----------
    memory : int
        Bytes, besides inputs and results.
    most : int
        The same where no neuron resembles any other, and a full assignment is solved.
    products : float
        Multiplications and additions of matrix products.
    unlike : float
        What is added to these where no neuron resembles any other.
    passes : float
        Bytes that elementwise steps read.
    factors : float
        Sum of n^3 over the matrices that are factorised.
    assigned : float
        Scores that are assigned, n^2 for n neurons, where no neuron resembles any other.
    """

    memory: int = 0
    most: int = 0
    products: float = 0.0
    unlike: float = 0.0
    passes: float = 0.0
    factors: float = 0.0
    assigned: float = 0.0


def block_cost(spec: BlockSpec, dtypes: Sequence[torch.dtype], returned: int = 0) -> Cost:
    """Return what it takes to solve for a block and to move it.

    Follows `solve_attention`, `solve_neurons` and `AlignBlock`, term by term.

    Parameters
    ----------
    spec : BlockSpec
    dtypes : sequence of torch.dtype
        Of the stored tensors, of both models.
    returned : int
        Bytes of the moved tensors, which are made once all is solved, and are not counted.
    """
    sizes = dict(spec.sizes)
    work = working_dtype(*dtypes)
    width = work.itemsize
    patterns = {name: Pattern.parse(text) for name, text in spec.patterns}
    legs = {name: prod(pattern.shape(sizes)) for name, pattern in patterns.items()}
    largest = max(legs.values())
    entries = sum(legs.values())
    rotated = spec.query_key is not None
    # `_move`: the image, in `work` where it is rotated, and what it is made from.
    moving = largest * width * (2 if rotated else 1)
    passes = float(entries * width * 12)
    if spec.expert_groups:
        neurons = sizes["f"]
        one = entries // sizes["x"]
        memory = neurons**2 * width + 2 * one * width
        most = memory + 2 * neurons**2 * _DOUBLE
        return Cost(
            max(memory - returned, moving),
            max(most - returned, moving),
            products=2.0 * neurons * entries,
            passes=passes,
        )
    if spec.query_key is None:
        neurons = sizes["f"]
        blocks = 2 * min(neurons, TILE) * (largest // neurons) * width
        scores = neurons**2 * width + blocks
        # scipy's copy of the scores, and its negative
        most = scores if neurons >= assignment.MANY else neurons**2 * (width + 2 * _DOUBLE)
        every = 2.0 * neurons * entries
        few = 2.0 * neurons**2 * nearest.FIRST
        looked = scores
        if neurons >= MANY:  # a few columns of each side, and their products block by block
            looked = 4 * neurons * nearest.FIRST * width + 3 * nearest.ENTRIES * width
        return Cost(
            max(looked - returned, moving),
            max(looked - returned, most - returned, moving),
            products=few if neurons >= MANY else every,
            unlike=every if neurons >= MANY else 0.0,
            passes=passes,
            assigned=float(neurons**2),
        )
    memory = most = 0
    products = unlike = factors = 0.0
    for axis, group in (("qk", spec.query_key), ("vo", spec.value_output)):
        assert group is not None
        d, cell = sizes[axis], max(index.shape[1] for index, _ in group.factors())
        some = every = most_pairs = 0
        for pattern in patterns.values():
            for axes in (names for names in pattern.pieces if axis in names):
                heads = sizes["kv"] * (sizes.get("g", 1) if "g" in axes else 1)
                size = prod(sizes[name.removeprefix("~")] for name in axes)
                rest = size // (heads * d)
                products += 2.0 * heads * d * d * rest
                if isinstance(group, Orthogonal):
                    factors += 4.0 * heads * d**3
                if spec.use_heads and heads > 1:
                    pairs, looked = heads**2 * d * d, columns(rest, cell)
                    products += 2.0 * pairs * looked
                    unlike += 2.0 * pairs * rest
                    most_pairs = max(most_pairs, pairs)
                    some += 2 * heads * d * looked * width  # of both sides
                    every += 2 * size * width
        elements = 6 * sizes["kv"] * d * d * _DOUBLE
        tile = 2 * min(ENTRIES, most_pairs) * width
        cast = 2 * min(WEIGHTS, entries) * width
        memory = max(memory, elements + max(2 * some + tile, cast))
        most = max(most, elements + 2 * every + tile)
    memory = max(memory - returned, moving)
    most = max(memory, most - returned)
    return Cost(memory, most, products, unlike, passes, factors)


def solver_cost(solver: Any) -> Cost:
    """Return what a `ModelSolver` takes: for memory at its dearest step, else in all.

    Per group of tensors both models are held in the working precision; with a map of the stream
    also the reference and the other with norms folded, the other inside the stream, and its image.
    """
    with_stream = solver.residual != "none"
    candidates = 2 if with_stream else 1
    memory = most = 0
    products = unlike = passes = factors = assigned = 0.0
    size = solver.sizes.get("e", 0)
    for pair in solver.pairs:
        for names, spec in solver.sides.groups(pair):
            sides = solver.sides.tensors(pair, names)
            numbers = [x.nbytes for side in sides for x in side.values()]
            group, largest = sum(numbers) // 2, max(numbers, default=0)
            held = group * (6 if with_stream else 3) + 3 * largest
            cost = Cost()
            if spec is not None and spec.used():
                cost = block_cost(spec, [x.dtype for side in sides for x in side.values()])
            memory = max(memory, held + cost.memory)
            most = max(most, held + cost.most)
            products += candidates * cost.products + (4.0 * group / 4 * size if with_stream else 0)
            unlike += candidates * cost.unlike
            passes += candidates * (cost.passes or 6.0 * group)
            factors += candidates * cost.factors
            assigned += candidates * cost.assigned
    if with_stream:
        memory, most = (max(x, 8 * size**2 * _DOUBLE) for x in (memory, most))
        factors += 20.0 * size**3 if solver.residual == "orthogonal" else 0.0
    return Cost(memory, most, products, unlike, passes, factors, assigned)


class Allocations(TorchDispatchMode):
    """Counts the bytes of all tensors that are made, and the most that were there at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        known = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and _storage(x) not in known | self._known:
                self._add(x)
        self.peak = max(self.peak, self.now)
        return result

    def _add(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        key, size = _storage(x), storage.nbytes()
        self._known.add(key)
        self.now += size

        def freed() -> None:
            self.now -= size
            self._known.discard(key)

        weakref.finalize(storage, freed)


def _storage(x: torch.Tensor) -> int:
    return int(x.untyped_storage()._cdata)
