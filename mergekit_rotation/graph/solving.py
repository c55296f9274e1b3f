"""Solving for the transformation of a whole model, streaming both models block by block.

Used where more than one block has to be known before anything is moved: for the residual stream,
and for transformations that are saved or applied to other models.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from transformers.utils.logging import tqdm

from mergekit_rotation.graph import run
from mergekit_rotation.graph.block import BlockSpec
from mergekit_rotation.graph.candidates import Candidate, Judge
from mergekit_rotation.graph.errors import RotationError
from mergekit_rotation.graph.motion import orders
from mergekit_rotation.graph.moving import ROWS
from mergekit_rotation.graph.reading import ModelTensors
from mergekit_rotation.graph.sides import OUTER, LayerPair, Sides
from mergekit_rotation.symmetry import (
    ModelTransformation,
    Norm,
    OrthogonalMap,
    SignedPermutation,
    StreamMap,
    SymmetryError,
    Transformation,
    averaged_apart,
    composed,
    cross_gram,
    full_precision,
    into_stream,
    solve_permutation,
    solve_rotation,
    squares,
    target_norm,
)

Tensors = dict[str, torch.Tensor]
Legs = Iterator[tuple[torch.Tensor, torch.Tensor, int, float]]


class ModelSolver:
    """Alignment of one whole model to a reference.

    Parameters
    ----------
    reference, other : ModelTensors
    pairs : sequence of LayerPair
    planned : frozenset of str
        Templates of the tensors that the merge will write.
    residual : {"none", "permutation", "orthogonal"}
    rounds : int
    stored : torch.dtype, optional
        Precision in which moved tensors will be stored; that of the input if None.
    device : str
    """

    def __init__(
        self,
        reference: ModelTensors,
        other: ModelTensors,
        pairs: Sequence[LayerPair],
        planned: frozenset[str],
        residual: str,
        rounds: int,
        stored: torch.dtype | None,
        device: str,
    ):
        self.other = other
        self.pairs = pairs
        self.residual, self.rounds = residual, rounds
        self.device = torch.device(device)
        self.sides = Sides(reference, other, planned, residual != "none", stored, self.device)
        self.layout, self.sizes = self.sides.layout, self.sides.sizes
        self.judge = Judge(self.sides)
        #: whether no map of the stream could be computed
        self.failed = False

    def solve(self, with_layers: bool = True) -> ModelTransformation:
        """Return the best transformation, and report what was done to the current run.

        Parameters
        ----------
        with_layers : bool
            Whether heads, neurons and norms of the layers are to be moved, too; otherwise the
            layers are compared only to judge the map.

        Raises
        ------
        RotationError
        """
        with torch.no_grad(), full_precision():
            candidates = [Candidate(None)]
            if self.residual != "none" and not self.sides.same_outside(self.pairs):
                candidates += self._candidate(self._first_map, "the residual stream")
                self.failed = len(candidates) == 1
            left = self._measure(candidates)
            for _ in range(self.rounds - 1):
                last = left[-1]
                if last.stream is None:
                    break
                place = "a further round of the residual stream"
                following = self._candidate(partial(self._next_map, last), place)
                if not following:
                    break
                left += self._measure(following)
                candidates += following
        best = self.judge.best(left)
        if not with_layers:
            best.blocks, best.records = {}, []
            best.norms = {key: norm for key, norm in best.norms.items() if key[1:] == OUTER}
        self._report(candidates, best)
        return ModelTransformation(best.stream, best.norms, best.blocks)

    def outline(self, with_layers: bool = True) -> ModelTransformation:
        """Return a transformation of the kind that `solve` may find, solving nothing.

        All tensors are asked for as `solve` does, so that their shapes are checked; they have to
        lie on the meta device.
        """
        if self.residual != "none":
            for template in self.sides.outer_templates():
                for _ in self.sides.chunks(template):
                    pass
        for pair in self.pairs:
            for names, _ in self.sides.groups(pair):
                self.sides.tensors(pair, names)
        blocks = {
            (spec.kind, *pair.indices): spec.outline()
            for pair in self.pairs
            for spec in pair.blocks
        }
        stream: StreamMap | None = None
        size = self.sizes.get("e", 0)
        if self.residual == "orthogonal":
            stream = OrthogonalMap(torch.empty(size, size, dtype=torch.float64, device="meta"))
        elif self.residual == "permutation":
            stream = SignedPermutation(torch.arange(size), torch.ones(size))
        return ModelTransformation(stream, {}, blocks if with_layers else {})

    # -- maps of the stream -------------------------------------------------------------------

    def _candidate(self, solve: Callable[[], StreamMap], place: str) -> list[Candidate]:
        """Return what a map that is solved for makes, or nothing if it cannot be computed."""
        try:
            return [Candidate(solve())]
        except torch.linalg.LinAlgError:
            run.current().leave(str(self.other.model), place)
            return []

    def _first_map(self) -> StreamMap:
        """Solve for the map from the embeddings and the output head alone."""
        return self._solve_map(self._outer_legs())

    def _solve_map(self, legs: Legs) -> StreamMap:
        try:
            gram, noise = cross_gram(legs, self.sizes["e"], ROWS)
            if self.residual == "orthogonal":
                return solve_rotation(gram.to(self.device), noise, self.layout.layer_norm)
            return solve_permutation(gram, per_coordinate=not self.layout.layer_norm)
        except SymmetryError as problem:
            raise RotationError(f"{self.other.model}: {problem}; the model is damaged") from problem

    def _outer_legs(self) -> Legs:
        """Yield what stands outside of the layers, norms folded, a few rows at a time."""
        for template in self.sides.outer_templates():
            dim = self.sides.dim(template)
            if dim is None or self.sides.is_norm(template):
                continue
            for x, y in self.sides.outer_sides(template, None):
                yield x, y, dim, 1.0

    def _next_map(self, last: Candidate) -> StreamMap:
        """Solve for the map from all tensors, each of unit norm, heads and neurons aligned.

        Embeddings and head count as much as all layers together.
        """
        correction = self._solve_map(self._all_legs(last))
        return correction if last.stream is None else composed(last.stream, correction)

    def _all_legs(self, last: Candidate) -> Legs:
        outer = [t for t in self.sides.outer_templates() if not self.sides.is_norm(t)]
        share = max(1, len(self.pairs)) * 7.0 / max(1, len(outer))
        for template in outer:
            dim = self.sides.dim(template)
            if dim is None:
                continue
            square = [0.0, 0.0]
            for x, y in self.sides.outer_sides(template, last.stream):
                one = squares(x, y)
                square = [square[0] + one.first, square[1] + one.second]
            for x, y in self.sides.outer_sides(template, last.stream):
                yield x, y, dim, _unit(square[0] ** 0.5, square[1] ** 0.5) * share
        for pair in self.pairs:
            for names, spec in self.sides.groups(pair):
                reference, other = self.sides.tensors(pair, names)
                left = into_stream(reference, names, self.layout, None)
                right = into_stream(other, names, self.layout, last.stream)
                key = (spec.kind if spec else "", *pair.indices)
                for name in names:
                    dim = self.sides.dim(name)
                    if dim is None or name not in left or name not in right:
                        continue
                    x, y = left[name], right[name]
                    if spec is not None:
                        y = spec.move(last.blocks.get(key, ()), name, y)
                    yield x, y, dim, _unit(float(x.norm()), float(y.norm()))

    # -- measuring candidates -------------------------------------------------------------------

    def _measure(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Align heads and neurons under each map, and add up the distances of all tensors.

        From a quarter of the layers on, a candidate that is decisively farther away is not
        followed any further.

        Returns
        -------
        list of Candidate
            Those that were measured on all tensors.
        """
        left = list(candidates)
        if self.residual != "none":
            for template in self.sides.outer_templates():
                self._measure_outer(left, template)
        some, rest = self.pairs[::4], [p for k, p in enumerate(self.pairs) if k % 4]
        quiet = self.other.context.planner.options.quiet
        for position, pair in enumerate(
            tqdm([*some, *rest], desc=f"Aligning {self.other.model}", disable=quiet)
        ):
            if position >= len(some):
                left = self.judge.without_losers(left)
            for names, spec in self.sides.groups(pair):
                reference, other = self.sides.tensors(pair, names)
                here = [name for name in names if name in reference and name in other]
                fixed = self._folded(reference, here)
                for candidate in left:
                    self._measure_group(candidate, pair, here, spec, reference, fixed, other)
        return left

    def _folded(self, tensors: Tensors, names: Sequence[str]) -> Tensors:
        """Return tensors as the function sees them: with every norm folded into its readers."""
        if self.residual == "none":
            return tensors
        return into_stream(tensors, names, self.layout, None)

    def _measure_outer(self, candidates: Sequence[Candidate], template: str) -> None:
        """Add the distance of a tensor outside of the layers."""
        for reference, other in self.sides.chunks(template):
            fixed = self._folded(reference, [template])
            for candidate in candidates:
                self._set_norms(candidate, [template], OUTER, reference, other)
                moved = other
                if candidate.stream is not None:
                    moved = into_stream(other, [template], self.layout, candidate.stream)
                self._add(candidate, [template], OUTER, reference, fixed, moved)

    def _measure_group(
        self,
        candidate: Candidate,
        pair: LayerPair,
        names: Sequence[str],
        spec: BlockSpec | None,
        reference: Tensors,
        fixed: Tensors,
        other: Tensors,
    ) -> None:
        """Align a group of tensors under a candidate, and add its distance.

        ``fixed`` is the reference with its norms folded.
        """
        start = time.perf_counter()
        if candidate.stream is None:
            goal, before, inside = reference, other, other
        else:
            self._set_norms(candidate, names, pair.indices, reference, other)
            needed = [name for name in self.layout.needed(names) if name in other]
            goal, before = fixed, self._folded(other, names)
            inside = into_stream(other, needed, self.layout, candidate.stream)
        solved = self._solve_block(pair, names, spec, goal, inside)
        for attempt in (solved or (), ()):
            moved = spec.move_legs(attempt, inside) if spec is not None else inside
            sides = (
                tuple(_seen(spec, n, side[n]) for side in (goal, before, moved))
                for n in names
                if n in goal
            )
            distance = after = scale = 0.0
            for x, y, image in sides:
                one = squares(x, y)
                scale += one.first
                distance += one.apart
                after += one.apart if image is y else squares(x, image).apart
            transformation = attempt
            if candidate.stream is not None or after <= distance:
                break
        if self.residual != "none":
            self._add(candidate, names, pair.indices, reference, fixed, moved, spec)
        if spec is not None:
            candidate.blocks[(spec.kind, *pair.indices)] = transformation
            candidate.records.append(
                run.Record(
                    model=str(self.other.model),
                    reference=str(self.sides.reference.model),
                    block=spec.kind,
                    layer=pair.label,
                    moved=run.moved_axes(transformation),
                    before=distance,
                    after=after,
                    scale=scale,
                    seconds=time.perf_counter() - start,
                    condition=run.condition(transformation),
                    scaled=spec.scaled_apart(goal, inside, after, scale),
                    left=run.FAILED if solved is None else "",
                    layers=pair.indices,
                    applied=transformation,
                    orders=orders(transformation, spec.orders()),
                )
            )

    def _solve_block(
        self,
        pair: LayerPair,
        names: Sequence[str],
        spec: BlockSpec | None,
        reference: Tensors,
        other: Tensors,
    ) -> Transformation | None:
        """Align the heads or neurons of a block whose sides are in the same coordinates."""
        if spec is None or all(torch.equal(reference[name], other[name]) for name in names):
            return ()
        assert self.sides.stored is not None
        where = f"{self.other.model}: {spec.kind} of {pair.label}"
        return spec.solve(reference, other, self.sides.stored, where)

    def _add(
        self,
        candidate: Candidate,
        names: Sequence[str],
        layers: tuple[int, int],
        reference: Tensors,
        fixed: Tensors,
        moved: Tensors,
        spec: BlockSpec | None = None,
    ) -> None:
        """Add the squared relative distances of a group to a candidate.

        Distances are taken where the function sees them, with every norm folded into its
        readers. Without a map, norms and readers are averaged apart, which costs a little more
        (`averaged_apart`); with one, the moved model has the reference's norms.
        """
        images = moved if candidate.stream is not None else self._folded(moved, names)
        for name in names:
            if name not in fixed:  # a norm, which its readers stand for
                continue
            x, y = (_seen(spec, name, side[name]) for side in (fixed, images))
            scale, _, distance, _ = squares(x, y)
            if candidate.stream is None:
                distance += averaged_apart(name, reference, moved, self.layout)
            candidate.entries += x.numel()
            candidate.add(name, layers, distance, scale)

    def _set_norms(
        self,
        candidate: Candidate,
        names: Sequence[str],
        layers: tuple[int, int],
        reference: Tensors,
        other: Tensors,
    ) -> None:
        """Keep the norms that the moved tensors will get."""
        if candidate.stream is None:
            return
        for norm in {self.layout.norm_of(name) for name in names} - {None}:
            assert norm is not None
            if (norm, *layers) not in candidate.norms:
                own = self.layout.norm(norm, other)
                theirs = self.layout.norm(norm, reference) if self.sides.foldable(norm) else None
                target = target_norm(own, theirs, candidate.stream)
                bias = None if target.bias is None else target.bias.cpu()
                candidate.norms[(norm, *layers)] = Norm(target.weight.cpu(), bias)

    def _report(self, candidates: Sequence[Candidate], best: Candidate) -> None:
        this = run.current()
        for record in best.records:
            this.record(record)
        if self.residual == "none":
            return
        model = str(self.other.model)
        if len(candidates) == 1:
            this.record_stream(run.StreamRecord(model, self.residual, failed=self.failed))
            return
        taken = 0 if best.stream is None else candidates.index(best)
        this.record_stream(
            run.StreamRecord(
                model,
                self.residual,
                taken,
                self.rounds,
                without=candidates[0].relative(),
                best=(best if taken else min(candidates[1:], key=Candidate.relative)).relative(),
                stream=best.stream,
            )
        )


def _seen(spec: BlockSpec | None, name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if spec is None else spec.seen(name, tensor)


def _unit(first: float, second: float) -> float:
    return 1 / (first * second) if first > 0 and second > 0 else 0.0
