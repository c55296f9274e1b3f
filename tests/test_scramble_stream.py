"""Rewriting the residual stream changes no outputs; every mistake does."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from scramble import NAMES
from scramble_stream import KINDS, LAYOUTS, Stream, scramble_stream, wrong_stream

EPS = torch.finfo(torch.float64).eps

#: whose tensors the scrambler of the tests knows
KNOWN = {name: case for name, case in tiny.FAMILIES.items() if case.family in LAYOUTS}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{case: (case, {}) for case in KNOWN},
    **{f"{c} with biases": (c, {"biases": True}) for c, e in KNOWN.items() if e.biases},
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "gpt_neox tied": ("gpt_neox", {"tie_word_embeddings": True}),
    "gemma untied": ("gemma", {"tie_word_embeddings": False}),
    "gemma2 untied": ("gemma2", {"tie_word_embeddings": False}),
    "gpt2 untied": ("gpt2", {"tie_word_embeddings": False}),
    "starcoder2 without biases": ("starcoder2", {"use_bias": False}),
    "gpt_neox sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "bert-masked-lm untied": ("bert-masked-lm", {"tie_word_embeddings": False}),
    "olmo2 tied": ("olmo2", {"tie_word_embeddings": True}),
    "cohere untied": ("cohere", {"tie_word_embeddings": False}),
    "stablelm tied": ("stablelm", {"tie_word_embeddings": True}),
    "stablelm without biases": ("stablelm", {"use_qkv_bias": False}),
    "gpt_bigcode_mqa untied": ("gpt_bigcode_mqa", {"tie_word_embeddings": False}),
    "falcon_new tied": ("falcon_new", {"tie_word_embeddings": True}),
    "falcon_mqa untied": ("falcon_mqa", {"tie_word_embeddings": False}),
    "mixtral tied": ("mixtral", {"tie_word_embeddings": True}),
}

NORMS_BEHIND = {"gemma2", "gemma3", "bert", "roberta", "distilbert", "olmo2", "exaone4", "glm4"}


class Model:
    """A tiny model, its tensors in float64 and its outputs."""

    def __init__(self, variant: str):
        self.case, self.options = VARIANTS[variant]
        self.family = tiny.FAMILIES[self.case].family
        self.model = tiny.build(self.case, **self.options)
        self.config = self.model.config
        self.inputs = tiny.inputs(self.case)
        self.state = {name: t.double() for name, t in self.model.state_dict().items()}
        self.base = self.outputs(self.state)

    @property
    def rotates(self) -> bool:
        return self.family not in NORMS_BEHIND

    def outputs(self, state: dict[str, torch.Tensor], untied: bool = False) -> torch.Tensor:
        """Outputs in float64; a headless model has a pooler, which reads its stream."""
        model = self.model
        if untied:
            model = tiny.build(self.case, **{**self.options, "tie_word_embeddings": False})
        if self.case != "bert":
            return tiny.exact_outputs(model, self.inputs, state)
        with tiny.float64_exact(model) as exact, torch.no_grad():
            exact.load_state_dict(state)
            return exact(**self.inputs).pooler_output.flatten()

    def change(self, state: dict[str, torch.Tensor], untied: bool = False) -> float:
        return float((self.outputs(state, untied) - self.base).abs().max())

    def tolerance(self) -> float:
        """c n eps: n products are summed between input and output, c of rounding each."""
        config = self.config
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        n = tiny.LAYERS * (tiny.HIDDEN + tiny.INTERMEDIATE + heads * width)
        return 8 * n * EPS * float(self.base.abs().max())


@cache
def model_of(variant: str) -> Model:
    return Model(variant)


@pytest.fixture(params=VARIANTS)
def model(request) -> Model:
    return model_of(request.param)


def test_every_family_has_a_layout():
    assert {case.family for case in KNOWN.values()} == set(LAYOUTS) <= set(NAMES)


@pytest.mark.parametrize("gauge", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_function_is_unchanged(model, kind, gauge):
    if kind == "orthogonal" and not model.rotates:
        with pytest.raises(ValueError, match=model.family):
            scramble_stream(model.state, model.config, model.family, kind)
        return
    for seed in (1, 2):
        state = scramble_stream(model.state, model.config, model.family, kind, seed, gauge)
        assert state.keys() == model.state.keys()
        change = model.change(state, untied=kind == "orthogonal")
        assert change <= model.tolerance()


def test_mistakes_change_the_function(model):
    for name, state in wrong_stream(model.state, model.config, model.family, seed=1).items():
        change = model.change(state, untied=model.rotates)
        assert change > 1e6 * model.tolerance(), name


def test_mistakes_by_family():
    def mistakes(variant):
        model = model_of(variant)
        return set(wrong_stream(model.state, model.config, model.family))

    forgotten = {"forgotten tensor"}
    rms = forgotten | {"rotation without folding"}
    layer_norm = forgotten | {
        "sign on one coordinate under LayerNorm",
        "general rotation under LayerNorm",
    }
    tied = {"rotation with tied embeddings kept tied"}
    assert mistakes("llama") == mistakes("gemma untied") == mistakes("gemma2") == rms
    assert mistakes("llama tied") == mistakes("gemma") == rms | tied
    assert mistakes("gpt2 untied") == mistakes("phi") == mistakes("bert-masked-lm") == layer_norm
    assert mistakes("gpt2") == layer_norm | tied
    assert mistakes("olmo2") == mistakes("glm4") == mistakes("mixtral") == rms
    assert mistakes("cohere") == mistakes("falcon_mqa") == layer_norm | tied


@pytest.mark.parametrize("kind", KINDS)
def test_the_stream_is_turned(model, kind):
    """All rows of the embeddings move, and by one orthogonal matrix."""
    if kind == "orthogonal" and not model.rotates:
        return
    state = scramble_stream(model.state, model.config, model.family, kind, seed=1)
    names = Stream(model.state, model.family).embeddings
    before = torch.cat([model.state[name] for name in names])
    after = torch.cat([state[name] for name in names])
    assert (before != after).any(dim=1).all()
    torch.testing.assert_close(after @ after.T, before @ before.T, rtol=0, atol=1e-12)
    if kind == "permutation":
        assert torch.equal(after.abs().sort().values, before.abs().sort().values)


@pytest.mark.parametrize("variant", ["llama", "gemma", "gpt2", "phi"])
def test_norms_after_a_rotation(variant):
    """The gauge leaves norms between 0.5 and 1.5, its absence leaves ones."""
    model = model_of(variant)
    for gauge in (True, False):
        state = scramble_stream(model.state, model.config, model.family, "orthogonal", 1, gauge)
        turned = Stream(state, model.family)
        for norm in turned.norms:
            weight, bias = turned.norm(norm.name)
            if gauge:
                assert 0.4999 < weight.min() < 0.7 and 1.3 < weight.max() < 1.5001
            else:
                torch.testing.assert_close(weight, torch.ones_like(weight))
            if bias is not None:
                biases = all(name + ".bias" in state for name in norm.readers)
                assert bias.any() == (gauge or not biases)


@pytest.mark.parametrize(
    ("case", "head"),
    [
        ("gemma", "lm_head"),
        ("gemma2", "lm_head"),
        ("gpt2", "lm_head"),
        ("starcoder2", "lm_head"),
        ("cohere", "lm_head"),
        ("gpt_bigcode_mqa", "lm_head"),
        ("falcon_mqa", "lm_head"),
        ("bert-masked-lm", "cls.predictions.decoder"),
        ("roberta-masked-lm", "lm_head.decoder"),
        ("distilbert-masked-lm", "vocab_projector"),
    ],
)
def test_ties(case, head):
    """A permutation keeps ties, a rotation gives the head its own tensor."""
    model, head = model_of(case), head + ".weight"
    embedding = Stream(model.state, model.family).embeddings[0]
    without = {name: tensor for name, tensor in model.state.items() if name != head}
    for kind in KINDS if model.rotates else ("permutation",):
        state = scramble_stream(model.state, model.config, model.family, kind)
        assert torch.equal(state[head], state[embedding]) == (kind == "permutation")
        absent = scramble_stream(without, model.config, model.family, kind)
        assert (head in absent) == (kind == "orthogonal")
        assert all(torch.equal(absent[name], state[name]) for name in absent)


@pytest.mark.parametrize("case", ["llama", "gpt2", "gpt_neox", "bert-masked-lm"])
def test_files(case, tmp_path: Path):
    """Tensors as files name them become the same as those of a state dict."""
    model = tiny.build(case)
    family = tiny.FAMILIES[case].family
    tiny.save(model, tmp_path)
    loaded = load_file(tmp_path / "model.safetensors")
    for kind in KINDS if family not in NORMS_BEHIND else ("permutation",):
        state = scramble_stream(model, model.config, family, kind)
        from_file = scramble_stream(loaded, model.config, family, kind)
        if "embed_out.weight" in from_file:
            from_file["lm_head.weight"] = from_file.pop("embed_out.weight")
        common = from_file.keys() & state.keys()
        assert common >= {n for n in state if "decoder" not in n and n != "lm_head.weight"}
        assert all(torch.equal(from_file[name], state[name]) for name in common)


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe"])
def test_files_with_experts(case, tmp_path: Path):
    """Files name every expert; changed files load as the changed state dict."""
    model = tiny.build(case)
    tiny.save(model, tmp_path)
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() != model.state_dict().keys()
    for kind in KINDS:
        state = scramble_stream(model, model.config, case, kind)
        changed = scramble_stream(loaded, model.config, case, kind)
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        read = type(model).from_pretrained(tmp_path).state_dict()
        assert all(torch.equal(read[name], state[name]) for name in state)


@pytest.mark.parametrize("case", ["gemma", "gpt2", "bert-masked-lm", "mixtral"])
def test_dtypes_and_memory(case):
    """The result has the dtypes of the input, and every tensor its own contiguous memory."""
    model = tiny.build(case, dtype=torch.bfloat16)
    source, family = model.state_dict(), tiny.FAMILIES[case].family
    for kind in KINDS if family not in NORMS_BEHIND else ("permutation",):
        state = scramble_stream(model, model.config, family, kind)
        assert all(state[name].dtype == tensor.dtype for name, tensor in source.items())
        assert all(tensor.is_contiguous() for tensor in state.values())
        pointers = [t.untyped_storage().data_ptr() for t in (*state.values(), *model.parameters())]
        assert len(set(pointers)) == len(pointers)


def test_the_seed_decides():
    model = model_of("gpt2")
    first, again, other = (
        scramble_stream(model.state, model.config, "gpt2", "permutation", seed)
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["transformer.wte.weight"], other["transformer.wte.weight"])


def test_unknown_kind():
    model = model_of("llama")
    with pytest.raises(ValueError, match="unknown kind: affine"):
        scramble_stream(model.state, model.config, "llama", "affine")
