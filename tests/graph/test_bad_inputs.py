"""Bad input: one sentence that names model, tensor and remedy, exit code 1, nothing written."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

import tiny
from merging import Twins, changed_copy, config, merge, merged, weights

Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    return Twins("llama", tmp_path_factory.mktemp("llama"))


def refused(models, out, *fragments, options=(), **more):
    """Merge, and check that it was refused in one sentence that holds the fragments."""
    result = merge(config("rotation_linear", models, **more), out, *options)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), result.exception
    lines = [line for line in result.output.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1
    for fragment in fragments:
        assert fragment in lines[0]
    assert "Traceback" not in result.output
    return lines[0]


def nothing_written(out):
    return not out.exists() or not any(out.iterdir())


def other_model(tmp_path, case="llama", **overrides):
    folder = tmp_path / "other"
    tiny.save(tiny.build(case, **overrides), folder)
    return folder


@pytest.mark.parametrize(
    ("overrides", "fragment"),
    [
        ({"num_attention_heads": 8, "head_dim": 8}, "num_attention_heads is 8, but 4"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4, but 2"),
        ({"head_dim": 8}, "head_dim is 8, but 16"),
        ({"hidden_size": 32}, "hidden_size is 32, but 48"),
        ({"intermediate_size": 96}, "intermediate_size is 96, but 80"),
    ],
)
def test_other_shapes(twins, tmp_path, overrides, fragment):
    other = other_model(tmp_path, **overrides)
    out = tmp_path / "out"
    refused([twins.reference, other], out, fragment, str(other), str(twins.reference), "remove")
    assert nothing_written(out)


def test_missing_sibling(twins, tmp_path):
    other = changed_copy(
        twins.others[0], tmp_path / "b", lambda s: {k: v for k, v in s.items() if k != Q}
    )
    out = tmp_path / "out"
    refused([twins.reference, other], out, str(other), f"tensor {Q} is missing", "fetch")
    assert nothing_written(out)


def test_missing_norm(twins, tmp_path):
    name = "model.layers.1.input_layernorm.weight"
    other = changed_copy(
        twins.others[0], tmp_path / "b", lambda s: {k: v for k, v in s.items() if k != name}
    )
    refused([twins.reference, other], tmp_path / "out", f"tensor {name} is missing")
    assert nothing_written(tmp_path / "out")


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (torch.uint8, "U8"),
        (torch.int8, "I8"),
        (torch.int32, "I32"),
        (torch.float8_e4m3fn, "F8_E4M3"),
    ],
)
def test_integer_and_fp8_tensors(twins, tmp_path, dtype, stored):
    other = changed_copy(
        twins.others[0], tmp_path / "b", lambda s: {**s, Q: s[Q].clamp(0, 1).to(dtype)}
    )
    out = tmp_path / "out"
    refused([twins.reference, other], out, str(other), Q, f"stored as {stored}", "unquantised")
    assert nothing_written(out)
    refused([other, twins.reference], out, str(other), Q, f"stored as {stored}", "unquantised")


def test_packed_tensor(twins, tmp_path):
    other = changed_copy(
        twins.others[0],
        tmp_path / "b",
        lambda s: {**s, Q: torch.zeros(s[Q].numel() // 2, 1, dtype=torch.uint8)},
    )
    refused([twins.reference, other], tmp_path / "out", Q, "stored as U8")
    assert nothing_written(tmp_path / "out")


def test_tensor_of_another_shape_than_the_config_says(twins, tmp_path):
    other = changed_copy(twins.others[0], tmp_path / "b", lambda s: {**s, Q: s[Q][:32].clone()})
    refused([twins.reference, other], tmp_path / "out", Q, "[32, 48]", "config demands [64, 48]")
    assert nothing_written(tmp_path / "out")


def test_quantization_config(twins, tmp_path):
    other = changed_copy(twins.others[0], tmp_path / "b", lambda s: s)
    settings = json.loads((other / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (other / "config.json").write_text(json.dumps(settings))
    refused([twins.reference, other], tmp_path / "out", str(other), "quantization_config")
    assert nothing_written(tmp_path / "out")


def test_architecture_without_a_data_file(tmp_path):
    from transformers import HeliumConfig, HeliumForCausalLM

    for name in "ab":
        model = HeliumForCausalLM(
            HeliumConfig(
                vocab_size=32,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=1,
                num_attention_heads=2,
                pad_token_id=0,
            )
        )
        model.save_pretrained(tmp_path / name)
    models = [tmp_path / "a", tmp_path / "b"]
    message = refused(models, tmp_path / "out", "HeliumForCausalLM", "supported are", "llama")
    assert "align_unsupported: skip" in message
    assert nothing_written(tmp_path / "out")

    skip = {"align_unsupported": "skip"}
    ours = merged(config("rotation_linear", models, parameters=skip), tmp_path / "out")
    plain = merged(config("linear", models), tmp_path / "plain")
    ours, plain = weights(ours), weights(plain)
    assert ours.keys() == plain.keys()
    assert all(torch.equal(ours[name], plain[name]) for name in plain)


def test_skip_leaves_a_model_unaligned_with_one_warning(twins, tmp_path, caplog):
    # Same shapes of all tensors, but other heads: mergekit merges, alignment cannot.
    other = changed_copy(twins.others[0], tmp_path / "b", lambda s: s)
    settings = json.loads((other / "config.json").read_text())
    settings.update(num_attention_heads=8, num_key_value_heads=4, head_dim=8)
    (other / "config.json").write_text(json.dumps(settings))
    models = [twins.reference, other]
    refused(models, tmp_path / "out", "num_attention_heads is 8, but 4", "align_unsupported: skip")
    raw = config("rotation_linear", models, parameters={"align_unsupported": "skip"})
    ours = weights(merged(raw, tmp_path / "out"))
    warnings = [r.getMessage() for r in caplog.records if "not aligned" in r.getMessage()]
    assert len(warnings) == 1
    assert str(other) in warnings[0]
    plain = weights(merged(config("linear", models), tmp_path / "plain"))
    assert all(torch.equal(ours[name], plain[name]) for name in plain)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", Q, "model.norm.weight", "lm_head.weight"]
)
def test_nan_and_inf_leave_no_model_behind(twins, tmp_path, value, name):
    def damage(state):
        state[name].view(-1)[3] = value

    other = changed_copy(twins.others[0], tmp_path / "b", damage)
    out = tmp_path / "out"
    # An older model in the folder, and shards so small that some are written before the damage.
    shutil.copytree(twins.reference, out)
    save_file({"x": torch.zeros(1)}, out / "model-00001-of-00002.safetensors")
    refused(
        [twins.reference, other],
        out,
        str(other),
        name,
        "holds NaN or Inf",
        options=("--out-shard-size", "1000"),
    )
    assert not (out / "config.json").exists()
    assert not list(out.glob("*.safetensors*"))


def test_shards_that_are_still_being_written_do_not_stay(twins, tmp_path):
    def damage(state):
        state["model.norm.weight"].view(-1)[0] = float("nan")

    other = changed_copy(twins.others[0], tmp_path / "b", damage)
    out = tmp_path / "out"
    options = ("--async-write", "--out-shard-size", "1000")
    refused([twins.reference, other], out, "model.norm.weight", options=options)
    assert not list(out.glob("*"))


def test_damaged_shard(twins, tmp_path):
    other = changed_copy(twins.others[0], tmp_path / "b", lambda s: s)
    file = other / "model.safetensors"
    index = {"weight_map": dict.fromkeys(weights(other), "model.safetensors")}
    (other / "model.safetensors.index.json").write_text(json.dumps(index))
    file.write_bytes(file.read_bytes()[:5000])
    refused([twins.reference, other], tmp_path / "out", str(other), "cannot read model.safetensors")
    assert nothing_written(tmp_path / "out")


def test_output_into_an_input(twins, tmp_path):
    other = changed_copy(twins.others[0], tmp_path / "b", lambda s: s)
    before = weights(other)
    refused([twins.reference, other], other, "one of the inputs")
    assert weights(other).keys() == before.keys()


def test_pickled_model_with_integer_tensors_is_refused_when_read(twins, tmp_path):
    other = tmp_path / "b"
    other.mkdir()
    shutil.copy(twins.reference / "config.json", other)
    state = weights(twins.reference)
    state[Q] = state[Q].to(torch.int8)
    torch.save(state, other / "pytorch_model.bin")
    refused([twins.reference, other], tmp_path / "out", str(other), Q, "dtype int8")
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_rotation_align_needs_one_model_and_a_reference(twins, tmp_path):
    a, b = twins.reference, twins.others[0]
    for raw, fragment in [
        (config("rotation_align", [a]), "needs align_reference"),
        (config("rotation_align", [a], base_model=str(b)), "moves one model"),
        (config("rotation_align", [a, b]), "moves one model"),
    ]:
        result = merge(raw, tmp_path / "out")
        assert result.exit_code == 1
        assert fragment in result.output
        assert nothing_written(tmp_path / "out")


def test_a_tensor_that_is_not_written_is_named(tmp_path, caplog):
    for name, seed in (("a", 0), ("b", 1)):
        tiny.save(tiny.build("llama", seed=seed, biases=True), tmp_path / name)

    def changed(state):
        return {**state, "model.layers.0.adapter.weight": torch.ones(2, 2)}

    changed_copy(tmp_path / "b", tmp_path / "c", changed)
    merged(config("rotation_linear", [tmp_path / "a", tmp_path / "c"]), tmp_path / "out")
    assert "does not list model.layers.*.adapter.weight" in caplog.text
    written = weights(tmp_path / "out")
    assert written.keys() == weights(tmp_path / "a").keys()
