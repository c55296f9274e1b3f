"""The ``align_*`` parameters: what is accepted, what is refused, what they do."""

import pytest
import torch
from mergekit.config import MergeConfiguration

from mergekit_rotation.graph import run
from mergekit_rotation.graph.errors import RotationError
from merging import Twins, config, merge, merged, weights

YAML = """
merge_method: {method}
models:
  - model: ./x/a
  - model: ./x/b
"""


def read(text, method="rotation_linear"):
    import yaml

    return MergeConfiguration.model_validate(yaml.safe_load(YAML.format(method=method) + text))


@pytest.mark.parametrize(
    "text",
    [
        "parameters: {align_heads: false}",
        "parameters: {align_neurons: off}",
        "parameters: {align_query_key: [true, false]}",
        "parameters: {align_value_output: {value: false, filter: self_attn}}",
        "parameters: {align_heads: [{filter: self_attn, value: false}, {value: true}]}",
        "parameters: {align_unsupported: skip}",
        "parameters: {align_reference: ./x/b}",
        "parameters: {weight: 0.5, normalize: true}",
        "tokenizer: {source: union, tokens: {align_me: {source: ./x/a}}}",
    ],
)
def test_accepted(text):
    assert read(text).merge_method == "rotation_linear"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "parameters: {align_head: false}",
            "unknown parameter parameters.align_head; did you mean 'align_heads'",
        ),
        ("parameters: {aling_heads: false}", "did you mean 'align_heads'"),
        ("parameters: {align_keys: false}", "unknown parameter parameters.align_keys"),
        ("parameters: {align_heads: 0}", "align_heads: write true or false, not 0"),
        ("parameters: {align_heads: 'false'}", "write true or false, not 'false'"),
        ("parameters: {align_heads: null}", "write true or false, not None"),
        ("parameters: {align_heads: []}", "the list is empty"),
        ("parameters: {align_heads: [{filter: x}]}", "filter and value"),
        ("parameters: {align_heads: {vale: true}}", "filter and value"),
        ("parameters: {align_unsupported: ignore}", "write error or skip, not 'ignore'"),
        ("parameters: {align_unsupported: false}", "write error or skip, not False"),
        ("parameters: {align_reference: 3}", "write the path of one model"),
        ("parameters: {align_reference: null}", "write the path of one model"),
        ("parameters: {align_reference: [a, b]}", "write the path of one model"),
        (
            "align_heads: false",
            "align_heads stands where mergekit drops it; write it under parameters:",
        ),
        ("tokenizer: {align_heads: false}", "tokenizer.align_heads stands where mergekit drops it"),
        ("method: rotation_linear", "say the same"),
        ("method: linear", "say the same"),
    ],
)
def test_refused(text, message):
    with pytest.raises(RotationError, match=message.replace("[", r"\[")):
        read(text)


def test_input_level_is_checked_too():
    raw = {
        "merge_method": "rotation_linear",
        "models": [{"model": "a", "parameters": {"align_headz": True}}],
    }
    with pytest.raises(RotationError, match=r"models\[0\].parameters.align_headz"):
        MergeConfiguration.model_validate(raw)
    raw["models"] = [{"model": "a", "align_heads": True}]
    with pytest.raises(RotationError, match=r"write it under models\[0\].parameters:"):
        MergeConfiguration.model_validate(raw)
    raw["models"] = [{"model": "a", "parameters": {"align_reference": "a"}}]
    with pytest.raises(RotationError, match="belongs to the whole merge"):
        MergeConfiguration.model_validate(raw)


@pytest.mark.parametrize("name", ["align_as", "align_task_base"])
def test_models_that_mergekit_multi_has_put_in_are_paths_again(name):
    from mergekit.scripts.multimerge import patched_config

    entry = {"model": "a", "parameters": {name: "first", "weight": 1.0}}
    raw = {"merge_method": "rotation_linear", "models": [entry, {"model": "b"}]}
    raw["parameters"] = {"align_reference": "first"}
    config, used = patched_config(MergeConfiguration.model_validate(raw), {"first"}, "work")
    assert config.models[0].parameters == {name: "work/first", "weight": 1.0}
    assert config.parameters == {"align_reference": "work/first"}
    assert used == {"first"}


def test_plain_methods_are_not_looked_at():
    assert read("parameters: {align_head: 3}", method="linear").merge_method == "linear"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("rotation_linea", "rotation_linear"),
        ("rotation-linear", "rotation_linear"),
        ("rotation_dareties", "rotation_dare_ties"),
        ("rotation", "rotation_"),
    ],
)
def test_unknown_method_proposes_the_nearest(name, near):
    with pytest.raises(RotationError, match=f"unknown merge method '{name}'; did you mean '{near}"):
        read("", method=name)


def test_method_is_another_spelling():
    raw = {"method": "rotation_linear", "models": [{"model": "a"}]}
    assert MergeConfiguration.model_validate(raw).merge_method == "rotation_linear"
    with pytest.raises(RotationError, match="say the same"):
        MergeConfiguration.model_validate({**raw, "merge_method": "linear"})
    with pytest.raises(ValueError, match="merge_method"):
        MergeConfiguration.model_validate({"method": "linear", "models": [{"model": "a"}]})


def test_models_are_ordered_with_the_reference_first():
    assert [str(m) for m in read("").referenced_models()] == ["./x/a", "./x/b"]
    chosen = read("parameters: {align_reference: ./x/b}")
    assert [str(m) for m in chosen.referenced_models()] == ["./x/b", "./x/a"]
    outside = read("parameters: {align_reference: ./x/c}")
    assert [str(m) for m in outside.referenced_models()] == ["./x/a", "./x/b"]
    based = read("base_model: ./x/z")
    assert [str(m) for m in based.referenced_models()] == ["./x/z", "./x/a", "./x/b"]


# -- effects ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    return Twins("llama", tmp_path_factory.mktemp("llama"), count=2)


def moved_axes(twins, out, parameters, **more):
    models = [twins.reference, twins.others[0]]
    merged(config("rotation_linear", models, parameters=parameters, **more), out)
    return {axis for record in run.current().records for axis in record.moved}


@pytest.mark.parametrize(
    ("parameters", "axes"),
    [
        ({}, {"kv", "g", "qk", "vo", "f", "~f"}),
        ({"align_heads": False}, {"qk", "vo", "f", "~f"}),
        ({"align_neurons": False}, {"kv", "g", "qk", "vo"}),
        ({"align_query_key": False}, {"kv", "g", "vo", "f", "~f"}),
        ({"align_value_output": False}, {"kv", "g", "qk", "f", "~f"}),
        (
            {"align_neurons": [{"filter": "mlp", "value": False}, {"value": True}]},
            {"kv", "g", "qk", "vo"},
        ),
        (
            dict.fromkeys(
                ["align_heads", "align_neurons", "align_query_key", "align_value_output"], False
            ),
            set(),
        ),
    ],
)
def test_switches(twins, tmp_path, parameters, axes):
    assert moved_axes(twins, tmp_path / "out", parameters) <= axes
    for axis in axes & {"qk", "vo", "f", "~f"}:
        assert axis in {a for record in run.current().records for a in record.moved}


def test_a_gradient_switches_layers(twins, tmp_path):
    moved_axes(twins, tmp_path / "out", {"align_neurons": [True, False]})
    layers = {record.layer for record in run.current().records if record.block == "neurons"}
    assert layers == {"default.0"}


def test_switch_of_one_input(twins, tmp_path):
    off = {
        "align_heads": False,
        "align_neurons": False,
        "align_query_key": False,
        "align_value_output": False,
    }
    raw = config("rotation_linear", [twins.reference, *twins.others])
    raw["models"][1]["parameters"].update(off)
    merged(raw, tmp_path / "out")
    assert {record.model for record in run.current().records} == {str(twins.others[1])}


def test_a_filter_that_splits_a_symmetry_is_refused(twins, tmp_path):
    parameters = {"align_query_key": [{"filter": "q_proj", "value": False}, {"value": True}]}
    models = [twins.reference, twins.others[0]]
    result = merge(config("rotation_linear", models, parameters=parameters), tmp_path / "out")
    assert result.exit_code == 1
    assert "align_query_key: the filter is true for" in result.output
    assert "only move together" in result.output
    assert not (tmp_path / "out").exists()


def test_reference_is_explicit_then_base_then_first(twins, tmp_path):
    a, b, c = twins.reference, *twins.others

    def references(**more):
        merged(config("rotation_linear", [a, b, c], **more), tmp_path / "out")
        return {record.reference for record in run.current().records}

    assert references() == {str(a)}
    assert references(base_model=str(b)) == {str(b)}
    assert references(base_model=str(b), parameters={"align_reference": str(c)}) == {str(c)}


def test_the_reference_is_not_moved(twins, tmp_path):
    raw = config(
        "rotation_task_arithmetic", [*twins.others], weight=0.0, base_model=str(twins.reference)
    )
    out = merged(raw, tmp_path / "out")
    reference = weights(twins.reference)
    assert all(torch.equal(tensor, reference[name]) for name, tensor in weights(out).items())
