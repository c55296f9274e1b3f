"""Rewrite the residual stream of a model in other coordinates without changing its function.

This is a second opinion on which tensors write to the stream, which read it and which norms lie
between: it shares no code with the package it tests. The stream of width D runs through

    embeddings [*, D]   writers [D, *]   norms [D]   readers [*, D]

(packed experts: writers [E, D, *], readers [E, *, D])

All vectors of the stream become `turn @ vector`, with one D x D matrix for the whole model:
embeddings become `E @ turn.T`, writers `turn @ W`, readers `W @ turn.T`. What `turn` may be depends
on the norms, see `scramble_stream`. Everything is computed in float64.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from scramble import (
    NAMES,
    StateDict,
    _moved_permutation,
    _orthogonal,
    _prefixes,
    _signs,
    key_of,
    mlp_names,
)

KINDS = ("orthogonal", "permutation")

BIAS_STD = 0.5

HEADS = ("lm_head", "embed_out", "score")
"""Readers of the final norm; files of gpt_neox call the first one by the second name."""


@dataclass(frozen=True)
class Layout:
    """The norms and embeddings of a family.

    Embeddings, the final norm and `first_norm` are named relative to the model without its heads,
    the others relative to a layer.
    """

    container: str
    """Where the layers are."""
    embeddings: tuple[str, ...]
    layer_norm: bool
    before: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Norms in front of readers, with the roles of the readers. Others read the bare stream."""
    behind: tuple[str, ...] = ()
    """Norms whose output is in the stream or added to it."""
    final: str | None = None
    first_norm: str | None = None
    """The norm of the embeddings."""
    unit: float = 0.0
    """What is added to a stored norm weight."""
    transform: tuple[str, str, str] | None = None
    """Dense layer, norm and decoder of the masked-LM head."""


_ATTENTION = ("q", "k", "v", "qkv")
_MLP = ("router", "gate", "up", "gate_up")
_READERS = _ATTENTION + _MLP

_LLAMA = Layout(
    "layers",
    ("embed_tokens",),
    layer_norm=False,
    before={"input_layernorm": _ATTENTION, "post_attention_layernorm": _MLP},
    final="norm",
)
_BEHIND = Layout(
    "layers",
    ("embed_tokens",),
    layer_norm=False,
    behind=("post_attention_layernorm", "post_feedforward_layernorm"),
    final="norm",
)
_COHERE = Layout(
    "layers",
    ("embed_tokens",),
    layer_norm=True,
    before={"input_layernorm": _READERS},
    final="norm",
)
_GEMMA = Layout(
    "layers", ("embed_tokens",), layer_norm=False, before=_LLAMA.before, final="norm", unit=1.0
)
_GEMMA2 = Layout(
    "layers",
    ("embed_tokens",),
    layer_norm=False,
    before={"input_layernorm": _ATTENTION, "pre_feedforward_layernorm": _MLP},
    behind=("post_attention_layernorm", "post_feedforward_layernorm"),
    final="norm",
    unit=1.0,
)


_GPT2 = Layout(
    "h",
    ("wte", "wpe"),
    layer_norm=True,
    before={"ln_1": _ATTENTION, "ln_2": _MLP},
    final="ln_f",
)


def _falcon(before: Mapping[str, tuple[str, ...]]) -> Layout:
    return Layout("h", ("word_embeddings",), layer_norm=True, before=before, final="ln_f")


def _bert(transform: tuple[str, str, str]) -> Layout:
    return Layout(
        "encoder.layer",
        (
            "embeddings.word_embeddings",
            "embeddings.position_embeddings",
            "embeddings.token_type_embeddings",
        ),
        layer_norm=True,
        behind=("attention.output.LayerNorm", "output.LayerNorm"),
        first_norm="embeddings.LayerNorm",
        transform=transform,
    )


LAYOUTS: dict[str, Layout] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3"), _LLAMA),
    **dict.fromkeys(("granite", "arcee", "mixtral", "qwen3_moe"), _LLAMA),
    **dict.fromkeys(("olmo2", "exaone4"), _BEHIND),
    **dict.fromkeys(("cohere", "cohere_qk_norm", "cohere2"), _COHERE),
    "apertus": Layout(
        "layers",
        ("embed_tokens",),
        layer_norm=False,
        before={"attention_layernorm": _ATTENTION, "feedforward_layernorm": _MLP},
        final="norm",
    ),
    "glm4": Layout(
        "layers",
        ("embed_tokens",),
        layer_norm=False,
        before=_LLAMA.before,
        behind=("post_self_attn_layernorm", "post_mlp_layernorm"),
        final="norm",
    ),
    "falcon_new": _falcon({"ln_attn": _ATTENTION, "ln_mlp": _MLP}),
    "falcon_mqa": _falcon({"input_layernorm": _READERS}),
    "falcon_alibi": _falcon(_LLAMA.before),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA2,
    "phi": Layout(  # one norm for attention and MLP
        "layers",
        ("embed_tokens",),
        layer_norm=True,
        before={"input_layernorm": _READERS},
        final="final_layernorm",
    ),
    **dict.fromkeys(("gpt2", "gpt_bigcode_mqa", "gpt_bigcode_mha"), _GPT2),
    "gpt_neox": Layout(
        "layers",
        ("embed_in",),
        layer_norm=True,
        before=_LLAMA.before,
        final="final_layer_norm",
    ),
    **dict.fromkeys(
        ("starcoder2", "stablelm"),
        Layout("layers", ("embed_tokens",), layer_norm=True, before=_LLAMA.before, final="norm"),
    ),
    "bert": _bert(
        (
            "cls.predictions.transform.dense",
            "cls.predictions.transform.LayerNorm",
            "cls.predictions.decoder",
        )
    ),
    "roberta": _bert(("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder")),
    "distilbert": Layout(
        "transformer.layer",
        ("embeddings.word_embeddings", "embeddings.position_embeddings"),
        layer_norm=True,
        behind=("sa_layer_norm", "output_layer_norm"),
        first_norm="embeddings.LayerNorm",
        transform=("vocab_transform", "vocab_layer_norm", "vocab_projector"),
    ),
}


@dataclass(frozen=True)
class Norm:
    """A norm in front of readers; `tied` if a reader is the embedding matrix."""

    name: str
    readers: tuple[str, ...]
    tied: bool = False


def _names(state: Mapping[str, Tensor], layer: str, family: str) -> dict[str, list[str]]:
    """The linear layers of a layer by role."""
    attention = (*_ATTENTION, "o")
    found = {r: [layer + name] for r, name in NAMES[family].items() if r in attention}
    router, mlps = mlp_names(state, layer, family)
    if router is not None:
        found["router"] = [router]
    for mlp in mlps:
        for role, name in mlp.items():
            found.setdefault(role, []).append(name)
    return found


class Stream:
    """A float64 copy of a state dict, with the names of all that touches its residual stream."""

    def __init__(self, source: nn.Module | Mapping[str, Tensor], family: str):
        state = source.state_dict() if isinstance(source, nn.Module) else source
        self.dtypes = {name: tensor.dtype for name, tensor in state.items()}
        self.state = {
            name: tensor.detach().to(torch.float64) if tensor.is_floating_point() else tensor
            for name, tensor in state.items()
        }
        self.layout = layout = LAYOUTS[family]
        self.layers = _prefixes(state, family)
        names = {layer: _names(state, layer, family) for layer in self.layers}
        self.conv1d = family == "gpt2"
        base = self.layers[0].removesuffix(f"{layout.container}.0.")

        self.embeddings = [f"{base}{name}.weight" for name in layout.embeddings]
        self.writers = [n for layer in self.layers for r in ("o", "down") for n in names[layer][r]]
        self.norms = [
            Norm(layer + norm, tuple(n for role in roles for n in names[layer].get(role, ())))
            for layer in self.layers
            for norm, roles in layout.before.items()
        ]
        self.behind = [layer + norm for layer in self.layers for norm in layout.behind]
        normed = {role for roles in layout.before.values() for role in roles}
        self.readers = [
            name
            for layer in self.layers
            for role in _READERS
            if role not in normed
            for name in names[layer].get(role, ())
        ]
        """Readers with no norm in front."""
        self.tied = False
        """Whether the output matrix is the embedding matrix."""

        if layout.first_norm is not None:
            self.behind.append(base + layout.first_norm)
            self.readers += self._encoder_heads(base)
            self.tied = self._is_embedding(layout.transform[2])
        if layout.final is not None:
            readers = tuple(name for name in HEADS if self.has(name))
            self.tied = all(self._is_embedding(name) for name in readers)
            self.norms.append(Norm(base + layout.final, readers, self.tied))

    def has(self, name: str) -> bool:
        """Whether there is a layer of this name."""
        return name + ".weight" in self.state

    def _is_embedding(self, head: str) -> bool:
        """Whether a head is the token embedding matrix, left out of the state or equal to it."""
        name = head + ".weight"
        return name not in self.state or torch.equal(
            self.state[name], self.state[self.embeddings[0]]
        )

    def _encoder_heads(self, base: str) -> list[str]:
        """Readers outside the layers of an encoder with norms behind the branches."""
        first = [base + "pooler.dense", "classifier.dense", "pre_classifier"]
        found = [name for name in first if self.has(name)]
        if not found and self.has("classifier"):  # otherwise it reads one of those
            found = ["classifier"]
        dense = self.layout.transform[0]
        return found + [dense] * self.has(dense)

    def linear(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Weight as [out, in] and bias of a linear layer."""
        weight = self.state[key_of(self.state, name)]
        if self._transposed(name):
            weight = weight.T
        return weight, self.state.get(name + ".bias")

    def set_linear(self, name: str, weight: Tensor, bias: Tensor | None = None) -> None:
        """Inverse of `linear`; a bias of None leaves the stored one alone."""
        key = key_of(self.state, name)
        self.state[key] = weight.T if self._transposed(name) else weight
        if bias is not None:
            self.state[name + ".bias"] = bias

    def _transposed(self, name: str) -> bool:
        """Conv1D keeps [in, out]; the heads of GPT-2 are ordinary linear layers."""
        return self.conv1d and any(name.startswith(layer) for layer in self.layers)

    def norm(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Effective weight and bias of a norm."""
        return self.state[name + ".weight"] + self.layout.unit, self.state.get(name + ".bias")

    def set_norm(self, name: str, weight: Tensor, bias: Tensor | None) -> None:
        """Inverse of `norm`."""
        self.state[name + ".weight"] = weight - self.layout.unit
        if bias is not None:
            self.state[name + ".bias"] = bias

    def write(self, turn: Tensor) -> None:
        """Turn the output of embeddings and writers."""
        for name in self.embeddings:
            self.state[name] = self.state[name] @ turn.T
        for name in self.writers:
            weight, bias = self.linear(name)
            self.set_linear(name, turn @ weight, None if bias is None else turn @ bias)

    def read(self, readers: list[str] | tuple[str, ...], columns: Tensor) -> None:
        """Multiply the columns of readers by a matrix."""
        for name in readers:
            self.set_linear(name, self.linear(name)[0] @ columns)

    def untie(self) -> None:
        """Give a tied head its own tensor, still the embedding matrix."""
        if not self.tied:
            return
        embedding, final = self.embeddings[0], self.norms[-1]
        (head,) = final.readers or ("lm_head",)
        self.state[head + ".weight"] = self.state[embedding]
        self.dtypes[head + ".weight"] = self.dtypes[embedding]
        self.norms[-1] = Norm(final.name, (head,))
        self.tied = False

    def result(self) -> StateDict:
        """The state dict in the dtypes of the source."""
        return {
            name: tensor.to(self.dtypes[name], copy=True).contiguous()
            for name, tensor in self.state.items()
        }


# Random elements


def _rotation(size: int, keep_ones: bool, generator: torch.Generator) -> Tensor:
    """A random orthogonal matrix, of either determinant; on request it maps the ones to itself."""
    sign = int(_signs(1, generator))
    if not keep_ones:
        return _orthogonal(size, sign, generator)
    basis = torch.randn(size, size, generator=generator, dtype=torch.float64)
    basis[:, 0] = 1.0
    basis = torch.linalg.qr(basis)[0]
    inner = torch.eye(size, dtype=torch.float64)
    inner[1:, 1:] = _orthogonal(size - 1, sign, generator)
    return basis @ inner @ basis.T


def _signed_permutation(size: int, layer_norm: bool, generator: torch.Generator) -> Tensor:
    """A random permutation matrix, negated under LayerNorm, else with random signs."""
    order = _moved_permutation(size, generator)
    signs = -torch.ones(size).double() if layer_norm else _signs(size, generator)
    return signs[:, None] * torch.eye(size, dtype=torch.float64)[order]


def _scale(size: int, gauge: bool, generator: torch.Generator) -> Tensor:
    """Random scales between 0.5 and 1.5, or ones."""
    scale = 0.5 + torch.rand(size, generator=generator, dtype=torch.float64)
    return scale if gauge else torch.ones_like(scale)


# Whole models


def _rotate(stream: Stream, turn: Tensor, gauge: bool, generator: torch.Generator) -> None:
    """Fold all norms into their readers, turn the stream, and take other norms out of the readers.

    A norm bias is folded too if all readers have a bias. Otherwise it stays in the norm.
    """
    stream.untie()
    stream.write(turn)
    for norm in stream.norms:
        weight, bias = stream.norm(norm.name)
        new = _scale(len(weight), gauge, generator)
        old = {name: stream.linear(name) for name in norm.readers}
        stream.read(norm.readers, torch.diag(weight) @ turn.T @ torch.diag(1 / new))
        new_bias = None
        if bias is not None and all(b is not None for _, b in old.values()):
            noise = torch.randn(len(bias), generator=generator, dtype=torch.float64)
            new_bias = BIAS_STD * noise if gauge else torch.zeros_like(bias)
            for name, (old_weight, old_bias) in old.items():
                new_weight, _ = stream.linear(name)
                shift = old_weight @ bias - new_weight @ new_bias
                stream.set_linear(name, new_weight, old_bias + shift)
        elif bias is not None:
            new_bias = new * (turn @ (bias / weight))
        stream.set_norm(norm.name, new, new_bias)


def _permute(stream: Stream, turn: Tensor, gauge: bool, generator: torch.Generator) -> None:
    """Move the stream by a signed permutation.

    The weight of an RMSNorm does not see the signs, and the readers do. The weight of a LayerNorm
    in front of readers takes them back, so that its bias and the readers do not see them; a tied
    head has to see them, as the embeddings do.
    """
    order = turn.abs()
    stream.write(turn)
    for norm in stream.norms:
        weight, bias = stream.norm(norm.name)
        scale = _scale(len(weight), gauge and not norm.tied, generator)
        if stream.layout.layer_norm and not norm.tied:
            weight, out = turn @ weight, order
        else:
            weight, out = order @ weight, turn
        new_bias = None if bias is None else scale * (out @ bias)
        stream.set_norm(norm.name, scale * weight, new_bias)
        stream.read(norm.readers, out.T / scale)
    for name in stream.behind:
        weight, bias = stream.norm(name)
        stream.set_norm(name, order @ weight, None if bias is None else turn @ bias)
    stream.read(stream.readers, turn.T)
    if stream.layout.transform is not None and stream.has(stream.layout.transform[0]):
        _permute_transform(stream, turn)


def _permute_transform(stream: Stream, turn: Tensor) -> None:
    """The same permutation inside the masked-LM head.

    The activation behind the dense layer allows no sign there. A tied decoder has the signs of the
    embeddings, so the norm in front gives them to it.
    """
    dense, norm, decoder = stream.layout.transform
    order = turn.abs()
    out = turn if stream.tied else order
    weight, bias = stream.linear(dense)
    stream.set_linear(dense, order @ weight, order @ bias)
    weight, bias = stream.norm(norm)
    stream.set_norm(norm, out @ weight, out @ bias)
    if stream.has(decoder):
        stream.read([decoder], out.T)


def scramble_stream(
    state_or_model: nn.Module | Mapping[str, Tensor],
    config: Any,
    family: str,
    kind: str,
    seed: int = 0,
    gauge: bool = True,
) -> StateDict:
    """A state dict of the same function with its residual stream in other coordinates.

    "orthogonal": a random orthogonal matrix, under LayerNorm one that keeps the vector of ones.
    All norms are folded into their readers. With `gauge`, fresh random norms are then taken out
    of the readers; without, the norms end up as ones and, where all readers have biases, zeros.
    A tied head becomes a tensor of its own, and the config has to say so. Families with norms
    behind the branches are refused.

    "permutation": a random permutation other than the identity, with a random sign for every
    coordinate under RMSNorm and all signs negative under LayerNorm. With `gauge`, all norms that
    can be folded are scaled at random and their readers inversely. What is tied stays tied.

    "gauge": the latter without the permutation.

    A head missing from the state is taken for a tied one. The result has the dtypes of the input
    and shares no memory with it, nor any tensor with another.
    """
    generator = torch.Generator().manual_seed(seed)
    stream, size = Stream(state_or_model, family), config.hidden_size
    layer_norm = stream.layout.layer_norm
    if kind == "orthogonal":
        if stream.behind:
            raise ValueError(f"the norms of {family} allow no rotation of the residual stream")
        _rotate(stream, _rotation(size, layer_norm, generator), gauge, generator)
    elif kind == "permutation":
        _permute(stream, _signed_permutation(size, layer_norm, generator), gauge, generator)
    elif kind == "gauge":
        _permute(stream, torch.eye(size, dtype=torch.float64), True, generator)
    else:
        raise ValueError(f"unknown kind: {kind}")
    return stream.result()


def wrong_stream(
    state_or_model: nn.Module | Mapping[str, Tensor], config: Any, family: str, seed: int = 0
) -> dict[str, StateDict]:
    """State dicts with one mistake each, which do change the function: negative controls.

    "forgotten tensor": a permutation, but not of the last down projection.
    "sign on one coordinate under LayerNorm": otherwise right.
    "general rotation under LayerNorm": one that moves the vector of ones; folded if possible.
    "rotation without folding": right only for constant norm weights.
    "rotation with tied embeddings kept tied": all but the final norm folded.
    Mistakes that a family cannot make are left out. A head that is no longer tied to the embeddings
    has its own tensor.
    """
    generator = torch.Generator().manual_seed(seed)
    size = config.hidden_size

    def fresh() -> Stream:
        return Stream(state_or_model, family)

    source = fresh()
    found = {}

    forgotten = fresh()
    turn = _signed_permutation(size, source.layout.layer_norm, generator)
    _permute(forgotten, turn, True, generator)
    down = key_of(source.state, source.writers[-1])
    forgotten.state[down] = source.state[down]
    found["forgotten tensor"] = forgotten

    turn = _rotation(size, False, generator)
    unfolded = fresh()
    unfolded.write(turn)
    for readers in (unfolded.readers, *(norm.readers for norm in unfolded.norms)):
        unfolded.read(readers, turn.T)

    if source.layout.layer_norm:
        flip = torch.eye(size, dtype=torch.float64)
        flip[size // 2, size // 2] = -1.0
        flipped = fresh()
        _permute(flipped, flip, False, generator)
        found["sign on one coordinate under LayerNorm"] = flipped

        general = unfolded
        if not source.behind:
            general = fresh()
            _rotate(general, turn, False, generator)
        found["general rotation under LayerNorm"] = general
    else:
        found["rotation without folding"] = unfolded

    if source.tied and not source.behind:
        tied = fresh()
        _rotate(tied, _rotation(size, source.layout.layer_norm, generator), True, generator)
        final = tied.norms[-1]
        tied.state[final.readers[0] + ".weight"] = tied.state[tied.embeddings[0]]
        tied.set_norm(final.name, *source.norm(final.name))
        found["rotation with tied embeddings kept tied"] = tied
    return {name: stream.result() for name, stream in found.items()}
