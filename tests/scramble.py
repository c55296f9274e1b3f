"""Change the coordinates of a model without changing its function, written out per layout.

This is a second opinion on the layouts and symmetries: it shares no code with the package it
tests. Each layer is read into plain arrays with one axis per KV group (`g`), query head of the
group (`m`) and head dim (`d`), changed there in float64, and written back.

    q [g, m, d, D]   k [g, d, D]   v [g, d, D]   o [D, g, m, d]   biases without the last axis
    q_norm [g, m, d]   k_norm [g, d]   only where each head has norm weights of its own
    gate, up [I, D]  down [D, I]   one set for each expert   router [E, D]
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

StateDict = dict[str, Tensor]

PARTS = ("query_key", "value_output", "heads", "neurons", "experts")

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
    "granite",
    "arcee",
    "apertus",
    "olmo2",
    "cohere",
    "cohere_qk_norm",
    "cohere2",
    "glm4",
    "stablelm",
    "falcon_new",
    "falcon_mqa",
    "exaone4",
    "mixtral",
    "qwen3_moe",
}
INTERLEAVED = {"cohere", "cohere_qk_norm", "cohere2", "glm4"}
"""Rotary pairs are (2i, 2i + 1), not (i, i + r/2)."""
SLIDING_ROTARY = {"cohere2", "exaone4"}
"""Rotary embeddings only in layers with a sliding window."""
ALIBI = {"falcon_alibi"}
"""Scores depend on the number of the head."""
QUERY_KEY_NORM = {"qwen3", "gemma3", "apertus", "olmo2", "exaone4", "qwen3_moe"}
"""An RMSNorm of queries and keys, over a head or over all heads."""
CENTRED_QUERY_KEY_NORM = {"cohere_qk_norm"}
"""A LayerNorm of every head of queries and keys."""
ONE_KEY = {"gpt_bigcode_mqa", "falcon_mqa"}
"""One key and value for all heads, whatever else the config says."""
FUSED_BY_GROUP = {"gpt_neox", "gpt_bigcode_mha", "falcon_new", "falcon_alibi"}
"""Rows of the fused projection are [group][queries, key, value][d], not [all q | all k | all v]."""

_LLAMA = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_UNGATED = {role: name for role, name in _LLAMA.items() if role != "gate"}
_NORMED = _LLAMA | {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
_BIGCODE = {"qkv": "attn.c_attn", "o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
_FALCON = {
    "qkv": "self_attention.query_key_value",
    "o": "self_attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
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
    **dict.fromkeys(("granite", "cohere", "cohere2", "stablelm", "exaone4"), _LLAMA),
    **dict.fromkeys(("mixtral", "qwen3_moe"), _LLAMA),
    **dict.fromkeys(("arcee", "apertus"), _UNGATED),
    **dict.fromkeys(("olmo2", "cohere_qk_norm"), _NORMED),
    **dict.fromkeys(("gpt_bigcode_mqa", "gpt_bigcode_mha"), _BIGCODE),
    **dict.fromkeys(("falcon_new", "falcon_mqa", "falcon_alibi"), _FALCON),
    "glm4": {
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "gate_up": "mlp.gate_up_proj",
        "down": "mlp.down_proj",
    },
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


PACKED = {
    "router": "mlp.gate",
    "gate_up": "mlp.experts.gate_up_proj",
    "down": "mlp.experts.down_proj",
}
"""Names in a layer with experts, as transformers has them: [E, 2I, D] and [E, D, I]."""
UNPACKED: dict[str, dict[str, str]] = {
    "mixtral": {
        "router": "block_sparse_moe.gate",
        "gate": "block_sparse_moe.experts.{}.w1",
        "up": "block_sparse_moe.experts.{}.w3",
        "down": "block_sparse_moe.experts.{}.w2",
    },
    "qwen3_moe": {
        "router": "mlp.gate",
        "gate": "mlp.experts.{}.gate_proj",
        "up": "mlp.experts.{}.up_proj",
        "down": "mlp.experts.{}.down_proj",
    },
}
"""The same in files."""


def parts_of(family: str) -> tuple[str, ...]:
    """The parts that change a family, of `PARTS`."""
    without = {
        "query_key": family in CENTRED_QUERY_KEY_NORM,
        "heads": family in ALIBI,
        "experts": family not in UNPACKED,
    }
    return tuple(part for part in PARTS if not without.get(part))


@dataclass(frozen=True)
class Sizes:
    """Sizes of the attention of a layer."""

    groups: int
    per_group: int
    width: int
    rotary: int
    interleaved: bool = False

    @classmethod
    def of(cls, config: Any, family: str, layer: int = 0) -> "Sizes":
        """Sizes from a config; `head_dim` and the number of KV heads may be absent or None."""
        heads = config.num_attention_heads
        groups = getattr(config, "num_key_value_heads", None) or heads
        if family in ONE_KEY:
            groups = 1
        elif family == "falcon_new":
            groups = config.num_kv_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        rotary = 0
        if family in ROTARY and not _without_rotary(config, family, layer):
            rope = config.rope_parameters
            nested = [entry for entry in rope.values() if isinstance(entry, dict)]
            factors = {e.get("partial_rotary_factor") or 1.0 for e in nested or [rope]}
            if len(factors) != 1:
                raise ValueError("layer types with different rotary widths are not handled")
            rotary = int(width * factors.pop())
        return cls(groups, heads // groups, width, rotary, family in INTERLEAVED)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The dims that rotary embeddings rotate together."""
        half = self.rotary // 2
        if self.interleaved:
            return [(2 * i, 2 * i + 1) for i in range(half)]
        return [(i, i + half) for i in range(half)]


def _without_rotary(config: Any, family: str, layer: int) -> bool:
    """Whether a layer of a family with rotary embeddings has none."""
    if family not in SLIDING_ROTARY or config.sliding_window is None:
        return False
    return config.layer_types[layer] != "sliding_attention"


@dataclass
class Units:
    """The weights of one gated or ungated MLP, or of one expert."""

    up: Tensor
    down: Tensor
    gate: Tensor | None = None
    up_bias: Tensor | None = None
    gate_bias: Tensor | None = None


@dataclass
class Layer:
    """The weights of one layer in float64, in the shapes given at the top of this module."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    mlps: list[Units]
    """The MLP, or all experts."""
    router: Tensor | None = None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


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


def mlp_names(
    state: Mapping[str, Tensor], prefix: str, family: str
) -> tuple[str | None, list[dict[str, str]]]:
    """The router of a layer, if it has one, and the names of each set of tensors of its MLP."""
    unpacked = UNPACKED.get(family)
    if unpacked is not None and prefix + PACKED["down"] in state:
        return prefix + PACKED["router"], [
            {role: prefix + PACKED[role] for role in ("gate_up", "down")}
        ]
    if unpacked is not None and f"{prefix}{unpacked['router']}.weight" in state:
        router = prefix + unpacked["router"]
        count = len(state[router + ".weight"])
        roles = ("gate", "up", "down")
        return router, [{r: prefix + unpacked[r].format(e) for r in roles} for e in range(count)]
    names = NAMES[family]
    roles = ("gate", "up", "gate_up", "down")
    return None, [{role: prefix + names[role] for role in roles if role in names}]


def key_of(state: Mapping[str, Tensor], name: str) -> str:
    """The key of the weight of a layer; packed experts have no layer of their own."""
    return name if name in state else name + ".weight"


def _load(state: Mapping[str, Tensor], name: str, family: str) -> tuple[Tensor, Tensor | None]:
    """Weight as [out, in] and bias of a linear layer, in float64."""
    weight = state[key_of(state, name)].to(torch.float64)
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
    key = key_of(state, name)
    state[key] = weight.contiguous().view_as(state[key]).to(state[key].dtype)
    if bias is not None:
        state[name + ".bias"] = bias.contiguous().to(state[name + ".bias"].dtype)


def _split_qkv(rows: Tensor, sizes: Sizes, family: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [*, ...] of a fused projection as q [g, m, d, ...], k and v [g, d, ...]."""
    g, m, d = sizes.groups, sizes.per_group, sizes.width
    tail = rows.shape[1:]
    if family in FUSED_BY_GROUP:
        per_group = rows.view(g, m + 2, d, *tail)
        return per_group[:, :m], per_group[:, m], per_group[:, m + 1]
    q = rows[: g * m * d].view(g, m, d, *tail)
    k = rows[g * m * d : g * m * d + g * d].view(g, d, *tail)
    v = rows[g * m * d + g * d :].view(g, d, *tail)
    return q, k, v


def _fuse_qkv(q: Tensor, k: Tensor, v: Tensor, family: str) -> Tensor:
    """Inverse of `_split_qkv`."""
    if family in FUSED_BY_GROUP:
        return torch.cat([q, k[:, None], v[:, None]], dim=1).flatten(0, 2)
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
    norms = {}
    if "q_norm" in names:
        norms["q_norm"] = _load(state, prefix + names["q_norm"], family)[0].view(g, m, d)
        norms["k_norm"] = _load(state, prefix + names["k_norm"], family)[0].view(g, d)
    o, _ = _load(state, prefix + names["o"], family)
    o = o.view(-1, g, m, d)

    router, sets = mlp_names(state, prefix, family)
    mlps = [units for set_ in sets for units in _read_mlp(state, set_, family)]
    scores = None if router is None else _load(state, router, family)[0]
    return Layer(q, k, v, o, mlps, scores, **biases, **norms)


def _read_mlp(state: Mapping[str, Tensor], names: Mapping[str, str], family: str) -> list[Units]:
    """One MLP, or all experts where one tensor holds them."""
    down, _ = _load(state, names["down"], family)
    if "gate_up" in names:  # rows [gate | up]
        weight, _ = _load(state, names["gate_up"], family)
        gate, up = weight.chunk(2, dim=-2)
        if down.dim() == 3:
            return [Units(*tensors) for tensors in zip(up, down, gate, strict=True)]
        return [Units(up, down, gate)]
    up, up_bias = _load(state, names["up"], family)
    gate, gate_bias = _load(state, names["gate"], family) if "gate" in names else (None, None)
    return [Units(up, down, gate, up_bias, gate_bias)]


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

    if "q_norm" in names:
        _store(state, prefix + names["q_norm"], family, layer.q_norm)
        _store(state, prefix + names["k_norm"], family, layer.k_norm)
    router, sets = mlp_names(state, prefix, family)
    if router is not None:
        _store(state, router, family, layer.router)
    size = len(layer.mlps) // len(sets)
    for index, set_ in enumerate(sets):
        _write_mlp(state, set_, family, layer.mlps[index * size : (index + 1) * size])


def _write_mlp(state: StateDict, names: Mapping[str, str], family: str, mlps: list[Units]) -> None:
    """Inverse of `_read_mlp`."""
    if "gate_up" in names:
        fused = torch.stack([torch.cat([units.gate, units.up]) for units in mlps])
        _store(state, names["gate_up"], family, fused)
        _store(state, names["down"], family, torch.stack([units.down for units in mlps]))
        return
    (units,) = mlps
    _store(state, names["up"], family, units.up, units.up_bias)
    if "gate" in names:
        _store(state, names["gate"], family, units.gate, units.gate_bias)
    _store(state, names["down"], family, units.down)


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
    """A phase for every frequency pair, and O(d - r) on the dims without rotary."""
    r, d = sizes.rotary, sizes.width
    matrix = torch.zeros(d, d, dtype=torch.float64)
    for i, j in sizes.pairs:
        angle = 2 * math.pi * torch.rand(1, generator=generator, dtype=torch.float64).item()
        matrix[i, i], matrix[i, j] = math.cos(angle), -math.sin(angle)
        matrix[j, i], matrix[j, j] = math.sin(angle), math.cos(angle)
    matrix[r:, r:] = _orthogonal(d - r, sign, generator)
    return matrix


def _signs(size: int, generator: torch.Generator) -> Tensor:
    """Random signs."""
    return 2.0 * torch.randint(0, 2, (size,), generator=generator).to(torch.float64) - 1.0


def _pair_signs(sizes: Sizes, generator: torch.Generator) -> Tensor:
    """One sign for every frequency pair, and one for every dim without rotary."""
    signs = torch.ones(sizes.width, dtype=torch.float64)
    for pair, sign in zip(sizes.pairs, _signs(sizes.rotary // 2, generator), strict=True):
        signs[list(pair)] = sign
    signs[sizes.rotary :] = _signs(sizes.width - sizes.rotary, generator)
    return torch.diag(signs)


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
    if layer.q_norm is not None:
        layer.q_norm, layer.k_norm = layer.q_norm[groups], layer.k_norm[groups]
    for g in range(sizes.groups):
        permutation = torch.randperm if sizes.groups > 1 else _moved_permutation
        heads = permutation(sizes.per_group, generator=generator)
        layer.q[g] = layer.q[g, heads]
        layer.o[:, g] = layer.o[:, g, heads]
        if layer.q_bias is not None:
            layer.q_bias[g] = layer.q_bias[g, heads]
        if layer.q_norm is not None:
            layer.q_norm[g] = layer.q_norm[g, heads]


def _neurons(
    layer: Layer, sizes: Sizes, family: str, sign: int, generator: torch.Generator
) -> None:
    for units in layer.mlps:
        order = _moved_permutation(units.up.shape[0], generator)
        _permute_rows(units, order)
        units.down = units.down[:, order]
        if units.gate is None:
            continue
        signs = _signs(units.up.shape[0], generator)
        units.up = signs[:, None] * units.up
        units.down = units.down * signs
        if units.up_bias is not None:
            units.up_bias = signs * units.up_bias


def _permute_rows(units: Units, order: Tensor) -> None:
    """Permute the units of an MLP, but not the columns that read them."""
    units.up = units.up[order]
    units.gate = None if units.gate is None else units.gate[order]
    units.up_bias = None if units.up_bias is None else units.up_bias[order]
    units.gate_bias = None if units.gate_bias is None else units.gate_bias[order]


def _experts(
    layer: Layer, sizes: Sizes, family: str, sign: int, generator: torch.Generator
) -> None:
    if layer.router is None:  # a dense layer
        return
    order = _moved_permutation(len(layer.mlps), generator)
    layer.mlps, layer.router = [layer.mlps[e] for e in order], layer.router[order]


_STEPS = {
    "query_key": _query_key,
    "value_output": _value_output,
    "heads": _heads,
    "neurons": _neurons,
    "experts": _experts,
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
    for index, prefix in enumerate(_prefixes(state, family)):
        sizes = Sizes.of(config, family, index)
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

    `parts` are some of "query_key", "value_output", "heads", "neurons" and "experts"; they are
    applied in this order. A part that a family does not have, see `parts_of`, changes nothing. A
    part makes the same random choices whichever other parts are asked for. The result is computed
    in float64 and has the dtypes of the input. No tensor is shared with the input or, if tied,
    with another.
    """
    if unknown := set(parts) - set(PARTS):
        raise ValueError(f"unknown parts: {sorted(unknown)}")

    def change(layer: Layer, sizes: Sizes, index: int) -> None:
        for part in parts_of(family):
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
    "the other pairing": what rotary embeddings allow, with the dims of a head paired in the way of
    other families.
    "signs under a LayerNorm": a sign for every pair of queries and keys, in spite of their norm.
    "query heads across groups": query heads moved to another KV group.
    "heads without their norms": heads moved, and the norm weights of each head not.
    "heads under ALiBi": heads moved, in spite of their slopes.
    "neurons without down": the units of the MLP permuted, the columns of its output not.
    "experts without router": experts moved, the rows of the router not.
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

    def other_pairing(layer: Layer, sizes: Sizes, index: int) -> None:
        other = replace(sizes, interleaved=not sizes.interleaved)
        _query_key(layer, other, family, 1, _generator(seed, index, "query_key"))

    def centred_signs(layer: Layer, sizes: Sizes, index: int) -> None:
        generator = _generator(seed, index, "query_key")
        for g in range(sizes.groups):
            _rotate_query_key(layer, g, _pair_signs(sizes, generator))

    def every_head(layer: Layer, sizes: Sizes, index: int) -> None:
        _heads(layer, sizes, family, 1, _generator(seed, index, "heads"))

    def without_norms(layer: Layer, sizes: Sizes, index: int) -> None:
        q_norm, k_norm = layer.q_norm.clone(), layer.k_norm.clone()
        every_head(layer, sizes, index)
        layer.q_norm, layer.k_norm = q_norm, k_norm

    def without_down(layer: Layer, sizes: Sizes, index: int) -> None:
        generator = _generator(seed, index, "neurons")
        for units in layer.mlps:
            _permute_rows(units, _moved_permutation(units.up.shape[0], generator))

    def without_router(layer: Layer, sizes: Sizes, index: int) -> None:
        old = layer.router
        _experts(layer, sizes, family, 1, _generator(seed, index, "experts"))
        layer.router = old

    source = model_or_state_dict
    if isinstance(source, nn.Module):
        source = source.state_dict()
    first = _read(source, _prefixes(source, family)[0], family, sizes)
    changes: dict[str, Change] = {"forgotten bias or leg": leg}
    if first.v_bias is not None:
        changes["forgotten value bias"] = value_bias
    if family in ROTARY:
        changes["rotation across pairs"] = across_pairs
        if family in CENTRED_QUERY_KEY_NORM:
            changes["signs under a LayerNorm"] = centred_signs
        else:
            changes["the other pairing"] = other_pairing
    if sizes.groups > 1 and sizes.per_group > 1:
        changes["query heads across groups"] = across_groups
    if first.q_norm is not None:
        changes["heads without their norms"] = without_norms
    if family in ALIBI:
        changes["heads under ALiBi"] = every_head
    changes["neurons without down"] = without_down
    if family in UNPACKED:
        changes["experts without router"] = without_router
    return {name: _change(source, config, family, change) for name, change in changes.items()}
