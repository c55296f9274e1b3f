"""Definitions of architectures that mergekit lacks, and mergekit's own where they fit."""

import mergekit.architecture
import mergekit.merge
import pytest
import torch
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions

import tiny
from mergekit_rotation.graph.definitions import definition
from merging import Twins, changed_copy, config, merge, merged, weights


def of(*folders, method="rotation_linear"):
    raw = MergeConfiguration.model_validate(config(method, list(folders)))
    return definition(raw, MergeOptions())


def saved(case, folder, **kwargs):
    model = tiny.build(case, **kwargs)
    tiny.save(model, folder)
    return folder


def sliced(*layers, model):
    slices = [{"sources": [{"model": str(model), "layer_range": list(r)}]} for r in layers]
    weight = {"parameters": {"weight": 1.0}}
    return {"merge_method": "rotation_linear", "slices": slices, "dtype": "float32", **weight}


def test_mergekits_own_definition_is_used_where_it_fits(tmp_path):
    for case in ("llama", "gpt2", "mixtral", "bert-sequence-classification", "gemma3"):
        assert of(saved(case, tmp_path / case)) is None, case


def test_plain_methods_have_mergekits_definition(tmp_path):
    folder = saved("bert", tmp_path / "bert")
    raw = MergeConfiguration.model_validate(config("linear", [folder]))
    info = mergekit.merge.get_architecture_info(raw, MergeOptions())
    assert info is mergekit.architecture.json_definitions.NAME_TO_ARCH["BertModel"][0]


def test_the_depth_is_read_where_the_configuration_has_it(tmp_path):
    folders = [saved("qwen2_vl", tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    info = of(*folders)
    stock = mergekit.architecture.json_definitions.NAME_TO_ARCH["Qwen2VLForConditionalGeneration"]
    assert info.modules.keys() == stock[0].modules.keys()
    keys = [one.modules["text_decoder"].architecture.num_layers_config_key() for one in stock]
    assert keys == ["num_hidden_layers"], "mergekit's own stays as it is"
    out = merged(config("rotation_linear", folders), tmp_path / "out")
    a, b, mean = (weights(folder) for folder in (*folders, out))
    assert mean.keys() == a.keys()
    tower = [name for name in mean if name.startswith("visual.")]
    assert all(torch.allclose(mean[name], (a[name] + b[name]) / 2) for name in tower) and tower
    loaded = tiny.FAMILIES["qwen2_vl"].model_class.from_pretrained(out)
    assert loaded.config.text_config.num_hidden_layers == tiny.LAYERS


@pytest.mark.parametrize("case", ["bert", "bert-masked-lm", "falcon_alibi", "qwen3_moe"])
def test_a_definition_has_every_tensor_of_the_model_once(case, tmp_path):
    model, info = tiny.build(case), of(saved(case, tmp_path / case))
    names = [weight.name for weight in info.all_weights(model.config) if not weight.optional]
    owned = {name for name, _ in model.named_parameters()}  # tied tensors once
    assert owned <= set(names)
    assert len(set(names)) == len(names)


def test_tensors_stand_before_or_behind_the_layers(tmp_path):
    module = of(saved("bert", tmp_path / "bert")).modules["default"].architecture
    before = {weight.name: weight for weight in module.before}
    assert before.keys() == {
        "embeddings.word_embeddings.weight",
        "embeddings.position_embeddings.weight",
        "embeddings.token_type_embeddings.weight",
        "embeddings.LayerNorm.weight",
        "embeddings.LayerNorm.bias",
    }
    assert before["embeddings.word_embeddings.weight"].vocabulary_axis == 0
    assert {weight.name for weight in module.behind} == {"pooler.dense.weight", "pooler.dense.bias"}
    assert module.num_layers(tiny.build("bert").config) == tiny.LAYERS


@pytest.mark.parametrize(("case", "depths"), [("t5", (2, 3)), ("whisper", (2, 3))])
def test_stacks_of_layers_are_modules(case, depths, tmp_path):
    keys = {
        "t5": ("num_layers", "num_decoder_layers"),
        "whisper": ("encoder_layers", "decoder_layers"),
    }
    model = tiny.build(case, **dict(zip(keys[case], depths, strict=True)))
    tiny.save(model, tmp_path)
    modules = {name: m.architecture for name, m in of(tmp_path).modules.items()}
    assert list(modules) == ["encoder", "decoder"]
    assert tuple(m.num_layers(model.config) for m in modules.values()) == depths
    for name, module in modules.items():
        listed = [
            w.name for i in range(module.depth) for w in module.layer_weights(i, model.config)
        ]
        assert all(f"{name}." in weight for weight in listed)
    assert not modules["decoder"].before and not modules["decoder"].behind


def test_biases_that_mergekit_does_not_know_are_merged(tmp_path):
    a, b = (saved("llama", tmp_path / n, seed=s, biases=True) for n, s in (("a", 0), ("b", 1)))
    assert weights(merged(config("rotation_linear", [a, b]), tmp_path / "out")).keys() == (
        weights(a).keys()
    )


def test_other_prefixes_and_former_names_are_understood(tmp_path):
    twins = Twins("bert", tmp_path)

    def former(state):
        new = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        for here, there in new.items():
            state = {name.replace(here, there): x for name, x in state.items()}
        return {"bert." + name: x for name, x in state.items()}

    other = changed_copy(twins.others[0], tmp_path / "former", former)
    out = merged(config("rotation_linear", [twins.reference, other]), tmp_path / "out")
    assert twins.distance(out) < 1e-3
    assert weights(out).keys() == weights(twins.reference).keys()


def test_buffers_are_not_averaged(tmp_path):
    twins = Twins("bert", tmp_path)

    def changed(state):
        return {**state, "embeddings.position_ids": torch.arange(tiny.POSITIONS)[None]}

    other = changed_copy(twins.others[0], tmp_path / "old", changed)
    out = merged(config("rotation_linear", [twins.reference, other]), tmp_path / "out")
    assert "embeddings.position_ids" not in weights(out)
    assert twins.distance(out) < 1e-3


def test_an_incomplete_model_is_refused(tmp_path):
    twins = Twins("bert", tmp_path)
    name = "encoder.layer.1.output.LayerNorm.weight"

    def changed(state):
        return {n: x for n, x in state.items() if n != name}

    for folder in (twins.reference, twins.others[0]):
        other = changed_copy(folder, tmp_path / f"{folder.name}-without", changed)
        result = merge(config("rotation_linear", [other, twins.others[0]]), tmp_path / "out")
        assert f"tensor {name} is missing" in result.output


def test_layers_of_one_kind_can_be_repeated(tmp_path):
    folder = saved("bert", tmp_path / "bert")
    out = merged(sliced((0, 2), (1, 2), model=folder), tmp_path / "out")
    source, state = weights(folder), weights(out)
    assert state["encoder.layer.2.output.dense.bias"].equal(
        source["encoder.layer.1.output.dense.bias"]
    )


def test_layers_of_several_kinds_cannot(tmp_path):
    folder = saved("qwen3_moe", tmp_path / "model")
    result = merge(sliced((0, 2), (1, 2), model=folder), tmp_path / "out")
    assert "make an output of at most 2 layers" in result.output
    assert not list((tmp_path / "out").glob("*.safetensors"))
