"""A random model in exact float64, as its family declares it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from mergekit_rotation.architecture import LAYER, Block, Family
from mergekit_rotation.proof.elements import (
    State,
    element,
    layer_count,
    legs,
    moved,
    present,
    scaling,
    stored,
)
from mergekit_rotation.proof.errors import ProofError
from mergekit_rotation.proof.exact import Float64, exact_copy, outputs, randomise, run
from mergekit_rotation.symmetry import (
    Group,
    Orthogonal,
    OrthogonalFixingOnes,
    OrthogonalMap,
    Pattern,
    SignedPermutation,
    StreamLayout,
    StreamMap,
    Transformation,
    bias_of,
    into_stream,
    out_of_stream,
    target_norm,
)

#: roundings per product: a product and a sum, once in either model, and as much again in reserve
ROUNDINGS = 8


def declared_names(model: PreTrainedModel, family: Family) -> set[str]:
    """Return the names of all tensors that a model of the family may have."""
    return {
        prefix + template.replace(LAYER, str(index))
        for prefix in family.prefixes
        for template in family.stream_of(type(model).__name__).known
        for index in range(layer_count(model.config))
    }


def names_in_memory(model: PreTrainedModel, family: Family) -> dict[str, str]:
    """Map the names of a data file to those that transformers has renamed them to on loading.

    Tensors that the file does not name keep their own.
    """
    renamings = [
        conversion
        for conversion in get_model_conversion_mapping(model, add_legacy=False)
        if isinstance(conversion, WeightRenaming)
    ]
    names = {name: name for name in model.state_dict()}
    for name in declared_names(model, family) - set(names):
        renamed = name
        for renaming in renamings:
            renamed, _ = renaming.rename_source_key(renamed)
        if names.pop(renamed, None) is not None:
            names[name] = renamed
    return names


def tolerance(family: Family, config: Any, outputs: torch.Tensor, maps: int = 1) -> float:
    """Return c n eps: n products are summed between input and output, c of rounding each.

    Parameters
    ----------
    family : Family
    config : PretrainedConfig
    outputs : Tensor
        Of a model in float64.
    maps : int
        How many products of the stream's width there are in a layer.
    """
    sizes = family.layer(config).sizes
    axes = [data.axis for data in family.neurons]
    width = sum(sizes[axis] for axis in axes) + sizes.get("x", 0) * sizes.get("xf", 0)
    heads = sizes.get("kv", 0) * sizes.get("g", 1) * sizes.get("qk", 0)
    n = layer_count(config) * (maps * sizes["e"] + width + heads)
    return ROUNDINGS * n * torch.finfo(torch.float64).eps * float(outputs.abs().max())


def scrambled(
    model: PreTrainedModel, family: Family, seed: int, condition: float | None = None
) -> State:
    """Return a twin of a model: tensors in its dtypes, moved in float64, by its own names.

    Parameters
    ----------
    model : PreTrainedModel
    family : Family
    seed : int
    condition : float, optional
        Of the invertible matrices that are applied to the heads as well, and the ratio of the
        largest factor of a neuron to the smallest; without it nothing is scaled.
    """
    names, state = names_in_memory(model, family), model.state_dict()
    twin = {declared: _exact(state[name]) for declared, name in names.items()}
    twin = moved(twin, model.config, family, lambda b, k: element(b, 1000 * seed + k))
    if condition is not None:
        draw = partial(scaling, condition=condition)
        twin = moved(twin, model.config, family, lambda b, k: draw(b, 1000 * seed + k))
    return {name: twin[d].to(state[name].dtype).contiguous() for d, name in names.items()}


class Subject:
    """A random model on which the declarations of a family are tried.

    Parameters
    ----------
    model : PreTrainedModel
        Its parameters are drawn anew.
    inputs : mapping of str to Tensor
    family : Family
    seed : int

    Attributes
    ----------
    state : dict of str to Tensor
        By the names that the data file uses; float64.
    other : dict of str to Tensor
        That of a second model, to whose norms the first is brought.
    base : Tensor
        The outputs, flattened.
    declared : set of str
        Names of all tensors that the model may have.
    names : dict of str to str
        See `names_in_memory`.

    Raises
    ------
    ProofError
        If the outputs are not finite.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        inputs: Mapping[str, torch.Tensor],
        family: Family,
        seed: int = 3,
    ):
        self.inputs = {name: _exact(x) for name, x in inputs.items()}
        self.family = family
        self.config: Any = model.config
        self.sizes = family.layer(self.config).sizes
        self.stream = family.stream_of(type(model).__name__)
        self.tied = bool(getattr(self.config, "tie_word_embeddings", False))
        states = []
        for number in (seed + 1, seed):
            randomise(model, number)
            states.append({name: _exact(x) for name, x in model.state_dict().items()})
        self._model = exact_copy(model)
        self.declared = declared_names(model, family)
        self.names = names_in_memory(model, family)
        self.other, self.state = (
            {declared: state[name] for declared, name in self.names.items()} for state in states
        )
        self.base = self.outputs(self.state)
        if not bool(self.base.isfinite().all()):
            raise ProofError("the outputs of a random model are not finite")

    def outputs(self, state: State) -> torch.Tensor:
        """Return the outputs with other tensors, flattened."""
        self._model.load_state_dict({name: state[ours] for ours, name in self.names.items()})
        with Float64():
            return outputs(self._model, self.inputs)

    @cached_property
    def headless(self) -> bool:
        """Whether the outputs are the residual stream itself, which its maps move."""
        with Float64():
            return "logits" not in run(self._model, self.inputs)

    def difference(self, state: State) -> float:
        """Return the largest change of the outputs with other tensors."""
        return float((self.outputs(state) - self.base).abs().max())

    # -- the blocks -------------------------------------------------------------------------------

    def blocks(self, index: int) -> list[Block]:
        """Return the blocks that a layer has."""
        return present(self.family, self.config, index, self.state)

    def legs(self, block: Block, index: int) -> dict[str, tuple[str, Pattern]]:
        """Map template to (name, pattern) of what the model has of a block of a layer."""
        return legs(self.family, block, index, self.state)

    def moved(
        self, element_of: Callable[[Block, int], Transformation], forget: str | None = None
    ) -> State:
        """Return the tensors with an element applied to every block of every layer."""
        return moved(self.state, self.config, self.family, element_of, forget)

    def tolerance(self, condition: float = 1.0) -> float:
        """Return what rounding can change, see `tolerance`.

        Parameters
        ----------
        condition : float
            Of the maps that scale: each of up to three factors, which rounding goes through, is
            multiplied by at most its root.
        """
        return condition**1.5 * tolerance(self.family, self.config, self.base)

    # -- the residual stream ----------------------------------------------------------------------

    def name(self, template: str, index: int | None) -> str:
        """Return the name that a template has in the model; empty if it is not there."""
        return stored(self.family, template, index or 0, self.state)

    def tensors(self, state: State, index: int | None) -> State:
        """Return tensors by template, of one layer or (None) of the rest; without tied heads."""
        return {
            template: state[name]
            for template in self.stream.known
            if (LAYER in template) == (index is not None)
            and not (self.tied and template in self.stream.tied)
            and (name := self.name(template, index))
        }

    def exact_maps(self) -> list[str]:
        """Return the declared maps that the model allows as it is: a tied head needs embeddings."""
        tied_head = self.tied and any(self.name(head, None) for head in self.stream.tied)
        return [kind for kind in self.stream.maps if kind == "permutation" or not tied_head]

    def draw(self, kind: str, group: Callable[[int], Group] | None = None) -> StreamMap:
        """Draw a random map of the stream, ``orthogonal`` (of another group) or ``permutation``."""
        generator = torch.Generator().manual_seed(7)
        size, layer_norm = self.sizes["e"], self.stream.layout.layer_norm
        if kind == "orthogonal":
            group = group or (OrthogonalFixingOnes if layer_norm else Orthogonal)
            return OrthogonalMap(group(size).sample(1, generator)[0])
        sign = 2.0 * torch.randint(2, (size,), generator=generator).double() - 1
        if layer_norm:
            sign = -torch.ones(size, dtype=torch.float64)
        return SignedPermutation(torch.randperm(size, generator=generator), sign)

    def moved_stream(
        self, stream: StreamMap, forget: str | None = None, fold: bool = True
    ) -> State:
        """Return the tensors in new coordinates of the stream.

        Parameters
        ----------
        stream : StreamMap
        forget : str, optional
            Template of a tensor that is left as it is.
        fold : bool
            Whether the model is brought to the norms of the other one.

        Raises
        ------
        ProofError
            If a tensor does not have the width of the stream, or a norm is missing.
        """
        state = dict(self.state)
        for index in (*range(layer_count(self.config)), None):
            tensors, others = (self.tensors(x, index) for x in (self.state, self.other))
            layout = self._layout(tensors)
            self._check_width(tensors, layout)
            targets = {}
            for norm, readers in layout.readers.items():
                if norm in tensors:
                    brought = fold and any(reader in tensors for reader in readers)
                    reference = layout.norm(norm, others) if brought else None
                    targets[norm] = target_norm(layout.norm(norm, tensors), reference, stream)
                elif present := [reader for reader in readers if reader in tensors]:
                    raise ProofError(f"{norm}: the model has no such norm for {present[0]} to read")
            coordinates = into_stream(tensors, tensors, layout, stream)
            result = out_of_stream(coordinates, tensors, tensors, layout, stream, targets)
            state |= {self.name(t, index): x for t, x in result.items() if t != forget}
        for head, embedding in self.stream.tied.items():
            if self.tied and self.name(head, None):
                state[self.name(head, None)] = state[self.name(embedding, None)]
        return state

    def stream_tolerance(self) -> float:
        """Return c n eps, with the products that a map adds and the condition of the norms."""
        weights = [
            (w + self.stream.layout.offset).abs()
            for state in (self.state, self.other)
            for index in (*range(layer_count(self.config)), None)
            for norm, w in self.tensors(state, index).items()
            if norm in self.stream.layout.readers
        ]
        condition = max((float(w.max() / w.min()) for w in weights), default=1.0)
        return condition * tolerance(self.family, self.config, self.base, maps=3)

    def _layout(self, tensors: State) -> StreamLayout:
        """Return the layout with the norms carried that some reader has no bias for."""
        layout = self.stream.layout
        carried = {
            norm
            for norm, readers in layout.readers.items()
            if any(r in tensors and bias_of(r) not in tensors for r in readers)
        }
        return replace(layout, carried=frozenset(carried))

    def _check_width(self, tensors: State, layout: StreamLayout) -> None:
        for template, pattern in layout.patterns.items():
            dim = pattern.dim_of("e")
            if template in tensors and dim is not None:
                shape = tuple(tensors[template].shape)
                if len(shape) <= dim or shape[dim] != self.sizes["e"]:
                    raise ProofError(
                        f"{template}: shape {shape}, where its pattern {pattern.text!r} and "
                        f"{self.sizes['e']} coordinates of the stream are expected"
                    )


def _exact(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x.clone()
