"""Damaged models and mistaken configurations, a case each: one sentence, and nothing written."""

import errno
import json
import os
import shutil

import pytest
import safetensors
import safetensors.torch
import torch

import tiny
from merging import Twins, changed_copy, config, merge, merged, planned, save_adapter, weights

Q = "model.layers.1.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    return Twins("llama", tmp_path_factory.mktemp("llama"))


def sentence(result):
    """Return the one sentence of a refused merge."""
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    (line,) = (line for line in result.output.splitlines() if line.startswith("Error: "))
    return line.removeprefix("Error: ")


def refused(raw, out, *options):
    """Return the sentence by which the plan of a merge and the merge are refused."""
    before = out.exists()
    foreseen = sentence(planned(raw, out, *options))
    assert out.exists() == before
    said = sentence(merge(raw, out, *options))
    assert foreseen == said
    return said


# -- one model is damaged: what is done to its folder, what the sentence says ----------------------


def _state(change):
    return lambda folder: save(folder, change(weights(folder)))


def save(folder, state):
    safetensors.torch.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def _config(**changes):
    def edit(folder):
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return edit


def _text(name, text):
    return lambda folder: (folder / name).write_text(text)


def _cut(name, size):
    def cut(folder):
        _sharded(folder)
        file = folder / name
        file.write_bytes(file.read_bytes()[:size])

    return cut


def _sharded(folder):
    """Store a model in two shards."""
    state = weights(folder)
    (folder / "model.safetensors").unlink()
    places = {}
    for number in (0, 1):
        part = {name: state[name] for name in list(state)[number::2]}
        shard = f"model-{number + 1:05d}-of-00002.safetensors"
        safetensors.torch.save_file(part, folder / shard, metadata={"format": "pt"})
        places |= dict.fromkeys(part, shard)
    _text("model.safetensors.index.json", json.dumps({"weight_map": places}))(folder)


def _without_a_shard(folder):
    _sharded(folder)
    (folder / "model-00001-of-00002.safetensors").unlink()


def _listed_but_absent(folder):
    _sharded(folder)
    file = folder / "model.safetensors.index.json"
    places = json.loads(file.read_text())["weight_map"]
    file.write_text(json.dumps({"weight_map": {**places, "extra.weight": places[Q]}}))


def _pickled(folder):
    state = weights(folder)
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")


def _cut_pickle(folder):
    _pickled(folder)
    file = folder / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:3000])


def _nan_in_pickle(folder):
    save(folder, {**weights(folder), Q: torch.full((64, 48), torch.nan)})
    _pickled(folder)


def _packed(state):
    packed = torch.zeros(state[Q].numel() // 2, 1, dtype=torch.uint8)
    return {**state, Q: packed, f"{Q}.absmax": torch.ones(3)}


def _emptied(folder):
    for file in folder.iterdir():
        file.unlink()


DAMAGES = {
    "no folder": (shutil.rmtree, ["there is no such folder"]),
    "empty folder": (_emptied, ["has no config.json", "fetch"]),
    "no configuration": (lambda f: (f / "config.json").unlink(), ["has no config.json", "fetch"]),
    "broken configuration": (_text("config.json", "{ no"), ["cannot read its config.json"]),
    "empty configuration": (_text("config.json", "{}"), ["cannot read its config.json"]),
    "unknown type": (_config(model_type="nonsense"), ["cannot read its config.json", "nonsense"]),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ["cannot read its weights"]),
    "no shard": (_without_a_shard, ["lists model-00001-of-00002.safetensors", "not there"]),
    "cut shard": (
        _cut("model-00002-of-00002.safetensors", 9000),
        ["cannot read model-00002-of-00002.safetensors", "fetch"],
    ),
    "cut header": (
        _cut("model-00001-of-00002.safetensors", 50),
        ["cannot read model-00001-of-00002.safetensors", "fetch"],
    ),
    "empty file": (_text("model.safetensors", ""), ["cannot read its weights", "fetch"]),
    "pointer": (
        _text("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:a\n"),
        ["cannot read its weights", "fetch"],
    ),
    "tensor not there": (_listed_but_absent, ["lists extra.weight", "does not hold it"]),
    "broken index": (_text("model.safetensors.index.json", "{"), ["cannot read its weights"]),
    "empty index": (_text("model.safetensors.index.json", "{}"), ["weight_map"]),
    "cut pickle": (_cut_pickle, ["cannot read its weights", "fetch"]),
    "NaN in a pickle": (_nan_in_pickle, [Q, "holds NaN or Inf"]),
    "GPTQ": (
        _state(lambda s: {**s, Q.replace("weight", "qweight"): torch.zeros(4, dtype=torch.int32)}),
        ["q_proj.qweight", "unquantised"],
    ),
    "4-bit": (_state(_packed), [Q, "unquantised"]),
    "FP8": (
        _state(lambda s: {**s, EMBEDDING: s[EMBEDDING].to(torch.float8_e4m3fn)}),
        [f"{EMBEDDING} is stored as F8_E4M3", "unquantised"],
    ),
    "FP8 scales": (
        _state(lambda s: {**s, f"{Q}_scale_inv": torch.ones(1)}),
        [f"{Q}_scale_inv", "unquantised"],
    ),
    "AWQ": (_config(quantization_config={"quant_method": "awq"}), ["quantization_config"]),
    "shape of a norm": (
        _state(lambda s: {**s, "model.norm.weight": torch.ones(3)}),
        ["model.norm.weight has shape [3], but [48]", "remove"],
    ),
    "shape of embeddings": (
        _state(lambda s: {**s, EMBEDDING: torch.ones(67, 3)}),
        [f"{EMBEDDING} has shape [67, 3], but [67, 48]", "remove"],
    ),
    "vocabulary": (_config(vocab_size=11), [f"{EMBEDDING} has 67 rows", "demands 11"]),
    "depth": (_config(num_hidden_layers=3), ["has 3 layers, but 2 in", "slices"]),
    "heads": (_config(num_attention_heads=8), ["num_attention_heads is 8, but 4"]),
    "neurons": (_config(intermediate_size=96), ["intermediate_size is 96, but 80"]),
}


@pytest.mark.tally("bad inputs refused")
@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_model(case, twins, tmp_path):
    damage, fragments = DAMAGES[case]
    other, out = tmp_path / "other", tmp_path / "out"
    shutil.copytree(twins.others[0], other)
    damage(other)
    raw = config("rotation_linear", [twins.reference, other])
    if case == "NaN in a pickle":  # values, which a plan does not read
        assert planned(raw, out).exit_code == 0
        said = sentence(merge(raw, out))
    else:
        said = refused(raw, out)
    assert said.startswith(f"{other}: ")
    for fragment in fragments:
        assert fragment in said
    assert not list(out.glob("*"))


# -- the configuration is mistaken -----------------------------------------------------------------

SLICE = {"model": "REFERENCE", "layer_range": [0, 1]}
MISTAKES = {
    "dtype": ({"dtype": "bfloat61"}, ["dtype: write bfloat16", "'bfloat61'"]),
    "out_dtype": ({"out_dtype": "int8"}, ["out_dtype: write bfloat16", "'int8'"]),
    "key": ({"base_modle": "REFERENCE"}, ["base_modle", "did you mean 'base_model'"]),
    "key of a slice": (
        {"models": None, "slices": [{"sources": [{"model": "REFERENCE", "layer_rang": [0, 1]}]}]},
        ["slices[0].sources[0].layer_rang;", "'layer_range'"],
    ),
    "key of a tokenizer": ({"tokenizer": {"sources": "base"}}, ["tokenizer.sources", "'source'"]),
    "parameter": (
        {"merge_method": "rotation_ties", "parameters": {"denisty": 0.5}},
        ["parameters.denisty", "did you mean 'density'"],
    ),
    "parameter of the plugin": ({"parameters": {"align_head": True}}, ["'align_heads'"]),
    "place": ({"align_heads": True}, ["align_heads stands where mergekit drops it"]),
    "type": (
        {"models": [{"model": "REFERENCE", "parameters": {"weight": "heavy"}}]},
        ["models[0].parameters.weight", "number", "'heavy'"],
    ),
    "no parameter": ({"models": [{"model": "REFERENCE"}]}, ["Missing required parameter weight"]),
    "type of a list": ({"models": "REFERENCE"}, ["models: Input should be a valid list"]),
    "two forms": ({"slices": [{"sources": [SLICE]}]}, ["Exactly one of"]),
    "no models": ({"models": []}, ["Exactly one of"]),
    "name of a model": ({"models": [{"model": "a@b@c"}]}, ["multiple @"]),
    "range": (
        {"models": None, "slices": [{"sources": [{**SLICE, "layer_range": ["x", 1]}]}]},
        ["slices.0.sources.0.layer_range.0", "valid integer"],
    ),
    "layer": (
        {
            "merge_method": "rotation_passthrough",
            "models": None,
            "slices": [{"sources": [{**SLICE, "layer_range": [1, 4]}]}],
        },
        ["asks for layer 2, but the model has 2"],
    ),
    "method": ({"merge_method": "rotation_tie"}, ["did you mean 'rotation_ties'"]),
    "no base": ({"merge_method": "rotation_ties"}, ["requires a base"]),
    "no tokenizer": ({"tokenizer_source": "union"}, ["REFERENCE: cannot load its tokenizer"]),
    "chat template": ({"chat_template": "chatlm"}, ["chat_template: 'chatlm' is neither"]),
    "tokenizer twice": ({"tokenizer_source": "base", "tokenizer": {}}, ["Cannot specify both"]),
    "adapter alone": ({"models": [{"model": "ADAPTER"}]}, ["ADAPTER: is an adapter"]),
    "no adapter": ({"models": [{"model": "REFERENCE+./none"}]}, ["./none: there is no such"]),
    "nowhere to merge an adapter": (
        {"models": [{"model": "REFERENCE+ADAPTER"}]},
        ["REFERENCE+ADAPTER: an adapter is merged", "--lora-merge-cache FOLDER"],
    ),
    "another architecture": (
        {"base_model": "GPT2", "merge_method": "rotation_ties"},
        ["different architectures"],
    ),
}


@pytest.fixture(scope="module")
def models(twins, tmp_path_factory):
    """Paths of models by the names that `MISTAKES` has for them."""
    folder = tmp_path_factory.mktemp("models")
    tiny.save(tiny.build("gpt2"), folder / "gpt2")
    save_adapter(twins.model, folder / "adapter")
    return {
        "REFERENCE": twins.reference,
        "GPT2": folder / "gpt2",
        "ADAPTER": folder / "adapter",
    }


@pytest.mark.tally("bad inputs refused")
@pytest.mark.parametrize("case", MISTAKES)
def test_mistaken_configuration(case, twins, models, tmp_path):
    changes, fragments = MISTAKES[case]
    raw = config("rotation_linear", [twins.reference, twins.others[0]])
    raw = {key: value for key, value in {**raw, **changes}.items() if value is not None}
    text = json.dumps(raw)
    for name, path in models.items():
        text = text.replace(name, str(path))
        fragments = [fragment.replace(name, str(path)) for fragment in fragments]
    said = refused(text, tmp_path / "out")
    for fragment in fragments:
        assert fragment in said
    assert not (tmp_path / "out").exists()


# -- the output cannot be written -----------------------------------------------------------------


@pytest.mark.tally("bad inputs refused")
def test_output_that_cannot_be_a_folder(twins, tmp_path):
    out = tmp_path / "file"
    out.write_text("")
    said = refused(config("rotation_linear", [twins.reference, twins.others[0]]), out)
    assert said.startswith(f"{out}: File exists; ")


@pytest.mark.tally("bad inputs refused")
def test_output_that_is_read_only(twins, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: not (mode & os.W_OK))
    raw = config("rotation_linear", [twins.reference, twins.others[0]])
    assert f"{tmp_path / 'out'} cannot be written to" in refused(raw, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))


def _full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _full_by_safetensors(*_, **__):
    raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")


@pytest.mark.tally("bad inputs refused")
@pytest.mark.parametrize("options", [(), ("--async-write",)])
@pytest.mark.parametrize("failure", [_full, _full_by_safetensors])
def test_full_disk(failure, options, twins, tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors.torch, "save_file", failure)
    raw = config("rotation_linear", [twins.reference, twins.others[0]])
    said = sentence(merge(raw, tmp_path / "out", *options))
    assert "disk full" in said
    assert "free space" in said
    assert not list((tmp_path / "out").glob("*"))


# -- what is merged all the same, with one warning ------------------------------------------------


def warnings(caplog, fragment):
    return [r.getMessage() for r in caplog.records if fragment in r.getMessage()]


@pytest.mark.parametrize("residual", ["none", "permutation"])
def test_other_rotary_frequencies(residual, twins, tmp_path, caplog):
    shutil.copytree(twins.others[0], tmp_path / "b")
    _config(rope_parameters={"rope_type": "default", "rope_theta": 5e5})(tmp_path / "b")
    raw = config("rotation_linear", [twins.reference, tmp_path / "b"])
    merged({**raw, "parameters": {"align_residual": residual}}, tmp_path / "out")
    (said,) = warnings(caplog, "rotary settings")
    assert str(tmp_path / "b") in said
    assert "rope_theta 500000.0 instead of 10000.0" in said
    assert "different frequencies" in said


def test_biases_in_one_model_only(twins, tmp_path, caplog):
    tiny.save(tiny.build("llama", attention_bias=True, biases=True), tmp_path / "biased")
    merged(config("rotation_linear", [twins.reference, tmp_path / "biased"]), tmp_path / "out")
    (said,) = warnings(caplog, "has no model.layers.*.self_attn.q_proj.bias")
    assert said.startswith(f"{twins.reference}: ")


def test_query_and_key_norms_in_one_model_only(twins, tmp_path):
    tiny.save(tiny.build("qwen3"), tmp_path / "normed")
    pair = [twins.reference, tmp_path / "normed"]
    said = refused(config("rotation_linear", pair), tmp_path / "out", "--allow-crimes")
    assert "attention of its layer 0 differ in kind" in said


def test_two_formats_in_one_folder(twins, tmp_path, caplog):
    other = changed_copy(twins.others[0], tmp_path / "b", lambda s: s)
    torch.save({}, other / "pytorch_model.bin")
    merged(config("rotation_linear", [twins.reference, other]), tmp_path / "out")
    (said,) = warnings(caplog, "pytorch_model.bin")
    assert "mergekit reads what model.safetensors says" in said


def test_keys_without_effect_are_named(twins, tmp_path, caplog):
    raw = config("rotation_linear", [twins.reference, twins.others[0]])
    more = {"x-anchor": {"a": 1}, "normalize": True, "parameters": {"normalize": True, "t": 0.5}}
    merged({**raw, **more}, tmp_path / "out")
    said = warnings(caplog, "without effect")
    assert [line.split(";")[0] for line in said] == [
        "rotation_linear is not told of normalize (write it under parameters:), x-anchor",
        "rotation_linear is not told of parameters.t",
    ]


def test_faults_of_the_package_keep_their_traceback(twins, tmp_path, monkeypatch):
    from mergekit_rotation.graph import block

    def fault(*_, **__):
        raise RuntimeError("a fault")

    monkeypatch.setattr(block.BlockSpec, "solve", fault)
    raw = config("rotation_linear", [twins.reference, twins.others[0]])
    result = merge(raw, tmp_path / "out")
    assert type(result.exception) is RuntimeError
    assert not list((tmp_path / "out").glob("*"))


def test_errors_of_mergekit_stay_as_they_are_without_us(twins, tmp_path):
    raw = config("ties", [twins.reference, twins.others[0]])
    assert type(merge(raw, tmp_path / "out").exception) is ValueError
