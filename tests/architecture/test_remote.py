"""Families whose code comes with the checkpoints: their layouts, by a twin that transformers has.

A model of transformers computes the same function from the same numbers under other names. Its
tensors are laid out as the remote code reads them, moved as the data file says, and laid out back.
What a wrong reading of the remote code would get wrong alike here and in the data is not seen.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiny
from mergekit_rotation.architecture import LAYER, all_families, find_family
from mergekit_rotation.proof import element, elements, tolerance

Q, K, V, OUT = (f"model.layers.{LAYER}.self_attn.{x}_proj" for x in "qkvo")
GATE, UP, DOWN = (f"model.layers.{LAYER}.mlp.{x}_proj" for x in ("gate", "up", "down"))
NORMS = (f"model.layers.{LAYER}.input_layernorm", f"model.layers.{LAYER}.post_attention_layernorm")


@dataclass(frozen=True)
class Remote:
    """A remote layout: every module, and the twin's modules whose rows it is made of."""

    model_type: str
    model_class: str
    twin: str
    modules: dict[str, tuple[str, ...]]
    groups: dict[str, int] = field(default_factory=dict)
    """Modules whose rows are cut into groups, each with its share of every part."""
    config: dict[str, Any] = field(default_factory=dict)
    twin_config: dict[str, Any] = field(default_factory=dict)
    published: dict[str, Any] = field(default_factory=dict)
    """What the data file asks of a configuration, and is too large for a test."""


def modules(layer, attention, gated, norms, outer):
    """Name the modules of a decoder as the twin's are named, in the order of the arguments."""
    inner = [*attention.items(), *gated.items(), *zip(norms, NORMS, strict=True)]
    names = {f"{layer}.{LAYER}.{name}": parts for name, parts in inner}
    names |= dict(zip(outer, OUTER, strict=True))
    return {name: (parts,) if isinstance(parts, str) else parts for name, parts in names.items()}


OUTER = ("model.embed_tokens", "model.norm", "lm_head")
INNER = ("input_layernorm", "post_attention_layernorm")
GATED = {"mlp.gate_proj": GATE, "mlp.up_proj": UP, "mlp.down_proj": DOWN}
LLAMA = modules(
    "model.layers",
    {f"self_attn.{x}_proj": y for x, y in zip("qkvo", (Q, K, V, OUT), strict=True)},
    GATED,
    INNER,
    OUTER,
)
BAICHUAN = modules(
    "model.layers",
    {"self_attn.W_pack": (Q, K, V), "self_attn.o_proj": OUT},
    GATED,
    INNER,
    OUTER,
)
INTERNLM2 = modules(
    "model.layers",
    {"attention.wqkv": (Q, K, V), "attention.wo": OUT},
    {"feed_forward.w1": GATE, "feed_forward.w3": UP, "feed_forward.w2": DOWN},
    ("attention_norm", "ffn_norm"),
    ("model.tok_embeddings", "model.norm", "output"),
)
EXAONE = modules(
    "transformer.h",
    {
        "attn.attention.q_proj": Q,
        "attn.attention.k_proj": K,
        "attn.attention.v_proj": V,
        "attn.attention.out_proj": OUT,
    },
    {"mlp.c_fc_0": GATE, "mlp.c_fc_1": UP, "mlp.c_proj": DOWN},
    ("ln_1", "ln_2"),
    ("transformer.wte", "transformer.ln_f", "lm_head"),
)
QWEN = modules(
    "transformer.h",
    {"attn.c_attn": (Q, K, V), "attn.c_proj": OUT},
    {"mlp.w2": GATE, "mlp.w1": UP, "mlp.c_proj": DOWN},
    ("ln_1", "ln_2"),
    ("transformer.wte", "transformer.ln_f", "lm_head"),
)
CHATGLM = modules(
    "transformer.encoder.layers",
    {"self_attention.query_key_value": (Q, K, V), "self_attention.dense": OUT},
    {
        "mlp.dense_h_to_4h": f"model.layers.{LAYER}.mlp.gate_up_proj",
        "mlp.dense_4h_to_h": DOWN,
    },
    INNER,
    (
        "transformer.embedding.word_embeddings",
        "transformer.encoder.final_layernorm",
        "transformer.output_layer",
    ),
)
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
WIDTHS = {"hidden_size": tiny.HIDDEN, "intermediate_size": tiny.INTERMEDIATE}
REMOTE = {
    "solar": Remote("solar", "SolarForCausalLM", "llama", LLAMA, {}, HEADS | {"head_dim": 16}),
    "exaone": Remote("exaone", "ExaoneForCausalLM", "llama", EXAONE, {}, HEADS | {"head_dim": 16}),
    "internlm2": Remote(
        "internlm2",
        "InternLM2ForCausalLM",
        "llama",
        INTERNLM2,
        {f"model.layers.{LAYER}.attention.wqkv": 2},
        HEADS,
        {"head_dim": 12, "mlp_bias": False},
    ),
    "baichuan": Remote(
        "baichuan",
        "BaichuanForCausalLM",
        "llama",
        BAICHUAN,
        {},
        {"num_attention_heads": 4},
        {
            "num_key_value_heads": 4,
            "head_dim": 12,
            "attention_bias": False,
            "mlp_bias": False,
        },
        {"hidden_size": 4096},
    ),
    "qwen": Remote(
        "qwen",
        "QWenLMHeadModel",
        "qwen2",
        QWEN,
        {},
        {
            "intermediate_size": 2 * tiny.INTERMEDIATE,
            "num_attention_heads": 4,
            "kv_channels": 12,
            "no_bias": True,
        },
        {"num_key_value_heads": 4},
    ),
    "chatglm": Remote(
        "chatglm",
        "ChatGLMModel",
        "glm",
        CHATGLM,
        {},
        {
            "ffn_hidden_size": tiny.INTERMEDIATE,
            "num_attention_heads": 4,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "kv_channels": 16,
            "rmsnorm": True,
            "add_bias_linear": False,
            "apply_residual_connection_post_layernorm": False,
        },
        {"attention_bias": True},
    ),
}


#: transformers has no gated units beside ALiBi, and no limited ones in an attention like theirs
WITHOUT_TWIN = {"jais", "phi3small"}


class Config(SimpleNamespace):
    def get_text_config(self):
        return self


class Model:
    """A twin in float64, its tensors as the remote code has them, and what is declared of them."""

    def __init__(self, name):
        remote = REMOTE[name]
        self.remote = remote
        self.twin = tiny.build(
            remote.twin, seed=3, biases=True, tie_word_embeddings=False, **remote.twin_config
        )
        self.own = {k: v.double() for k, v in self.twin.state_dict().items()}
        self.inputs = tiny.inputs(remote.twin)
        common = {"model_type": remote.model_type, "num_hidden_layers": tiny.LAYERS}
        self.config = Config(**{**common, **WIDTHS, **remote.config})
        self.family = next(f for f in all_families() if f.family == name)
        self.state = self.laid_out()
        self.base = tiny.exact_outputs(self.twin, self.inputs, self.own)
        self.tolerance = tolerance(self.family, self.config, self.base)

    def tensors(self):
        """Yield every remote tensor with the twin's it is made of, and its number of groups."""
        for module, parts in self.remote.modules.items():
            for index in range(tiny.LAYERS if LAYER in module else 1):
                for kind in (".weight", ".bias"):
                    names = [part.replace(LAYER, str(index)) + kind for part in parts]
                    if names[0] in self.own:
                        name = module.replace(LAYER, str(index)) + kind
                        yield name, names, self.remote.groups.get(module, 1)

    def laid_out(self):
        """Return the twin's tensors as the remote code has them."""
        return {
            name: torch.cat([self.own[p].unflatten(0, (n, -1)) for p in parts], 1).flatten(0, 1)
            for name, parts, n in self.tensors()
        }

    def laid_back(self, state):
        """Return remote tensors as the twin has them."""
        result = {}
        for name, parts, n in self.tensors():
            rows = [len(self.own[part]) // n for part in parts]
            cut = state[name].unflatten(0, (n, -1)).split(rows, 1)
            result |= {part: x.flatten(0, 1) for part, x in zip(parts, cut, strict=True)}
        return result

    def change(self, element_of, forget=None):
        state = elements.moved(self.state, self.config, self.family, element_of, forget)
        outputs = tiny.exact_outputs(self.twin, self.inputs, self.laid_back(state))
        return float((outputs - self.base).abs().max())


@pytest.fixture(scope="module", params=sorted(REMOTE))
def model(request):
    return Model(request.param)


def test_every_family_that_was_read_has_a_twin_if_there_is_one():
    read = {family.family for family in all_families() if family.checked == "read"}
    assert set(REMOTE) == read - WITHOUT_TWIN


def test_the_twin_has_the_same_tensors(model):
    remote, config = model.remote, Config(**{**vars(model.config), **model.remote.published})
    assert find_family(config, remote.model_class) is model.family
    assert model.laid_back(model.state).keys() == model.own.keys()
    known = model.family.stream_of(remote.model_class).known
    declared_names = {t.replace(LAYER, str(i)) for t in known for i in range(tiny.LAYERS)}
    assert model.state.keys() <= declared_names


def test_random_elements_leave_the_function_unchanged(model):
    assert model.change(element) <= model.tolerance


def test_each_forgotten_leg_changes_the_function(model):
    blocks = elements.present(model.family, model.config, 0, model.state)
    for block in blocks:
        for template in elements.legs(model.family, block, 0, model.state):
            assert model.change(element, forget=template) > 1e6 * model.tolerance, template
