"""Random elements of the symmetries that the data files declare."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from mergekit_rotation.architecture import Block, Family, find_family
from mergekit_rotation.symmetry import (
    AttentionLayout,
    ExpertLayout,
    Group,
    Pattern,
    Permute,
    Rotate,
    Sign,
    Transformation,
    act,
)

LAYER = "${layer_index}"
PARTS = ("heads", "qk", "vo", "f", "x")
State = dict[str, torch.Tensor]


def element(
    block: Block,
    seed: int,
    parts: Collection[str] = PARTS,
    group: Group | None = None,
) -> Transformation:
    """Draw a random element of what a block declares; `group` in place of that of queries."""
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
            result.append(Rotate("vo", layout.value_output.sample(kv, generator), per="kv"))
    elif isinstance(layout, ExpertLayout):
        experts, f, per = sizes["x"], sizes["f"], sizes["x"] // layout.groups
        if "x" in parts:
            order = torch.arange(experts).view(layout.groups, per).roll(1, 0).roll(1, 1)
            result.append(Permute("x", order.flatten()))
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
    """Map template to (name, pattern) of what a model has of one block of one layer."""
    found = {}
    for template, pattern in block.layout.patterns.items():
        name = stored(family, template, index, state)
        if name:
            found[template] = (name, pattern)
        else:
            assert template in block.optional, f"{template} of layer {index} is missing"
    return found


def moved(
    state: State,
    config: Any,
    family: Family,
    element_of: Callable[[Block, int], Transformation],
    forget: str | None = None,
) -> State:
    """Return a state dict with an element applied to every block of every layer."""
    result = dict(state)
    for index in range(config.num_hidden_layers):
        for block in present(family, config, index, state):
            transformation = element_of(block, index)
            for template, (name, pattern) in legs(family, block, index, state).items():
                if template != forget:
                    result[name] = act(transformation, result[name], pattern, block.layout.sizes)
    return result


def scrambled(state: State, config: Any, model_class: str, seed: int) -> State:
    """Return a twin of a model, computed in float64, in the dtypes that it came in."""
    family = find_family(config, model_class)
    assert family is not None
    exact = {name: x.double() if x.is_floating_point() else x for name, x in state.items()}
    twin = moved(exact, config, family, lambda block, index: element(block, 1000 * seed + index))
    return {name: x.to(state[name].dtype).contiguous() for name, x in twin.items()}


def reordered(state: State, config: Any, model_class: str, seed: int) -> State:
    """Return a twin whose residual stream is in another order."""
    family = find_family(config, model_class)
    assert family is not None
    size = family.layer(config).sizes["e"]
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    result = dict(state)
    for template, pattern in family.stream_of(model_class).layout.patterns.items():
        layers = range(config.num_hidden_layers) if LAYER in template else (0,)
        for name in filter(None, (stored(family, template, i, state) for i in layers)):
            for dim in (pattern.dim_of(axis) for axis in ("e", "t")):
                if dim is not None:
                    result[name] = result[name].index_select(dim, order)
    return {name: x.contiguous() for name, x in result.items()}
