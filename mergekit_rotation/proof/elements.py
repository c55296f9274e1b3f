"""Random elements of the symmetries that the data files declare."""

from collections.abc import Callable, Collection, Iterator, Mapping
from string import ascii_lowercase
from typing import Any

import torch

from mergekit_rotation.architecture import LAYER, Block, Family
from mergekit_rotation.proof.errors import ProofError
from mergekit_rotation.symmetry import (
    AttentionLayout,
    DirectSum,
    ExpertLayout,
    Group,
    Linear,
    Orthogonal,
    Pattern,
    PatternError,
    Permute,
    Piece,
    PlaneRotations,
    Rotate,
    Scale,
    Sign,
    Transformation,
    act,
    base_axis,
    free_parts,
)

#: kinds of symmetries of the blocks, by the axis that they act on
PARTS = ("heads", "qk", "vo", "f", "x")
#: of the maps that scale
CONDITION = 4.0
State = dict[str, torch.Tensor]


def element(
    block: Block,
    seed: int,
    parts: Collection[str] = PARTS,
    group: Group | None = None,
) -> Transformation:
    """Draw a random element of what a block declares.

    Parameters
    ----------
    block : Block
    seed : int
    parts : collection of str
        Which of `PARTS` it moves.
    group : Group, optional
        In place of those of the heads.
    """
    generator = torch.Generator().manual_seed(100 + seed)
    sizes, layout = block.layout.sizes, block.layout
    result: list[Any] = []
    if isinstance(layout, AttentionLayout):
        kv, m = sizes["kv"], sizes.get("g", 1)
        if "heads" in parts and block.heads:
            result.append(Permute("kv", torch.arange(kv).roll(1)))
            if m > 1:
                order = [torch.randperm(m, generator=generator) for _ in range(kv)]
                order[0] = torch.arange(m).roll(1)
                result.append(Permute("g", torch.stack(order), per="kv"))
        if "qk" in parts:
            chosen = group or layout.query_key
            result.append(Rotate("qk", chosen.sample(kv, generator), per="kv"))
        if "vo" in parts:
            chosen = group or layout.value_output
            result.append(Rotate("vo", chosen.sample(kv, generator), per="kv"))
    elif isinstance(layout, ExpertLayout):
        experts, f, per = sizes["x"], sizes["f"], sizes["x"] // layout.groups
        if "x" in parts:
            chunks = torch.arange(experts).view(layout.groups, per)
            result.append(Permute("x", chunks.roll(1, 0).roll(1, 1).flatten()))
        if "f" in parts:
            order = [torch.randperm(f, generator=generator) for _ in range(experts)]
            sign = 2.0 * torch.randint(2, (experts, f), generator=generator) - 1.0
            result += [Permute("f", torch.stack(order), per="x"), Sign("f", sign, per="x")]
    elif "f" in parts:
        f = sizes["f"]
        result.append(Permute("f", torch.randperm(f, generator=generator)))
        sign = 2.0 * torch.randint(2, (f,), generator=generator) - 1.0
        result.append(Sign("f", sign))
    return tuple(result)


def layer_count(config: Any) -> int:
    """Return the number of layers of a model's text part."""
    return int(config.get_text_config().num_hidden_layers)


def invertible(
    group: Group, batch: int, generator: torch.Generator, condition: float
) -> torch.Tensor:
    """Draw invertible matrices that may act where a group does, (batch, n, n), float64."""
    if isinstance(group, DirectSum):
        parts = [invertible(block, batch, generator, condition) for block in group.blocks]
        return torch.stack([torch.block_diag(*one) for one in zip(*parts, strict=True)])
    matrix = group.sample(batch, generator)
    if isinstance(group, Orthogonal):
        values = condition ** torch.linspace(-0.5, 0.5, group.n, dtype=torch.float64)
        return matrix * values @ group.sample(batch, generator)
    if isinstance(group, PlaneRotations):
        exponent = torch.rand(batch, len(group.pairs), generator=generator, dtype=torch.float64)
        scale = torch.ones(batch, group.n, dtype=torch.float64)
        for k, pair in enumerate(group.pairs):
            scale[:, list(pair)] = condition ** (exponent[:, k, None] - 0.5)
        return scale[:, :, None] * matrix
    return matrix


def scaling(
    block: Block,
    seed: int,
    parts: Collection[str] = ("qk", "vo", "f"),
    group: Group | None = None,
    condition: float = CONDITION,
) -> Transformation:
    """Draw a random element of the scalings that a block declares; `group` for queries."""
    generator = torch.Generator().manual_seed(200 + seed)
    sizes, layout = block.layout.sizes, block.layout
    powers = {axis for p in layout.patterns.values() for one in p.powers for axis in one}
    if isinstance(layout, AttentionLayout):
        groups = {"qk": group or layout.query_key, "vo": layout.value_output}
        result = []
        for axis in sorted(powers & {*parts}):
            if axis == "qk" and not layout.query_key.cells and group is None:
                continue
            matrix = invertible(groups[axis], sizes["kv"], generator, condition)
            result.append(Linear(axis, matrix, torch.linalg.inv(matrix).mT, "kv"))
        return tuple(result)
    if "f" not in powers & {*parts}:
        return ()
    per = "x" if isinstance(layout, ExpertLayout) else None
    shape = (sizes["f"],) if per is None else (sizes["x"], sizes["f"])
    exponent = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
    return (Scale("f", condition**exponent, per),)


def stored(family: Family, template: str, index: int, state: Mapping[str, torch.Tensor]) -> str:
    """Return the name that a template has in a state dict; empty if it is not there."""
    local = template.replace(LAYER, str(index))
    return next((p + local for p in family.prefixes if p + local in state), "")


def present(family: Family, config: Any, index: int, state: State) -> list[Block]:
    """Return the blocks that a layer has."""
    blocks = family.layer(config, index).blocks
    found = {t for b in blocks for t in b.layout.patterns if stored(family, t, index, state)}
    return [block for block in blocks if not block.absent(found)]


def legs(family: Family, block: Block, index: int, state: State) -> dict[str, tuple[str, Pattern]]:
    """Map template to (name, pattern) of what a model has of one block of one layer.

    Raises
    ------
    ProofError
        If a tensor that is not optional is missing.
    """
    found = {}
    for template, pattern in block.layout.patterns.items():
        name = stored(family, template, index, state)
        if name:
            found[template] = (name, pattern)
        else:
            if template not in block.optional:
                raise ProofError(f"{template}: layer {index} of the model has no such tensor")
    return found


def shifted(
    state: State,
    config: Any,
    family: Family,
    seed: int,
    *,
    compensated: bool = True,
    free: bool = True,
) -> State:
    """Return a state dict with vectors added to the biases of keys and values.

    Parameters
    ----------
    state : dict of str to Tensor
    config : PretrainedConfig
    family : Family
    seed : int
    compensated : bool
        Whether what the biases of values add to the output is taken from its own bias.
    free : bool
        Whether to add what the family declares to be free, or to the rest of the keys' biases.

    Raises
    ------
    ProofError
        If the bias that has to make up for those of the values is missing.
    """
    generator = torch.Generator().manual_seed(300 + seed)
    result = dict(state)
    for index in range(layer_count(config)):
        for block in present(family, config, index, state):
            layout = block.layout
            if not isinstance(layout, AttentionLayout):
                continue
            tensors = legs(family, block, index, state)
            for template, (name, pattern) in tensors.items():
                pieces = pattern.split(result[name], layout.sizes)
                values = [piece.tensor.clone() for piece in pieces]
                for number, axis, mask in _shifts(template, layout, free):
                    noise = torch.randn(len(mask), generator=generator, dtype=torch.float64)
                    change = (noise * mask).expand(layout.sizes["kv"], -1)
                    values[number] += change
                    if axis == "vo" and compensated:
                        bias = stored(family, block.output_biases[template], index, state)
                        if not bias:
                            raise ProofError(f"{name}: layer {index} has no bias to fold it into")
                        for other, their in tensors.values():
                            for piece in their.split(result[other], layout.sizes):
                                if piece.powers.get("vo") == -1:
                                    result[bias] = result[bias] - _added(piece, change)
                result[name] = pattern.join(values, layout.sizes)
    return result


def _shifts(
    template: str, layout: AttentionLayout, free: bool
) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Yield the pieces of a leg that `shifted` changes, their axes, and masks, (n,)."""
    parts = {(k, axis): mask for k, axis, mask in free_parts(template, layout)}
    if free:
        yield from ((k, axis, mask) for (k, axis), mask in parts.items())
        return
    pattern = layout.patterns[template]
    for number, (axes, powers) in enumerate(zip(pattern.pieces, pattern.powers, strict=True)):
        if powers.get("qk") == -1 and {base_axis(name) for name in axes} == {"kv", "qk"}:
            mask = 1 - parts.get((number, "qk"), torch.zeros(layout.sizes["qk"]))
            if bool(mask.any()):
                yield number, "qk", mask


def _added(piece: Piece, change: torch.Tensor) -> torch.Tensor:
    """What a change of all values, (kv, vo), adds to the output, (e,)."""
    letter = dict(zip(dict.fromkeys(map(base_axis, piece.axes)), ascii_lowercase, strict=False))
    own = "".join(letter[base_axis(name)] for name in piece.axes)
    left = "".join(x for a, x in letter.items() if a not in ("kv", "g", "vo"))
    return torch.einsum(f"{own},{letter['kv']}{letter['vo']}->{left}", piece.tensor, change)


def moved(
    state: State,
    config: Any,
    family: Family,
    element_of: Callable[[Block, int], Transformation],
    forget: str | None = None,
) -> State:
    """Return a state dict with an element applied to every block of every layer.

    Parameters
    ----------
    state : dict of str to Tensor
    config : PretrainedConfig
    family : Family
    element_of : callable
        The element for a block of a layer.
    forget : str, optional
        Template of a leg that is left as it is.

    Raises
    ------
    ProofError
        If a tensor is missing or does not have the shape of its pattern.
    """
    result = dict(state)
    for index in range(layer_count(config)):
        for block in present(family, config, index, state):
            transformation = element_of(block, index)
            for template, (name, pattern) in legs(family, block, index, state).items():
                if template == forget:
                    continue
                try:
                    result[name] = act(transformation, result[name], pattern, block.layout.sizes)
                except PatternError as problem:
                    raise ProofError(
                        f"{name}: {problem}, by the pattern {pattern.text!r}"
                    ) from None
    return result
