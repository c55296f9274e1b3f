"""The tensors of two models that are compared: read in groups, a few rows at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from mergekit_rotation.architecture import LAYER
from mergekit_rotation.graph import run
from mergekit_rotation.graph.block import BlockSpec
from mergekit_rotation.graph.moving import ROWS, Fingerprints, fingerprint
from mergekit_rotation.graph.reading import ModelTensors
from mergekit_rotation.graph.tasks import check_shape
from mergekit_rotation.graph.vocabulary import Rows, matching_rows
from mergekit_rotation.symmetry import (
    StreamLayout,
    StreamMap,
    bias_of,
    into_stream,
    product_dtype,
)

Tensors = dict[str, torch.Tensor]
#: stands for the layers of a norm that belongs to none
OUTER = (-1, -1)


@dataclass(frozen=True)
class LayerPair:
    """A layer of the reference, the layer of the other model that it is paired with, and blocks."""

    reference: int
    other: int
    blocks: tuple[BlockSpec, ...]
    label: str

    @property
    def indices(self) -> tuple[int, int]:
        """The layer of the reference and that of the other model."""
        return self.reference, self.other


class Sides:
    """A reference and another model, tensor by tensor.

    Parameters
    ----------
    reference, other : ModelTensors
    planned : frozenset of str
        Templates of the tensors that the merge will write.
    with_stream : bool
        Whether the residual stream takes part, or heads and neurons alone.
    stored : torch.dtype, optional
        Precision in which moved tensors will be stored; that of the input if None.
    device : torch.device
    """

    def __init__(
        self,
        reference: ModelTensors,
        other: ModelTensors,
        planned: frozenset[str],
        with_stream: bool,
        stored: torch.dtype | None,
        device: torch.device,
    ):
        self.reference, self.other = reference, other
        self.planned = planned
        self.with_stream = with_stream
        self.stored = stored
        self.device = device
        self.stream = reference.stream
        self.layout = layout_for(reference, planned)
        self.sizes = reference.layer.sizes
        self._rows: Rows | None = None
        #: digests of all tensors that were read, of the other model and of the reference
        self.fingerprints: tuple[Fingerprints, Fingerprints] = ({}, {})

    def outer_sides(
        self, template: str, stream: StreamMap | None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pieces of a tensor outside of the layers in both models, norms folded."""
        for reference, other in self.chunks(template):
            x = into_stream(reference, [template], self.layout, None)[template]
            yield x, into_stream(other, [template], self.layout, stream)[template]

    def same_outside(self, pairs: Sequence[LayerPair]) -> bool:
        """Tell whether embeddings, head and all norms are equal.

        Then the best map is the identity, because it solves M = E^T E + ... .
        """
        norms = [n for n in self.layout.patterns if self.is_norm(n)]
        layers = [(n, p.reference, p.other) for p in pairs for n in norms if LAYER in n]
        outer = [(template, None, None) for template in self.outer_templates()]
        for name, a, b in [*layers, *outer]:
            x, y = self._raw(self.reference, name, a), self._raw(self.other, name, b)
            if x is not None and (y is None or x.dtype != y.dtype or not torch.equal(x, y)):
                return False
        return True

    def dim(self, template: str) -> int | None:
        """Return the dimension along which a tensor takes the whole map of the stream, if any."""
        pattern = self.layout.patterns.get(template)
        return None if pattern is None or not pattern.signed("e") else pattern.dim_of("e")

    def is_norm(self, template: str) -> bool:
        norm = self.layout.norm_of(template)
        return norm is not None and template in (norm, bias_of(norm))

    def foldable(self, norm: str) -> bool:
        """Tell whether a norm's readers are tensors of their own (no tied head)."""
        return any(reader in self.planned for reader in self.layout.readers[norm])

    def outer_templates(self) -> list[str]:
        """Templates of the stream outside of the layers that both models have."""
        heads = [
            head
            for head in self.stream.tied
            if head in self.planned or self.layout.reads_alone(head, self.planned)
        ]
        return [
            template
            for template in outer_templates(self.reference)
            if (template not in self.stream.tied or template in heads)
            and self.reference.has(template, None)
            and self.other.has(template, None)
        ]

    def groups(self, pair: LayerPair) -> Iterator[tuple[list[str], BlockSpec | None]]:
        """Yield the names that move together in a layer: its blocks, then single tensors."""
        taken: set[str] = set()
        for spec in pair.blocks:
            names = [name for name, _ in spec.patterns]
            taken.update(names)
            yield names, spec
        if not self.with_stream:
            return
        for template in self.layout.patterns:
            if LAYER in template and template not in taken and template in self.planned:
                yield [template], None

    def tensors(self, pair: LayerPair, names: Sequence[str]) -> tuple[Tensors, Tensors]:
        """Read a group of both models, with the norms that it needs, in the working dtype."""
        needed = self.layout.needed(names) if self.with_stream else list(names)
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
                result[name] = x.to(device=self.device, dtype=product_dtype(x))
        return result

    def _raw(self, model: ModelTensors, name: str, index: int | None) -> torch.Tensor | None:
        x = model.read(name, index)
        if x is not None:
            digests = self.fingerprints[0 if model is self.other else 1]
            if (name, index) not in digests and not x.is_meta:
                digests[name, index] = fingerprint(x)
            pattern = self.layout.patterns.get(name)
            if LAYER in name and pattern is not None and set(pattern.axes) <= set(self.sizes):
                load = model.load(name, index)
                assert load is not None
                check_shape(x, load, pattern.shape(self.sizes))
        return x

    def chunks(self, template: str) -> Iterator[tuple[Tensors, Tensors]]:
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
                {**extra, template: piece.to(device=self.device, dtype=product_dtype(piece))}
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
