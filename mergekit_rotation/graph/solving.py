"""Solving for the transformation of a whole model, streaming both models block by block.

Used where more than one block has to be known before anything is moved: for the residual stream,
and for transformations that are saved or applied to other models.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers.utils.logging import tqdm

from mergekit_rotation.graph import run
from mergekit_rotation.graph.block import BlockSpec
from mergekit_rotation.graph.errors import RotationError
from mergekit_rotation.graph.moving import ROWS, fingerprint
from mergekit_rotation.graph.reading import LAYER, ModelTensors
from mergekit_rotation.graph.tasks import check_shape
from mergekit_rotation.graph.vocabulary import Rows, matching_rows
from mergekit_rotation.symmetry import (
    ModelTransformation,
    Norm,
    Orthogonal,
    OrthogonalFixingOnes,
    OrthogonalMap,
    StreamLayout,
    StreamMap,
    SymmetryError,
    Transformation,
    bias_of,
    chance_share,
    composed,
    cross_gram,
    full_precision,
    into_stream,
    solve_permutation,
    solve_rotation,
    target_norm,
    working_dtype,
)

Tensors = dict[str, torch.Tensor]
Fingerprints = dict[tuple[str, int | None], str]
#: stands for the layers of a norm that belongs to none
OUTER = (-1, -1)
#: ratio of summed squared distances beyond which one map is not compared on all layers
DECISIVE = 1.25
Legs = Iterator[tuple[torch.Tensor, torch.Tensor, int, float]]


@dataclass(frozen=True)
class LayerPair:
    """A layer of the reference, the layer of the other model that it is paired with, and blocks."""

    reference: int
    other: int
    blocks: tuple[BlockSpec, ...]
    label: str


@dataclass
class Candidate:
    """One map of the stream (None: no map), with what the layers made of it."""

    stream: StreamMap | None
    blocks: dict[tuple[str, int, int], Transformation] = field(default_factory=dict)
    norms: dict[tuple[str, int, int], Norm] = field(default_factory=dict)
    records: list[run.Record] = field(default_factory=list)
    entries: int = 0
    #: squared distance to the reference, and squared norm of it, by tensor
    squares: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)

    def add(self, name: str, layer: str, distance: float, scale: float) -> None:
        """Add a tensor, or some rows of it."""
        before = self.squares.get((name, layer), (0.0, 0.0))
        self.squares[name, layer] = (before[0] + distance, before[1] + scale)

    @property
    def distance(self) -> float:
        """Sum over tensors of the squared relative distance to the reference."""
        return sum(distance / scale for distance, scale in self.squares.values() if scale > 0)

    @property
    def tensors(self) -> int:
        """How many tensors were compared."""
        return len(self.squares)

    def relative(self) -> float:
        """Root mean square over all tensors of the relative distance to the reference."""
        return float((self.distance / max(self.tensors, 1)) ** 0.5)


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
        self.reference, self.other = reference, other
        self.pairs = pairs
        self.planned = planned
        self.residual, self.rounds = residual, rounds
        self.stored = stored
        self.device = torch.device(device)
        self.stream = reference.stream
        self.layout = layout_for(reference, planned)
        self.sizes = reference.layer.sizes
        self._rows: Rows | None = None
        #: digests of all tensors that were read, of the other model and of the reference
        self.fingerprints: tuple[Fingerprints, Fingerprints] = ({}, {})

    def solve(self) -> ModelTransformation:
        """Return the best transformation, and report what was done to the current run.

        Raises
        ------
        RotationError
        """
        with torch.no_grad(), full_precision():
            candidates = [Candidate(None)]
            if self.residual != "none" and not self._same_outside():
                candidates.append(Candidate(self._first_map()))
            left = self._measure(candidates)
            for _ in range(self.rounds - 1):
                last = left[-1]
                if last.stream is None:
                    break
                following = Candidate(self._next_map(last))
                left += self._measure([following])
                candidates.append(following)
        best = self._best(left)
        self._report(candidates, best)
        return ModelTransformation(best.stream, best.norms, best.blocks)

    # -- maps of the stream -------------------------------------------------------------------

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
        for template in self._outer_templates():
            dim = self._dim(template)
            if dim is None or self._is_norm(template):
                continue
            for x, y in self._outer_sides(template, None):
                yield x, y, dim, 1.0

    def _outer_sides(
        self, template: str, stream: StreamMap | None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pieces of a tensor outside of the layers in both models, norms folded."""
        for reference, other in self._chunks(template):
            x = into_stream(reference, [template], self.layout, None)[template]
            yield x, into_stream(other, [template], self.layout, stream)[template]

    def _next_map(self, last: Candidate) -> StreamMap:
        """Solve for the map from all tensors, each of unit norm, heads and neurons aligned.

        Embeddings and head count as much as all layers together.
        """
        correction = self._solve_map(self._all_legs(last))
        return correction if last.stream is None else composed(last.stream, correction)

    def _all_legs(self, last: Candidate) -> Legs:
        outer = [t for t in self._outer_templates() if not self._is_norm(t)]
        share = max(1, len(self.pairs)) * 7.0 / max(1, len(outer))
        for template in outer:
            dim = self._dim(template)
            if dim is None:
                continue
            square = [0.0, 0.0]
            for x, y in self._outer_sides(template, last.stream):
                square = [square[0] + float(x.square().sum()), square[1] + float(y.square().sum())]
            for x, y in self._outer_sides(template, last.stream):
                yield x, y, dim, _unit(square[0] ** 0.5, square[1] ** 0.5) * share
        for pair in self.pairs:
            for names, spec in self._groups(pair):
                reference, other = self._tensors(pair, names)
                left = into_stream(reference, names, self.layout, None)
                right = into_stream(other, names, self.layout, last.stream)
                key = (spec.kind if spec else "", pair.reference, pair.other)
                for name in names:
                    dim = self._dim(name)
                    if dim is None or name not in left or name not in right:
                        continue
                    x, y = left[name], right[name]
                    if spec is not None:
                        y = spec.move(last.blocks.get(key, ()), name, y)
                    yield x, y, dim, _unit(float(x.norm()), float(y.norm()))

    # -- measuring candidates -------------------------------------------------------------------

    def _same_outside(self) -> bool:
        """Tell whether embeddings, head and all norms are equal.

        Then the best map is the identity, because it solves M = E^T E + ... .
        """
        norms = [n for n in self.layout.patterns if self._is_norm(n)]
        layers = [(n, p.reference, p.other) for p in self.pairs for n in norms if LAYER in n]
        outer = [(template, None, None) for template in self._outer_templates()]
        for name, a, b in [*layers, *outer]:
            x, y = self._raw(self.reference, name, a), self._raw(self.other, name, b)
            if x is not None and (y is None or x.dtype != y.dtype or not torch.equal(x, y)):
                return False
        return True

    def _measure(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Align heads and neurons under each map, and add up the distances of all tensors.

        A candidate that is decisively farther away on the outer tensors and a quarter of the
        layers is not followed any further.

        Returns
        -------
        list of Candidate
            Those that were measured on all tensors.
        """
        left = list(candidates)
        if self.residual != "none":
            for template in self._outer_templates():
                self._measure_outer(left, template)
        some, rest = self.pairs[::4], [p for k, p in enumerate(self.pairs) if k % 4]
        quiet = self.other.context.planner.options.quiet
        for position, pair in enumerate(
            tqdm([*some, *rest], desc=f"Aligning {self.other.model}", disable=quiet)
        ):
            if position == len(some):
                least = min(candidate.distance for candidate in left)
                left = [c for c in left if c.distance <= DECISIVE * least]
            for names, spec in self._groups(pair):
                reference, other = self._tensors(pair, names)
                for candidate in left:
                    self._measure_group(candidate, pair, names, spec, reference, other)
        return left

    def _measure_outer(self, candidates: Sequence[Candidate], template: str) -> None:
        """Add the distance of a tensor outside of the layers."""
        for reference, other in self._chunks(template):
            for candidate in candidates:
                self._set_norms(candidate, [template], OUTER, reference, other)
                moved = other
                if candidate.stream is not None:
                    inside = into_stream(other, [template], self.layout, candidate.stream)
                    moved = {**other, **inside}
                self._add(candidate, [template], "", reference, moved)

    def _measure_group(
        self,
        candidate: Candidate,
        pair: LayerPair,
        names: Sequence[str],
        spec: BlockSpec | None,
        reference: Tensors,
        other: Tensors,
    ) -> None:
        start = time.perf_counter()
        here = [name for name in names if name in reference and name in other]
        self._set_norms(candidate, here, (pair.reference, pair.other), reference, other)
        inside = other
        if candidate.stream is not None:
            needed = [name for name in self.layout.needed(here) if name in other]
            inside = into_stream(other, needed, self.layout, candidate.stream)
        transformation = self._solve_block(candidate, pair, here, spec, reference, inside)
        fixed, still = reference, other
        if candidate.stream is not None:
            fixed, still = (into_stream(x, here, self.layout, None) for x in (reference, other))
        for attempt in (transformation, ()):
            moved = self._moved(inside, attempt, spec)
            squares = [_squares(fixed[n], still[n], moved[n]) for n in here if n in fixed]
            columns = zip(*squares, strict=True) if squares else ((), (), ())
            before, after, scale = (sum(column) for column in columns)
            transformation = attempt
            if candidate.stream is not None or after <= before:
                break
        if self.residual != "none":
            self._add(candidate, here, pair.label, reference, {**other, **moved})
        if spec is not None:
            candidate.blocks[spec.kind, pair.reference, pair.other] = transformation
            candidate.records.append(
                run.Record(
                    model=str(self.other.model),
                    reference=str(self.reference.model),
                    block=spec.kind,
                    layer=pair.label,
                    moved=run.moved_axes(transformation),
                    before=before,
                    after=after,
                    scale=scale,
                    seconds=time.perf_counter() - start,
                )
            )

    def _solve_block(
        self,
        candidate: Candidate,
        pair: LayerPair,
        names: Sequence[str],
        spec: BlockSpec | None,
        reference: Tensors,
        inside: Tensors,
    ) -> Transformation:
        """Align the heads or neurons of a block whose other side is in the stream's coordinates."""
        if spec is None:
            return ()
        if candidate.stream is None:
            if all(torch.equal(reference[name], inside[name]) for name in names):
                return ()
        else:
            reference = into_stream(reference, names, self.layout, None)
        assert self.stored is not None
        where = f"{self.other.model}: {spec.kind} of {pair.label}"
        return spec.solve(reference, inside, self.stored, where)

    @staticmethod
    def _moved(inside: Tensors, transformation: Transformation, spec: BlockSpec | None) -> Tensors:
        """Return tensors with heads or neurons moved."""
        legs = {name for name, _ in spec.patterns} if spec is not None else set()
        return {
            n: spec.move(transformation, n, x) if spec is not None and n in legs else x
            for n, x in inside.items()
        }

    def _add(
        self,
        candidate: Candidate,
        names: Sequence[str],
        layer: str,
        reference: Tensors,
        moved: Tensors,
    ) -> None:
        """Add the squared relative distances of a group to a candidate.

        Distances are taken where the function sees them, with every norm folded into its
        readers. The norms themselves count beside: without a map they are averaged as they are,
        with one the moved model has the reference's.
        """
        fixed = into_stream(reference, names, self.layout, None)
        images = moved
        if candidate.stream is None:
            images = into_stream(moved, names, self.layout, None)
        for name in names:
            x, image = fixed.get(name), images.get(name)
            if x is None:
                x = reference[name]
                image = moved[name] if candidate.stream is None else x
                if name in self.layout.readers:
                    x, image = x + self.layout.offset, image + self.layout.offset
            assert image is not None
            candidate.entries += x.numel()
            distance = float((x - image).square().sum())
            candidate.add(name, layer, distance, float(x.square().sum()))

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
                theirs = self.layout.norm(norm, reference) if self._foldable(norm) else None
                target = target_norm(own, theirs, candidate.stream)
                bias = None if target.bias is None else target.bias.cpu()
                candidate.norms[(norm, *layers)] = Norm(target.weight.cpu(), bias)

    def _best(self, candidates: Sequence[Candidate]) -> Candidate:
        """Return the closest candidate; a map has to gain more than chance and rounding do."""
        best = candidates[0]
        for candidate in candidates[1:]:
            margin = 0.0
            if best.stream is None:
                # Numbers that were fitted: the map itself, and the gauge of every norm.
                size = self.sizes["e"]
                freedom = size * len(candidate.norms)
                rounding = 0.0
                if isinstance(candidate.stream, OrthogonalMap):
                    group = OrthogonalFixingOnes if self.layout.layer_norm else Orthogonal
                    freedom += group(size).freedom
                    rounding = torch.finfo(self.stored or torch.float32).eps ** 2 / 12
                share = chance_share(freedom, candidate.entries)
                margin = share * best.distance + rounding * candidate.tensors
            if candidate.distance < best.distance - margin:
                best = candidate
        return best

    def _report(self, candidates: Sequence[Candidate], best: Candidate) -> None:
        this = run.current()
        for record in best.records:
            this.record(record)
        if self.residual == "none":
            return
        plain = candidates[0].relative()
        if len(candidates) == 1:
            this.note(str(self.other.model), "residual stream equal to the reference's")
            return
        tried = min(c.relative() for c in candidates[1:])
        if best.stream is None:
            text = (
                f"residual stream left as it is (relative distance of all tensors {plain:.4g}, "
                f"{tried:.4g} with the best {self.residual} map)"
            )
        else:
            which = f", round {candidates.index(best)} of {self.rounds}" if self.rounds > 1 else ""
            text = (
                f"residual stream moved by {_ARTICLE[self.residual]} map{which} (relative distance "
                f"of all tensors {plain:.4g} without, {best.relative():.4g} with it)"
            )
        this.note(str(self.other.model), text)

    # -- tensors --------------------------------------------------------------------------------

    def _dim(self, template: str) -> int | None:
        """Return the dimension along which a tensor takes the whole map of the stream, if any."""
        pattern = self.layout.patterns.get(template)
        return None if pattern is None or not pattern.signed("e") else pattern.dim_of("e")

    def _is_norm(self, template: str) -> bool:
        norm = self.layout.norm_of(template)
        return norm is not None and template in (norm, bias_of(norm))

    def _foldable(self, norm: str) -> bool:
        """Tell whether a norm's readers are tensors of their own (no tied head)."""
        return any(reader in self.planned for reader in self.layout.readers[norm])

    def _outer_templates(self) -> list[str]:
        """Templates of the stream outside of the layers that both models have."""
        heads = [head for head in self.stream.tied if self._reads_its_own_norm(head)]
        return [
            template
            for template in outer_templates(self.reference)
            if (template not in self.stream.tied or template in heads)
            and self.reference.has(template, None)
            and self.other.has(template, None)
        ]

    def _reads_its_own_norm(self, head: str) -> bool:
        norm = self.layout.norm_of(head)
        others = [] if norm is None else [r for r in self.layout.readers[norm] if r != head]
        return head in self.planned or not any(reader in self.planned for reader in others)

    def _groups(self, pair: LayerPair) -> Iterator[tuple[list[str], BlockSpec | None]]:
        """Yield the names that move together in a layer: its blocks, then single tensors."""
        taken: set[str] = set()
        for spec in pair.blocks:
            names = [name for name, _ in spec.patterns]
            taken.update(names)
            yield names, spec
        if self.residual == "none":
            return
        for template in self.layout.patterns:
            if LAYER in template and template not in taken and template in self.planned:
                yield [template], None

    def _tensors(self, pair: LayerPair, names: Sequence[str]) -> tuple[Tensors, Tensors]:
        """Read a group of both models, with the norms that it needs, in the working dtype."""
        needed = self.layout.needed(names) if self.residual != "none" else list(names)
        sides = []
        for model, index in ((self.reference, pair.reference), (self.other, pair.other)):
            sides.append(self._read(model, needed, index))
        return sides[0], sides[1]

    def _read(self, model: ModelTensors, names: Sequence[str], index: int | None) -> Tensors:
        result = {}
        for name in names:
            x = self._raw(model, name, index)
            if x is not None:
                if model is self.other and self.stored is None:
                    self.stored = x.dtype
                result[name] = x.to(device=self.device, dtype=working_dtype(x.dtype))
        return result

    def _raw(self, model: ModelTensors, name: str, index: int | None) -> torch.Tensor | None:
        x = model.read(name, index)
        if x is not None:
            digests = self.fingerprints[0 if model is self.other else 1]
            if (name, index) not in digests:
                digests[name, index] = fingerprint(x)
            pattern = self.layout.patterns.get(name)
            if LAYER in name and pattern is not None and set(pattern.axes) <= set(self.sizes):
                load = model.load(name, index)
                assert load is not None
                check_shape(x, load, pattern.shape(self.sizes))
        return x

    def _chunks(self, template: str) -> Iterator[tuple[Tensors, Tensors]]:
        """Yield a tensor outside of the layers in pieces of corresponding rows, with its norm."""
        pattern = self.layout.patterns.get(template)
        needed = [name for name in self.layout.needed([template]) if name != template]
        extras = [self._read(model, needed, None) for model in (self.reference, self.other)]
        whole = [self._raw(model, template, None) for model in (self.reference, self.other)]
        assert whole[0] is not None and whole[1] is not None
        x, y = whole[0], whole[1]
        if pattern is None or pattern.dims[0] in (("e",), ("~e",), ("t",), ("~t",)):
            pieces: Iterator[tuple[torch.Tensor, torch.Tensor]] = iter([(x, y)])
        else:
            if pattern.dims[0] == ("v",):
                rows = self._matching_rows(len(x), len(y))
            elif x.shape == y.shape:
                rows = (torch.arange(len(x)), torch.arange(len(x)))
            else:
                count = min(len(x), len(y))
                self.reference.context.warn_once(
                    f"{self.other.model}: {template} has {len(y)} rows, {len(x)} in the reference; "
                    f"the residual stream is matched on the first {count}"
                )
                rows = (torch.arange(count), torch.arange(count))
            pieces = (
                (x[a], y[b]) for a, b in zip(rows[0].split(ROWS), rows[1].split(ROWS), strict=True)
            )
        for a, b in pieces:
            yield tuple(
                {**extra, template: piece.to(device=self.device, dtype=working_dtype(piece.dtype))}
                for extra, piece in zip(extras, (a, b), strict=True)
            )  # type: ignore[misc]  # two sides

    def _matching_rows(self, *sizes: int) -> Rows:
        if self._rows is None:
            first, second = self.reference.checkpoint, self.other.checkpoint
            count = (sizes[0], sizes[1])
            self._rows = matching_rows(self.reference.context, first, second, count)
            if len(self._rows[0]) < max(sizes):
                run.current().note(
                    str(self.other.model),
                    f"{len(self._rows[0])} of {sizes[1]} rows of its vocabulary are in the "
                    "reference's as well",
                )
        return self._rows


_ARTICLE = {"permutation": "a permutation", "orthogonal": "an orthogonal"}


def _squares(
    reference: torch.Tensor, other: torch.Tensor, moved: torch.Tensor
) -> tuple[float, float, float]:
    """Squared distances before and after, and the square of the reference."""
    before, after = ((reference - x).square().sum() for x in (other, moved))
    return float(before), float(after), float(reference.square().sum())


def _unit(first: float, second: float) -> float:
    return 1 / (first * second) if first > 0 and second > 0 else 0.0


def outer_templates(model: ModelTensors) -> list[str]:
    """Templates outside of the layers that the residual stream may change, with biases."""
    layout = model.stream.layout
    names = [*layout.patterns, *model.reader_biases()]
    return list(dict.fromkeys(name for name in names if LAYER not in name))


def layout_for(model: ModelTensors, planned: frozenset[str]) -> StreamLayout:
    """Return a model's layout with the norms carried that some planned reader has no bias for."""
    layout = model.stream.layout
    carried = {
        norm
        for norm, readers in layout.readers.items()
        if layout.layer_norm and any(r in planned and bias_of(r) not in planned for r in readers)
    }
    return replace(layout, carried=frozenset(carried))
