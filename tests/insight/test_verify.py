"""``mergekit-rotation verify``: yes, no, where, and what cannot be told."""

import copy
import json
import re
import weakref
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from mergekit.options import MergeOptions

import tiny
from mergekit_rotation.cli import main
from mergekit_rotation.insight import verify as verifying
from merging import Twins, changed_copy, save_tokenizer

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart"


def verified(tmp_path, *arguments):
    """Run the command; return its exit code, its JSON and what it printed."""
    file = tmp_path / "verified.json"
    file.unlink(missing_ok=True)
    given = [*map(str, arguments), "--json", str(file), "--quiet"]
    result = CliRunner().invoke(main, ["verify", *given])
    return result.exit_code, json.loads(file.read_text()) if file.exists() else None, result.output


def cast(dtype):
    return lambda state: {n: x.to(dtype) if x.is_floating_point() else x for n, x in state.items()}


def scaled(part, factor=1.01):
    def change(state):
        name = next(name for name in state if part in name)
        return {**state, name: factor * state[name]}

    return change


@pytest.mark.parametrize("case", ["llama", "gpt2", "qwen3_moe", "bert", "vit", "t5", "mamba"])
def test_other_coordinates_are_the_same_function_in_every_precision(case, tmp_path):
    twins = Twins(case, tmp_path)
    half = changed_copy(twins.others[0], tmp_path / "half", cast(torch.bfloat16))
    for other, dtype in ((twins.others[0], "float32"), (twins.others[0], "float64"), (half, None)):
        options = ["--dtype", dtype] if dtype else []
        code, data, output = verified(tmp_path, twins.reference, other, *options)
        assert code == 0 and data["same"] and data["stream"] == "same", output
        assert data["stored"] == ("float32" if dtype else "bfloat16")
        # four random roundings are allowed, and this is one
        assert all(e["relative"] < e["bound"] / 2 for e in data["outputs"] + data["hidden"])
    assert "is the same function as" in " ".join(output.split())


@pytest.mark.parametrize(
    ("case", "part", "place"),
    [
        ("llama", "embed_tokens", "embeddings"),
        ("llama", "layers.0.mlp.down", "layer 0"),
        ("llama", "layers.1.self_attn.o_", "layer 1"),
        ("llama", "lm_head", "logits"),
        ("bert", "layer.1.output.dense.w", "layer 1"),
        ("vit", "layer.0.attention.output.dense.w", "layer 0"),
        ("t5", "encoder.block.1.layer.1.DenseReluDense.wo", "encoder layer 1"),
    ],
)
def test_a_change_of_one_percent_is_seen_where_it_is(case, part, place, tmp_path):
    tiny.save(tiny.build(case), tmp_path / "a")
    other = changed_copy(tmp_path / "a", tmp_path / "b", scaled(part))
    code, data, output = verified(tmp_path, tmp_path / "a", other)
    assert code == 1 and not data["same"] and data["apart_from"] == place
    assert data["stream"] is None and f"they differ from {place} on" in " ".join(output.split())


def test_a_stream_in_other_coordinates_is_told_from_another_function(tmp_path):
    twins = Twins("llama", tmp_path)
    other = twins.turned(tmp_path / "other")
    code, data, output = verified(tmp_path, twins.reference, other)
    assert code == 0 and data["stream"] == "other" and data["apart_from"] == "embeddings"
    assert "in other coordinates" in output
    assert not any(entry["agrees"] for entry in data["hidden"])


def test_a_text_is_read_by_the_tokenizer(tmp_path):
    text = QUICKSTART / "heldout-code.txt"
    models = [QUICKSTART / "model", QUICKSTART / "finetune-rotated"]
    code, data, _ = verified(tmp_path, models[0], models[0], "--text", text)
    assert code == 0 and str(text) in data["inputs"]
    assert all(entry["largest"] == 0 for entry in data["outputs"] + data["hidden"])
    code, data, _ = verified(tmp_path, *models, "--text", text)
    assert code == 1 and data["apart_from"] == "embeddings"


def test_models_of_other_shapes_are_not_the_same(tmp_path):
    tiny.save(tiny.build("llama"), tmp_path / "a")
    tiny.save(tiny.build("llama", vocab_size=70), tmp_path / "b")
    code, data, _ = verified(tmp_path, tmp_path / "a", tmp_path / "b")
    assert code == 1 and data["reason"] == "vocabularies of 67 and 70 tokens"
    tiny.save(tiny.build("bert", hidden_size=64), tmp_path / "c")
    tiny.save(tiny.build("bert"), tmp_path / "d")
    code, data, output = verified(tmp_path, tmp_path / "c", tmp_path / "d")
    assert code == 1 and re.search(r"\[2, \d+, 64\] against .*\[2, \d+, 48\]", data["reason"])
    assert data["reason"] in " ".join(output.split())


def test_layers_are_compared_as_far_as_they_go(tmp_path):
    model = tiny.build("llama", num_hidden_layers=3)
    tiny.save(model, tmp_path / "a")
    part = copy.deepcopy(model)
    part.model.layers, part.config.num_hidden_layers = part.model.layers[:2], 2
    tiny.save(part, tmp_path / "b")
    code, data, _ = verified(tmp_path, tmp_path / "a", tmp_path / "b")
    # transformers returns the last layer's with the final norm
    assert code == 1 and data["apart_from"] == "layer 1"


def test_what_is_not_run_is_said(tmp_path):
    tiny.save(tiny.build("gemma3_vl"), tmp_path / "a")
    code, data, output = verified(tmp_path, tmp_path / "a", tmp_path / "a")
    assert code == 0
    assert data["unseen"] == ["model.vision_tower", "model.multi_modal_projector"]
    assert "not verified: model.vision_tower" in " ".join(output.split())


def test_one_model_is_in_memory_at_a_time(tmp_path, monkeypatch):
    tiny.save(tiny.build("llama"), tmp_path / "a")
    alive = []
    load = verifying.load

    def counted(*arguments):
        assert not [model for model in alive if model() is not None]
        model = load(*arguments)
        alive.append(weakref.ref(model))
        return model

    monkeypatch.setattr(verifying, "load", counted)
    answer = verifying.verify(*2 * [str(tmp_path / "a")], MergeOptions(quiet=True))
    assert answer.same and len(alive) == 2


def test_what_cannot_be_told_is_an_error_of_its_own(tmp_path):
    tiny.save(tiny.build("llama"), tmp_path / "a")
    tiny.save(tiny.build("t5"), tmp_path / "t5")
    lacking = changed_copy(tmp_path / "a", tmp_path / "b", lambda s: {k: s[k] for k in list(s)[1:]})
    damaged = changed_copy(tmp_path / "a", tmp_path / "c", scaled("down_proj", float("nan")))
    save_tokenizer(tmp_path / "t5", [f"t{row}" for row in range(tiny.VOCABULARY)])
    text, short = QUICKSTART / "heldout-code.txt", tmp_path / "short.txt"
    short.write_text("t1")
    small = QUICKSTART / "model"
    for arguments, word in (
        ((tmp_path / "a", tmp_path / "nothing"), "there is no such folder"),
        ((tmp_path / "a", lacking), "is missing, and transformers draws it at random"),
        ((tmp_path / "a", damaged), "NaN"),
        ((tmp_path / "a", tmp_path / "a", "--text", text), "cannot be read by its tokenizer"),
        ((tmp_path / "t5", tmp_path / "t5", "--text", text), "leave out --text"),
        ((small, small, "--text", short), "has 2 tokens, and"),
        ((tmp_path / "a",), "Missing argument"),
    ):
        code, data, output = verified(tmp_path, *arguments)
        assert code == 2 and data is None and word in output, output
        assert "Usage" in output or output.count("\n") == 1
