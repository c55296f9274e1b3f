"""Change the coordinates of a model without changing its function, written out per layout.

This is a second opinion on the layouts and symmetries: it shares no code with the package it
tests. Each layer is read into plain arrays with one axis per KV group (`g`), query head of the
group (`m`) and head dim (`d`), changed there in float64, and written back.

    q [g, m, d, D]   k [g, d, D]   v [g, d, D]   o [D, g, m, d]   biases without the last axis
    gate, up [I, D]  down [D, I]
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

StateDict = dict[str, Tensor]

PARTS = ("query_key", "value_output", "heads", "neurons")

ROTARY = {
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "phi",
    "phi3",
    "gpt_neox",
    "starcoder2",
}
QUERY_KEY_NORM = {"qwen3", "gemma3"}

_LLAMA = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_BERT = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "o": "attention.output.dense",
    "up": "intermediate.dense",
    "down": "output.dense",
}
NAMES: dict[str, dict[str, str]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"), _LLAMA),
    "phi": {
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.dense",
        "up": "mlp.fc1",
        "down": "mlp.fc2",
    },
    "phi3": {
        "qkv": "self_attn.qkv_proj",
        "o": "self_attn.o_proj",
        "gate_up": "mlp.gate_up_proj",
        "down": "mlp.down_proj",
    },
    "gpt2": {
        "qkv": "attn.c_attn",
        "o": "attn.c_proj",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    },
    "gpt_neox": {
        "qkv": "attention.query_key_value",
        "o": "attention.dense",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    },
    "starcoder2": {
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    },
    "bert": _BERT,
    "roberta": _BERT,
    "distilbert": {
        "q": "attention.q_lin",
        "k": "attention.k_lin",
        "v": "attention.v_lin",
        "o": "attention.out_lin",
        "up": "ffn.lin1",
        "down": "ffn.lin2",
    },
}
"""Names of the linear layers, relative to the layer; `gate` only where the MLP is gated."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the attention of a model."""

    groups: int
    per_group: int
    width: int
    rotary: int

    @classmethod
    def of(cls, config: Any, family: str) -> "Sizes":
        """Sizes from a config; `head_dim` and the number of KV heads may be absent or None."""
        heads = config.num_attention_heads
        groups = getattr(config, "num_key_value_heads", None) or heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        rotary = 0
        if family in ROTARY:
            rope = config.rope_parameters
            nested = [entry for entry in rope.values() if isinstance(entry, dict)]
            factors = {e.get("partial_rotary_factor") or 1.0 for e in nested or [rope]}
            if len(factors) != 1:
                raise ValueError("layer types with different rotary widths are not handled")
            rotary = int(width * factors.pop())
        return cls(groups, heads // groups, width, rotary)


@dataclass
class Layer:
    """The weights of one layer in float64, in the shapes given at the top of this module."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    up: Tensor
    down: Tensor
    gate: Tensor | None = None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    up_bias: Tensor | None = None
    gate_bias: Tensor | None = None


# Reading and writing


def _prefixes(state: Mapping[str, Tensor], family: str) -> list[str]:
    """The prefixes, ending in a dot, of all layers in order."""
    tail = re.escape("." + NAMES[family]["o"] + ".weight")
    found = {}
    for name in state:
        if match := re.fullmatch(rf"((?:.*\.)?(?:layers|layer|h)\.(\d+)){tail}", name):
            found[int(match[2])] = match[1] + "."
    if sorted(found) != list(range(len(found))) or not found:
        raise ValueError(f"no complete run of {family} layers in the state dict")
    return [found[index] for index in sorted(found)]


def _load(state: Mapping[str, Tensor], name: str, family: str) -> tuple[Tensor, Tensor | None]:
    """Weight as [out, in] and bias of a linear layer, in float64."""
    weight = state[name + ".weight"].to(torch.float64)
    bias = state.get(name + ".bias")
    if family == "gpt2":  # Conv1D keeps [in, out]
        weight = weight.T
    return weight.clone(), None if bias is None else bias.to(torch.float64).clone()


def _store(
    state: StateDict, name: str, family: str, weight: Tensor, bias: Tensor | None = None
) -> None:
    """Inverse of `_load`; a bias of None leaves the stored bias alone."""
    if family == "gpt2":
        weight = weight.T
    old = state[name + ".weight"]
    state[name + ".weight"] = weight.contiguous().to(old.dtype)
    if bias is not None:
        state[name + ".bias"] = bias.contiguous().to(state[name + ".bias"].dtype)


def _split_qkv(rows: Tensor, sizes: Sizes, family: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [*, ...] of a fused projection as q [g, m, d, ...], k and v [g, d, ...]."""
    g, m, d = sizes.groups, sizes.per_group, sizes.width
    tail = rows.shape[1:]
    if family == "gpt_neox":  # rows [head][q, k, v][d]
        per_head = rows.view(g, 3, d, *tail)
        return per_head[:, 0].reshape(g, 1, d, *tail), per_head[:, 1], per_head[:, 2]
    # gpt2 and phi3: rows [all q | all k | all v]
    q = rows[: g * m * d].view(g, m, d, *tail)
    k = rows[g * m * d : g * m * d + g * d].view(g, d, *tail)
    v = rows[g * m * d + g * d :].view(g, d, *tail)
    return q, k, v


def _fuse_qkv(q: Tensor, k: Tensor, v: Tensor, family: str) -> Tensor:
    """Inverse of `_split_qkv`."""
    if family == "gpt_neox":
        heads = []
        for h in range(k.shape[0]):
            heads += [q[h, 0], k[h], v[h]]
        return torch.cat(heads)
    return torch.cat([q.flatten(0, 2), k.flatten(0, 1), v.flatten(0, 1)])


def _read(state: Mapping[str, Tensor], prefix: str, family: str, sizes: Sizes) -> Layer:
    """One layer of a state dict."""
    names = NAMES[family]
    g, m, d = sizes.groups, sizes.per_group, sizes.width
    biases: dict[str, Tensor | None] = {}

    if "qkv" in names:
        weight, bias = _load(state, prefix + names["qkv"], family)
        q, k, v = _split_qkv(weight, sizes, family)
        if bias is not None:
            biases["q_bias"], biases["k_bias"], biases["v_bias"] = _split_qkv(bias, sizes, family)
    else:
        q, q_bias = _load(state, prefix + names["q"], family)
        k, k_bias = _load(state, prefix + names["k"], family)
        v, v_bias = _load(state, prefix + names["v"], family)
        q, k, v = q.view(g, m, d, -1), k.view(g, d, -1), v.view(g, d, -1)
        biases["q_bias"] = None if q_bias is None else q_bias.view(g, m, d)
        biases["k_bias"] = None if k_bias is None else k_bias.view(g, d)
        biases["v_bias"] = None if v_bias is None else v_bias.view(g, d)
    o, _ = _load(state, prefix + names["o"], family)
    o = o.view(-1, g, m, d)

    gate = None
    if "gate_up" in names:  # rows [gate | up]
        weight, _ = _load(state, prefix + names["gate_up"], family)
        gate, up = weight.chunk(2)
    else:
        up, biases["up_bias"] = _load(state, prefix + names["up"], family)
        if "gate" in names:
            gate, biases["gate_bias"] = _load(state, prefix + names["gate"], family)
    down, _ = _load(state, prefix + names["down"], family)
    return Layer(q, k, v, o, up, down, gate, **biases)


def _write(state: StateDict, prefix: str, family: str, layer: Layer) -> None:
    """Inverse of `_read`. The biases of o and down never change."""
    names = NAMES[family]

    def rows(weight: Tensor) -> Tensor:
        return weight.flatten(0, -2)

    def flat(bias: Tensor | None) -> Tensor | None:
        return None if bias is None else bias.flatten()

    if "qkv" in names:
        weight = _fuse_qkv(layer.q, layer.k, layer.v, family)
        bias = None
        if layer.q_bias is not None:
            bias = _fuse_qkv(layer.q_bias, layer.k_bias, layer.v_bias, family)
        _store(state, prefix + names["qkv"], family, weight, bias)
    else:
        _store(state, prefix + names["q"], family, rows(layer.q), flat(layer.q_bias))
        _store(state, prefix + names["k"], family, rows(layer.k), flat(layer.k_bias))
        _store(state, prefix + names["v"], family, rows(layer.v), flat(layer.v_bias))
    _store(state, prefix + names["o"], family, layer.o.flatten(1))

    if "gate_up" in names:
        _store(state, prefix + names["gate_up"], family, torch.cat([layer.gate, layer.up]))
    else:
        _store(state, prefix + names["up"], family, layer.up, layer.up_bias)
        if "gate" in names:
            _store(state, prefix + names["gate"], family, layer.gate, layer.gate_bias)
    _store(state, prefix + names["down"], family, layer.down)


# Random elements of the groups


def _generator(seed: int, layer: int, part: str) -> torch.Generator:
    """A generator of its own for every layer and part, so that parts can be left out."""
    return torch.Generator().manual_seed((seed * 1000 + layer) * 10 + PARTS.index(part))


def _orthogonal(size: int, sign: int, generator: torch.Generator) -> Tensor:
    """A random orthogonal matrix with determinant `sign`."""
    square = torch.randn(size, size, generator=generator, dtype=torch.float64)
    matrix, triangle = torch.linalg.qr(square)
    matrix = matrix * triangle.diagonal().sign()
    if size and torch.linalg.det(matrix).sign() != sign:
        matrix[0] = -matrix[0]
    return matrix


def _phases(sizes: Sizes, sign: int, generator: torch.Generator) -> Tensor:
    """A phase for every frequency pair (i, i + r/2), and O(d - r) on the dims without rotary."""
    r, d = sizes.rotary, sizes.width
    matrix = torch.zeros(d, d, dtype=torch.float64)
    for i in range(r // 2):
        j = i + r // 2
        angle = 2 * math.pi * torch.rand(1, generator=generator, dtype=torch.float64).item()
        matrix[i, i], matrix[i, j] = math.cos(angle), -math.sin(angle)
        matrix[j, i], matrix[j, j] = math.sin(angle), math.cos(angle)
    matrix[r:, r:] = _orthogonal(d - r, sign, generator)
    return matrix


def _signs(size: int, generator: torch.Generator) -> Tensor:
    """Random signs."""
    return 2.0 * torch.randint(0, 2, (size,), generator=generator).to(torch.float64) - 1.0


def _pair_signs(sizes: Sizes, generator: torch.Generator) -> Tensor:
    """One sign for every frequency pair (i, i + d/2)."""
    if sizes.rotary != sizes.width:
        raise ValueError("query and key norm with a partial rotary width is not handled")
    signs = _signs(sizes.width // 2, generator)
    return torch.diag(torch.cat([signs, signs]))


def _moved_permutation(size: int, generator: torch.Generator) -> Tensor:
    """A random permutation other than the identity, where there is one."""
    while True:
        order = torch.randperm(size, generator=generator)
        if size < 2 or not torch.equal(order, torch.arange(size)):
            return order


# The parts. `sign` is the determinant wanted in the first KV group; it alternates over the groups.


def _rotate_query_key(layer: Layer, g: int, matrix: Tensor) -> None:
    """Apply an orthogonal matrix to the key rows of a KV group and the rows of all its queries."""
    for h in range(layer.q.shape[1]):
        layer.q[g, h] = matrix @ layer.q[g, h]
        if layer.q_bias is not None:
            layer.q_bias[g, h] = matrix @ layer.q_bias[g, h]
    layer.k[g] = matrix @ layer.k[g]
    if layer.k_bias is not None:
        layer.k_bias[g] = matrix @ layer.k_bias[g]


def _query_key(
    layer: Layer, sizes: Sizes, family: str, sign: int, generator: torch.Generator
) -> None:
    for g in range(sizes.groups):
        if family in QUERY_KEY_NORM:
            matrix = _pair_signs(sizes, generator)
        else:
            matrix = _phases(sizes, sign * (-1) ** g, generator)
        _rotate_query_key(layer, g, matrix)


def _value_output(
    layer: Layer, sizes: Sizes, family: str, sign: int, generator: torch.Generator
) -> None:
    for g in range(sizes.groups):
        matrix = _orthogonal(sizes.width, sign * (-1) ** g, generator)
        layer.v[g] = matrix @ layer.v[g]
        if layer.v_bias is not None:
            layer.v_bias[g] = matrix @ layer.v_bias[g]
        for h in range(sizes.per_group):
            layer.o[:, g, h] = layer.o[:, g, h] @ matrix.T


def _heads(layer: Layer, sizes: Sizes, family: str, sign: int, generator: torch.Generator) -> None:
    groups = _moved_permutation(sizes.groups, generator)
    layer.q, layer.k, layer.v = layer.q[groups], layer.k[groups], layer.v[groups]
    layer.o = layer.o[:, groups]
    if layer.q_bias is not None:
        layer.q_bias, layer.k_bias = layer.q_bias[groups], layer.k_bias[groups]
        layer.v_bias = layer.v_bias[groups]
    for g in range(sizes.groups):
        heads = torch.randperm(sizes.per_group, generator=generator)
        layer.q[g] = layer.q[g, heads]
        layer.o[:, g] = layer.o[:, g, heads]
        if layer.q_bias is not None:
            layer.q_bias[g] = layer.q_bias[g, heads]


def _neurons(
    layer: Layer, sizes: Sizes, family: str, sign: int, generator: torch.Generator
) -> None:
    order = _moved_permutation(layer.up.shape[0], generator)
    layer.up, layer.down = layer.up[order], layer.down[:, order]
    if layer.up_bias is not None:
        layer.up_bias = layer.up_bias[order]
    if layer.gate is None:
        return
    layer.gate = layer.gate[order]
    if layer.gate_bias is not None:
        layer.gate_bias = layer.gate_bias[order]
    signs = _signs(layer.up.shape[0], generator)
    layer.up = signs[:, None] * layer.up
    layer.down = layer.down * signs
    if layer.up_bias is not None:
        layer.up_bias = signs * layer.up_bias


_STEPS = {
    "query_key": _query_key,
    "value_output": _value_output,
    "heads": _heads,
    "neurons": _neurons,
}

Change = Callable[[Layer, Sizes, int], None]


def _change(
    model_or_state_dict: nn.Module | Mapping[str, Tensor],
    config: Any,
    family: str,
    change: Change,
) -> StateDict:
    """A copy of a state dict with every layer changed."""
    state = model_or_state_dict
    if isinstance(state, nn.Module):
        state = state.state_dict()
    state = {name: tensor.detach().clone() for name, tensor in state.items()}
    sizes = Sizes.of(config, family)
    for index, prefix in enumerate(_prefixes(state, family)):
        layer = _read(state, prefix, family, sizes)
        change(layer, sizes, index)
        _write(state, prefix, family, layer)
    return state


def scramble(
    model_or_state_dict: nn.Module | Mapping[str, Tensor],
    config: Any,
    family: str,
    seed: int = 0,
    parts: Collection[str] = PARTS,
) -> StateDict:
    """A state dict of the same function in other coordinates.

    `parts` are some of "query_key", "value_output", "heads" and "neurons"; they are applied in
    this order. A part makes the same random choices whichever other parts are asked for. The
    result is computed in float64 and has the dtypes of the input. No tensor is shared with the
    input or, if tied, with another.
    """
    if unknown := set(parts) - set(PARTS):
        raise ValueError(f"unknown parts: {sorted(unknown)}")

    def change(layer: Layer, sizes: Sizes, index: int) -> None:
        for part in PARTS:
            if part in parts:
                generator = _generator(seed, index, part)
                _STEPS[part](layer, sizes, family, (-1) ** index, generator)

    return _change(model_or_state_dict, config, family, change)


def wrong(
    model_or_state_dict: nn.Module | Mapping[str, Tensor],
    config: Any,
    family: str,
    seed: int = 0,
) -> dict[str, StateDict]:
    """State dicts with one mistake each, which do change the function: negative controls.

    "forgotten bias or leg": values rotated, output projection not.
    "forgotten value bias": values and output projection rotated, value bias not.
    "rotation across pairs": any orthogonal matrix on queries and keys, in spite of rotary
    embeddings or of a norm.
    "query heads across groups": query heads moved to another KV group.
    "neurons without down": the units of the MLP permuted, the columns of its output not.
    Mistakes that a family cannot make are left out.
    """
    sizes = Sizes.of(config, family)

    def leg(layer: Layer, sizes: Sizes, index: int) -> None:
        old = layer.o.clone()
        _value_output(layer, sizes, family, 1, _generator(seed, index, "value_output"))
        layer.o = old

    def value_bias(layer: Layer, sizes: Sizes, index: int) -> None:
        old = layer.v_bias.clone()
        _value_output(layer, sizes, family, 1, _generator(seed, index, "value_output"))
        layer.v_bias = old

    def across_pairs(layer: Layer, sizes: Sizes, index: int) -> None:
        generator = _generator(seed, index, "query_key")
        for g in range(sizes.groups):
            _rotate_query_key(layer, g, _orthogonal(sizes.width, (-1) ** g, generator))

    def across_groups(layer: Layer, sizes: Sizes, index: int) -> None:
        q, o = layer.q.flatten(0, 1).roll(1, 0), layer.o.flatten(1, 2).roll(1, 1)
        layer.q, layer.o = q.view_as(layer.q), o.view_as(layer.o)
        if layer.q_bias is not None:
            layer.q_bias = layer.q_bias.flatten(0, 1).roll(1, 0).view_as(layer.q_bias)

    def without_down(layer: Layer, sizes: Sizes, index: int) -> None:
        order = _moved_permutation(layer.up.shape[0], _generator(seed, index, "neurons"))
        layer.up = layer.up[order]
        layer.gate = None if layer.gate is None else layer.gate[order]
        layer.up_bias = None if layer.up_bias is None else layer.up_bias[order]
        layer.gate_bias = None if layer.gate_bias is None else layer.gate_bias[order]

    source = model_or_state_dict
    if isinstance(source, nn.Module):
        source = source.state_dict()
    first = _read(source, _prefixes(source, family)[0], family, sizes)
    changes: dict[str, Change] = {"forgotten bias or leg": leg}
    if first.v_bias is not None:
        changes["forgotten value bias"] = value_bias
    if family in ROTARY:
        changes["rotation across pairs"] = across_pairs
    if sizes.groups > 1 and sizes.per_group > 1:
        changes["query heads across groups"] = across_groups
    changes["neurons without down"] = without_down
    return {name: _change(source, config, family, change) for name, change in changes.items()}
