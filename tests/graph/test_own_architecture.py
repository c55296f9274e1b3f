"""``align_architecture``: a user's own declaration, for one merge."""

import json
from importlib.resources import files

import pytest
from mergekit.config import MergeConfiguration

from mergekit_rotation.architecture import VARIABLE
from mergekit_rotation.graph import run
from mergekit_rotation.graph.errors import RotationError
from merging import Twins, config, merge, merged

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
