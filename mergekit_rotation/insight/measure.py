"""Distances and cosines between the stored tensors of two models, before and after alignment."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from mergekit.io.tasks import LoaderCache
from transformers.utils.logging import tqdm

from mergekit_rotation.architecture import LAYER
from mergekit_rotation.graph.moving import ROWS, Move
from mergekit_rotation.graph.output import Output
from mergekit_rotation.graph.reading import ModelTensors
from mergekit_rotation.graph.report import Sums
from mergekit_rotation.graph.rewriting import Rewriter
from mergekit_rotation.graph.sides import OUTER
from mergekit_rotation.graph.vocabulary import matching_rows
from mergekit_rotation.insight.solved import Solved
from mergekit_rotation.symmetry import full_precision, working_dtype


@dataclass
class Measured:
    """Sums by place.

    Attributes
    ----------
    blocks : mapping of (reference layer, layer, block) to Sums
        Block is empty for what belongs to none (norms).
    outside : mapping of template to Sums
        Embeddings, heads, and norms outside of the layers.
    left_out : list of str
        Tensors of the other model that were not compared, and why.
    """

    blocks: dict[tuple[int, int, str], Sums] = field(default_factory=dict)
    outside: dict[str, Sums] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def total(self) -> Sums:
        """Return the sums over everything."""
        return sum((*self.blocks.values(), *self.outside.values()), Sums())

    def layer(self, pair: tuple[int, int]) -> Sums:
        """Return the sums over one layer."""
        return sum((x for key, x in self.blocks.items() if key[:2] == pair), Sums())


class Meter:
    """Measures one solved pair, a tensor at a time.

    Parameters
    ----------
    solved : Solved
    """

    def __init__(self, solved: Solved):
        assert solved.whole.rewriter is not None
        self.rewriter: Rewriter = solved.whole.rewriter
        self.output: Output = solved.whole.output
        self.reference = self.output.tensors(solved.reference)
        self.other = self.output.tensors(solved.other)
        self.transformation = self.rewriter.solution.transformations.get(solved.other)
        options = self.output.context.planner.options
        self.device, self.quiet = torch.device(options.device or "cpu"), bool(options.quiet)
        self.measured = Measured()
        self._seen: set[str] = set()

    def pairs(self) -> dict[tuple[int, int], str]:
        """Return the layers that are compared, with their labels."""
        found = {}
        for layer in self.output.layers:
            pair = self.output.layer_pair(layer, self.other.model)
            if pair is not None:
                found[pair] = f"{self.output.module}.{layer.index}"
        return found

    def measure(self) -> Measured:
        """Read both models once, and return the sums."""
        with torch.no_grad(), full_precision():
            for template in sorted(self.other.infos(None)):
                sums = self._tensor(template, None)
                if sums is not None:
                    self.measured.outside[template] = sums
            title = f"Measuring {self.other.model}"
            for pair in tqdm(self.pairs(), desc=title, disable=self.quiet):
                kinds = {t: b.kind for b in self.other.blocks(pair[1]) for t in b.layout.patterns}
                for template in sorted(self.other.infos(pair[1])):
                    sums = self._tensor(template, pair)
                    if sums is not None:
                        key = (*pair, kinds.get(template, ""))
                        self.measured.blocks[key] = self.measured.blocks.get(key, Sums()) + sums
        LoaderCache().flush_all()
        self._note_unread()
        return self.measured

    def _tensor(self, template: str, pair: tuple[int, int] | None) -> Sums | None:
        """Return the sums of one tensor, or None if the two models do not both store it."""
        at, index = pair if pair is not None else (None, None)
        stored = [
            self._stored(self.reference, template, at),
            self._stored(self.other, template, index),
        ]
        if stored[1] is not None:
            self._seen.add(stored[1])
        if None in stored:
            if any(stored):
                name = self._name(template, index)
                lacking = self.reference if stored[0] is None else self.other
                self.measured.left_out.append(f"{name}: not stored in {lacking.model}")
            return None
        x, y = self.reference.read(template, at), self.other.read(template, index)
        assert x is not None and y is not None
        if not (x.is_floating_point() and y.is_floating_point()):
            return None
        move = self._move(template, pair)
        extras = {}
        for name in move.needed() if move is not None else []:
            tensor = self.other.read(name, index) if name != template else None
            if tensor is not None:
                extras[name] = tensor
        result = Sums()
        for a, b in self._pieces(template, x, y):
            result += self._compared(a, b, move, extras)
        if result == Sums() and x.numel():
            if x.shape != y.shape:
                name = self._name(template, index)
                shapes = f"{list(y.shape)}, {list(x.shape)} in the reference"
                self.measured.left_out.append(f"{name}: has shape {shapes}")
        return result

    def _compared(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        move: Move | None,
        extras: Mapping[str, torch.Tensor],
    ) -> Sums:
        work = working_dtype(x.dtype, y.dtype)
        a, b = (t.to(device=self.device, dtype=work) for t in (x, y))
        if move is None:
            return Sums.of(a, b, b)
        there = {name: t.to(self.device) for name, t in extras.items()}
        return Sums.of(a, b, move({**there, move.name: b}, work))

    def _pieces(
        self, template: str, x: torch.Tensor, y: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield corresponding parts: an embedding a few rows of the same tokens at a time."""
        pattern = self.other.stream.layout.patterns.get(template)
        if pattern is None or pattern.dims[0] != ("v",):
            if x.shape == y.shape:
                yield x, y
            return
        context = self.output.context
        checkpoints = self.reference.checkpoint, self.other.checkpoint
        rows = matching_rows(context, *checkpoints, (len(x), len(y)))
        if x.shape[1:] == y.shape[1:]:
            for i, j in zip(rows[0].split(ROWS), rows[1].split(ROWS), strict=True):
                yield x[i], y[j]

    def _move(self, template: str, pair: tuple[int, int] | None) -> Move | None:
        return self.rewriter.move(template, pair or OUTER, self.other, self.transformation)

    def _stored(self, model: ModelTensors, template: str, index: int | None) -> str | None:
        """Return the name under which a model stores a tensor of its own, not tied to another."""
        load = model.load(template, index)
        if load is None or not model.checkpoint.has(load):
            return None
        name = model.checkpoint.resolve(load)
        return None if name is not None and name in (load.tied_names or ()) else name or load.tensor

    def _name(self, template: str, index: int | None) -> str:
        return template if index is None else template.replace(LAYER, str(index))

    def _note_unread(self) -> None:
        """List the tensors that the family's data does not tell of."""
        known: set[str] = set(self._seen)
        for index in (None, *range(self.other.num_layers)):
            for info in self.other.infos(index).values():
                known |= {info.name, *(info.aliases or ()), *(info.tied_names or ())}
        for name in self.other.checkpoint.index.tensor_paths:
            if name not in known and known.isdisjoint(self.other.checkpoint.converted(name)):
                self.measured.left_out.append(f"{name}: unknown to the family")
