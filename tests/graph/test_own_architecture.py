"""``align_architecture``: a user's own declaration, for one merge."""

import json
from importlib.resources import files

import pytest
import torch
import transformers
from mergekit.config import MergeConfiguration

from mergekit_rotation.architecture import VARIABLE, read_family
from mergekit_rotation.graph import run
from mergekit_rotation.graph.errors import RotationError
from mergekit_rotation.proof import check_family, element, randomise
from mergekit_rotation.proof.elements import moved
from mergekit_rotation.proof.models import build
from merging import Twins, changed_copy, config, merge, merged, weights

LLAMA = (files("mergekit_rotation.architecture") / "data" / "llama.json").read_text("utf-8")


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    return Twins("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def own(tmp_path):
    """Our declaration of Llama without its neurons."""
    file = tmp_path / "mine.json"
    data = {**json.loads(LLAMA), "family": "mine"}
    data["stream"]["tensors"] |= data["neurons"]["tensors"]
    data["stream"]["tensors"] = {
        name: text.replace("~f", "n").replace("f ", "n ") for name, text in
        data["stream"]["tensors"].items()
    }  # fmt: skip
    data["neurons"] = []
    file.write_text(json.dumps(data))
    return file


def blocks(twins, out, **parameters):
    models = [twins.reference, *twins.others]
    merged(config("rotation_linear", models, parameters=parameters), out)
    return {record.block for record in run.current().records}


def told(caplog):
    return [m for m in (r.getMessage() for r in caplog.records) if "your own declaration" in m]


def test_it_is_used_in_its_own_merge_alone(twins, own, tmp_path, caplog):
    assert blocks(twins, tmp_path / "before") == {"attention", "neurons"}
    assert told(caplog) == []
    assert blocks(twins, tmp_path / "own", align_architecture=str(own)) == {"attention"}
    (message,) = told(caplog)
    assert message.startswith(f"{own}: your own declaration of mine is used for LlamaForCausalLM")
    caplog.clear()
    assert blocks(twins, tmp_path / "after") == {"attention", "neurons"}
    assert told(caplog) == []


def test_the_variable_does_the_same(twins, own, tmp_path, caplog, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(own.parent))
    assert blocks(twins, tmp_path / "out") == {"attention"}
    assert len(told(caplog)) == 1


def test_with_the_residual_stream(twins, own, tmp_path):
    parameters = {"align_architecture": str(own), "align_residual": "permutation"}
    assert "attention" in blocks(twins, tmp_path / "out", **parameters)


def test_one_error_names_file_and_field(twins, own, tmp_path):
    own.write_text(own.read_text().replace('"norm": "rms"', '"norm": "root"'))
    parameters = {"align_architecture": str(own)}
    raw = config("rotation_linear", [twins.reference, *twins.others], parameters=parameters)
    result = merge(raw, tmp_path / "out")
    assert result.exit_code == 1
    (line,) = [line for line in result.output.splitlines() if line.startswith("Error: ")]
    assert line.startswith(f"Error: align_architecture: {own}: stream.norm: Input should be")
    assert not (tmp_path / "out").exists()


def test_a_model_that_nobody_knows(tmp_path):
    """Declared, proven and merged: its twin in other coordinates returns."""
    data = {**json.loads(LLAMA), "family": "mine", "models": {"olmo": ["OlmoForCausalLM"]}}
    data["stream"] |= {"norm": "layer", "norms": {}}  # without weights
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(data))
    family = read_family(file)
    assert all(report.holds and report.rows for report in check_family(family))

    sizes = {"hidden_size": 48, "intermediate_size": 80, "vocab_size": 67, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    settings = transformers.OlmoConfig(**sizes, **heads, pad_token_id=0)
    model = build("OlmoForCausalLM", settings)
    randomise(model)
    model.save_pretrained(tmp_path / "a")

    def scramble(state):
        state = {name: x.double() for name, x in state.items()}
        return {
            name: x.float().contiguous()
            for name, x in moved(state, settings, family, element).items()
        }

    twin = changed_copy(tmp_path / "a", tmp_path / "b", scramble)
    raw = config("rotation_linear", [tmp_path / "a", twin])
    raw["parameters"] = {"align_architecture": str(file)}
    ours, plain = (
        weights(merged({**raw, **change}, tmp_path / f"out-{k}"))
        for k, change in enumerate([{}, {"merge_method": "linear", "parameters": {}}])
    )
    original = weights(tmp_path / "a")
    for name, x in original.items():
        bound = 64 * x.shape[-1] * torch.finfo(torch.float32).eps * float(x.norm())
        assert float((ours[name] - x).norm()) <= bound, name
    assert any(
        float((plain[name] - x).norm()) > 0.1 * float(x.norm()) for name, x in original.items()
    )


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("top", 3, "write one path, not 3"),
        ("top", "", "write one path, not ''"),
        ("input", "mine.json", "belongs to the whole merge"),
    ],
)
def test_it_is_written_once(place, value, message):
    settings = {"align_architecture": value}
    raw = {"merge_method": "rotation_linear", "models": [{"model": "a"}]}
    target = raw if place == "top" else raw["models"][0]
    target["parameters"] = settings
    with pytest.raises(RotationError, match=message):
        MergeConfiguration.model_validate(raw)
