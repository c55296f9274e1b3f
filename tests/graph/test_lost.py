"""Tensors that mergekit's definitions leave out are named, in one warning per model, and no others.

What is lost is told by transformers: the parameters that it does not find in a merged model.
"""

import re

import pytest
import torch
from mergekit.architecture import get_architecture_info
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner

import tiny
from mergekit_rotation.architecture import grouped
from merging import changed_copy, config, merged, weights

#: mergekit asks Gemma 3 for the names of an older vision tower, which a tiny model has twice
TWICE = {"gemma3_vl"}
MERGEABLE = sorted(n for n, case in tiny.FAMILIES.items() if case.mergeable and n not in TWICE)
BIASED = [name for name in MERGEABLE if tiny.FAMILIES[name].biases]


def saved(case, folder, count=2, biases=False):
    models = [folder / name for name in "ab"[:count]]
    for seed, model in enumerate(models):
        tiny.save(tiny.build(case, seed=seed, biases=biases), model)
    return models


def plan(raw, out):
    """Plan a merge, as `mergekit-yaml` does, and do not carry it out."""
    configuration, options = MergeConfiguration.model_validate(raw), MergeOptions()
    LoaderCache().setup(options)
    info = get_architecture_info(configuration, options)
    first = configuration.referenced_models()[0]
    MergePlanner(configuration, info, options, first.config()).plan_to_disk(str(out))


def warned(caplog):
    """Return {model: names} of the warnings, and forget them."""
    pattern = r"(.*): mergekit's definition of this architecture does not list (.*); these tensors "
    found = [re.match(pattern, record.getMessage()) for record in caplog.records]
    caplog.clear()
    told = [match.groups() for match in found if match]
    assert len({model for model, _ in told}) == len(told), "one warning per model"
    return {model: sorted(names.split(", ")) for model, names in told}


@pytest.mark.parametrize("case", sorted({*MERGEABLE} - {"bert-masked-lm"}))
def test_nothing_is_said_of_models_that_merge_completely(case, tmp_path, caplog):
    plan(config("rotation_linear", saved(case, tmp_path)), tmp_path / "out")
    assert warned(caplog) == {}


@pytest.mark.parametrize("case", BIASED)
def test_exactly_what_transformers_misses_is_named(case, tmp_path, caplog):
    models = saved(case, tmp_path, biases=True)
    out = merged(config("rotation_linear", models), tmp_path / "out")
    told = warned(caplog)
    _, info = tiny.FAMILIES[case].model_class.from_pretrained(out, output_loading_info=True)
    missing = sorted(grouped(info["missing_keys"]))
    assert told == {str(model): missing for model in models} if missing else told == {}


def test_what_is_known_to_be_lost_is_named(tmp_path, caplog):
    plan(config("rotation_linear", saved("bert-masked-lm", tmp_path)), tmp_path / "out")
    for names in warned(caplog).values():
        assert all(name.startswith("cls.predictions.transform.") for name in names)
        assert len(names) == 4


def test_all_layers_are_one_entry(tmp_path, caplog):
    (model,) = saved("llama", tmp_path, count=1, biases=True)
    raw = config("rotation_align", [model], None, parameters={"align_reference": str(model)})
    plan(raw, tmp_path / "out")
    names = warned(caplog)[str(model)]
    assert "model.layers.*.self_attn.q_proj.bias (2 layers)" in names
    assert len(names) == 7


def test_slices_do_not_lose_the_layers_that_they_leave_out(tmp_path, caplog):
    (model,) = saved("llama", tmp_path, count=1)
    sources = [{"sources": [{"model": str(model), "layer_range": [1, 2]}]}]
    plan({"merge_method": "rotation_passthrough", "slices": sources}, tmp_path / "out")
    assert warned(caplog) == {}


@pytest.mark.parametrize("residual", ["none", "permutation"])
def test_a_tensor_of_one_model_alone(residual, tmp_path, caplog):
    a, b = saved("qwen3", tmp_path)

    def add(state):
        state["model.layers.1.self_attn.o_proj.bias"] = torch.zeros(48)
        state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    more = changed_copy(b, tmp_path / "more", add)
    parameters = {"align_residual": residual}
    plan(config("rotation_linear", [a, more], parameters=parameters), tmp_path / "out")
    assert warned(caplog) == {str(more): ["model.layers.*.self_attn.o_proj.bias (1 layer)"]}


@pytest.mark.parametrize(("tied", "residual"), [(True, "none"), (False, "none"), (False, "both")])
def test_an_output_head_that_the_definition_does_not_know(tied, residual, tmp_path, caplog):
    """A second copy of tied embeddings is no loss, and `align_residual` writes what is none."""
    (a,) = saved("gemma", tmp_path, count=1)

    def add(state):
        state["lm_head.weight"] = state["model.embed_tokens.weight"] + (0.0 if tied else 1.0)

    b = changed_copy(a, tmp_path / "b", add)
    parameters = {"align_residual": "none" if residual == "none" else "permutation"}
    plan(config("rotation_linear", [a, b], parameters=parameters), tmp_path / "out")
    lost = {str(b): ["lm_head.weight"]} if not tied and residual == "none" else {}
    assert warned(caplog) == lost
    assert "lm_head.weight" in weights(b)


def test_plain_methods_say_nothing(tmp_path, caplog):
    plan(config("linear", saved("llama", tmp_path, biases=True)), tmp_path / "out")
    assert warned(caplog) == {}


def test_grouping():
    names = ["h.0.b.bias", "h.11.b.bias", "lm_head.weight", "x.3.experts.0.w", "x.3.experts.1.w"]
    assert grouped(names) == [
        "h.*.b.bias (2 layers)",
        "lm_head.weight",
        "x.*.experts.*.w (1 layer)",
    ]
