"""The residual stream and transformations as values, through the real command."""

import copy
import json
from pathlib import Path

import pytest
import torch
from mergekit.graph import Executor
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import scramble
import scramble_stream
import tiny
from mergekit_rotation.architecture import all_families, find_family
from mergekit_rotation.graph import saved
from mergekit_rotation.proof import Subject
from merging import (
    QUIET,
    Twins,
    changed_copy,
    command,
    config,
    merge,
    merged,
    planner,
    same,
    save_tokenizer,
    weights,
    write,
)

ROTATING = {f.family for f in all_families() if "orthogonal" in f.stream.maps}
SCRAMBLED = [name for name, case in tiny.FAMILIES.items() if case.family in scramble.NAMES]
KINDS = [
    (case, kind)
    for case in SCRAMBLED
    for kind in ("permutation", "orthogonal")
    if kind == "permutation" or tiny.FAMILIES[case].family in ROTATING
]


class Pair:
    """A tiny model and a twin whose stream, heads, neurons and norms are in other coordinates."""

    def __init__(self, folder: Path, case="llama", kind="orthogonal", change=None, **overrides):
        self.case, self.folder = case, folder
        self.model = tiny.build(case, **overrides)
        self.reference, self.twin = folder / "reference", folder / "twin"
        tiny.save(self.model, self.reference)
        self.scramble(self.reference, self.twin, kind, change)

    def scramble(self, source, target, kind="orthogonal", change=None):
        """Write a copy of a model in the same other coordinates."""
        family, cfg = tiny.FAMILIES[self.case].family, self.model.config

        def changed(state):
            state = change(state) if change else state
            state = scramble_stream.scramble_stream(state, cfg, family, kind, seed=5)
            return scramble.scramble(state, cfg, family, seed=6)

        changed_copy(source, target, changed)
        if kind == "orthogonal":  # the scrambler unties
            set_config(target, tie_word_embeddings=False)

    def outputs(self, folder):
        loaded = type(self.model).from_pretrained(folder, attn_implementation="eager").eval()
        return tiny.outputs(loaded, tiny.inputs(self.case))

    def distance(self, folder, other=None):
        """Largest difference of the outputs from the reference's, or from another model's."""
        base = self.reference if other is None else other
        return float((self.outputs(folder) - self.outputs(base)).abs().max())

    def config(self, method="rotation_linear", kind="orthogonal", **parameters):
        given = {"align_residual": kind, **parameters}
        return config(method, [self.reference, self.twin], parameters=given)


def set_config(folder, **entries):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def error(configuration, out):
    result = merge(configuration, out)
    assert result.exit_code == 1, result.output
    assert not list(out.glob("*.safetensors"))
    return result.output


# -- the residual stream ------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "kind"), KINDS)
def test_twin_with_another_stream_returns(case, kind, tmp_path):
    pair = Pair(tmp_path, case, kind)
    assert pair.distance(merged(pair.config(kind=kind), tmp_path / "out")) < 1e-3


@pytest.mark.parametrize(
    "case",
    ["deberta-masked-lm", "deberta_v3-masked-lm", "mpnet-masked-lm", "vit-image-classification"],
)
def test_encoder_in_another_order_returns(case, tmp_path):
    twins = Twins(case, tmp_path)
    cfg, name = twins.model.config, type(twins.model).__name__

    def changed(state):
        subject = Subject(copy.deepcopy(twins.model), twins.inputs, find_family(cfg, name))
        subject.state = {name: x.double() for name, x in state.items()}
        moved = subject.moved_stream(subject.draw("permutation"), fold=False)
        return {name: moved[name].to(x.dtype).contiguous() for name, x in state.items()}

    twin = changed_copy(twins.others[0], tmp_path / "twin", changed)
    assert twins.distance(twin) < 1e-4
    models, residual = [twins.reference, twin], {"align_residual": "permutation"}
    assert twins.distance(merged(config("rotation_linear", models), tmp_path / "without")) > 0.05
    out = merged(config("rotation_linear", models, parameters=residual), tmp_path / "with")
    assert twins.distance(out) < 1e-3


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("t5_gated", "models of several modules"),
        ("whisper", "models of several modules"),
        ("electra", "electra models allow no permutation map"),
    ],
)
def test_streams_without_a_map_are_refused(case, reason, tmp_path):
    twins, residual = Twins(case, tmp_path), {"align_residual": "permutation"}
    models = [twins.reference, *twins.others]
    result = merge(config("rotation_linear", models, parameters=residual), tmp_path / "out")
    assert result.exit_code == 1
    assert reason in result.output and "set align_residual: none" in result.output


def test_twin_returns_through_the_installed_command(tmp_path):
    pair = Pair(tmp_path)
    file = write(pair.config(), tmp_path)
    result = command("mergekit-yaml", str(file), str(tmp_path / "out"), *QUIET[:-1])
    assert result.returncode == 0, result.stderr
    assert pair.distance(tmp_path / "out") < 1e-3
    local = merged(pair.config(kind="none"), tmp_path / "local")
    assert pair.distance(local) > 0.1


@pytest.mark.parametrize("kind", ["permutation", "orthogonal"])
@pytest.mark.parametrize("case", ["llama", "gpt2", "gemma"])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_embeddings(case, kind, tied, tmp_path):
    pair = Pair(tmp_path, case, kind, tie_word_embeddings=tied)
    out = merged(pair.config(kind=kind), tmp_path / "out")
    assert pair.distance(out) < 1e-3
    stays_tied = tied and kind == "permutation"
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] == stays_tied
    assert ("lm_head.weight" in weights(out)) == (not stays_tied)


def test_tied_models_are_untied_in_memory_too(tmp_path):
    pair = Pair(tmp_path, "llama", "orthogonal", tie_word_embeddings=True)
    plan = planner(pair.config())
    tasks = Executor(plan.plan_in_memory()).run(quiet=True)
    found = {task.weight_info.name: x for task, x in tasks}
    assert "lm_head.weight" in found and not plan.out_model_config.tie_word_embeddings
    expected = weights(merged(pair.config(), tmp_path / "out"))
    assert same(dict(sorted(found.items())), dict(sorted(expected.items())))


def test_a_tied_twin_is_untied_only_when_it_is_rotated(tmp_path):
    pair = Pair(tmp_path, "llama", "orthogonal", tie_word_embeddings=True)
    # Both tied: a rotation of the embeddings of an untrained model with constant final norms.
    for folder in (pair.reference, tmp_path / "same"):
        if not folder.exists():
            changed_copy(pair.reference, folder, lambda state: state)
    same = config(
        "rotation_linear",
        [pair.reference, tmp_path / "same"],
        parameters={"align_residual": "orthogonal"},
    )
    out = merged(same, tmp_path / "out")
    assert "lm_head.weight" not in weights(out)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"]


def test_rounds_keep_the_best(tmp_path):
    pair = Pair(tmp_path)
    out = merged(pair.config(align_residual_rounds=3), tmp_path / "out")
    assert pair.distance(out) < 1e-3


@pytest.mark.parametrize("kind", ["permutation", "orthogonal"])
def test_models_in_the_same_coordinates_stay_bit_identical(kind, tmp_path):
    pair = Pair(tmp_path)
    near = changed_copy(pair.reference, tmp_path / "near", lambda s: noisy(s, 0.02))
    assert_merged_as_plain([pair.reference, near], kind, tmp_path)


def assert_merged_as_plain(both, kind, folder):
    """The map is refused, and the output is bitwise that of the unprefixed method."""
    aligned = config("rotation_linear", both, parameters={"align_residual": kind})
    first = weights(merged(aligned, folder / "a"))
    assert same(first, weights(merged(config("linear", both), folder / "b")))


def noisy(state, share):
    generator = torch.Generator().manual_seed(0)
    return {
        name: x + share * x.std() * torch.randn(x.shape, generator=generator)
        for name, x in state.items()
    }


@pytest.mark.parametrize("kind", ["permutation", "orthogonal"])
def test_noise_in_norms_is_no_reason_for_a_map(kind, tmp_path):
    pair = Pair(tmp_path)
    generator = torch.Generator().manual_seed(0)
    near = changed_copy(
        pair.reference,
        tmp_path / "near",
        lambda state: {
            name: x * (1 + 0.02 * torch.randn(x.shape, generator=generator))
            for name, x in state.items()
        },
    )
    assert_merged_as_plain([pair.reference, near], kind, tmp_path)


@pytest.mark.parametrize("kind", ["permutation", "orthogonal"])
@pytest.mark.parametrize("case", ["llama", "gpt2", "gpt_neox"])
def test_a_twin_that_differs_by_the_gauge_of_its_norms_returns(case, kind, tmp_path):
    pair = Pair(tmp_path, case)

    def changed(state):
        return scramble_stream.scramble_stream(state, pair.model.config, case, "gauge", seed=5)

    twin = changed_copy(pair.reference, tmp_path / "gauge", changed)
    both = [pair.reference, twin]
    aligned = config("rotation_linear", both, parameters={"align_residual": kind})
    assert pair.distance(merged(aligned, tmp_path / "out")) < 1e-3
    assert pair.distance(merged(config("linear", both), tmp_path / "plain")) > 0.01


@pytest.mark.parametrize("kind", ["permutation", "orthogonal"])
def test_the_reference_is_never_moved(kind, tmp_path):
    pair = Pair(tmp_path, kind=kind)
    entries = {
        "merge_method": "rotation_task_arithmetic",
        "base_model": str(pair.reference),
        "models": [{"model": str(pair.twin), "parameters": {"weight": 0.0}}],
        "parameters": {"align_residual": kind},
        "dtype": "float32",
    }
    out, reference = weights(merged(entries, tmp_path / "out")), weights(pair.reference)
    assert all(torch.equal(out[name], reference[name]) for name in reference)


@pytest.mark.parametrize("kind", ["permutation", "orthogonal"])
@pytest.mark.parametrize("value", [0.0, 1e-7])
def test_zero_and_tiny_norm_weights_of_the_reference(kind, value, tmp_path):
    pair = Pair(tmp_path, kind=kind)

    def with_small_norms(state):
        for name in state:
            if "layernorm" in name or name == "model.norm.weight":
                state[name][:2] = value
        return state

    small = changed_copy(pair.reference, tmp_path / "small", with_small_norms)
    pair.scramble(small, tmp_path / "small-twin", kind)
    parameters = {"align_residual": kind}
    out = merged(
        config("rotation_linear", [small, tmp_path / "small-twin"], parameters=parameters),
        tmp_path / "out",
    )
    assert pair.distance(out, small) < 1e-3
    parameters |= {"align_reference": str(small)}
    lone = config("rotation_align", [tmp_path / "small-twin"], None, parameters=parameters)
    assert pair.distance(merged(lone, tmp_path / "aligned"), small) < 1e-3


@pytest.mark.parametrize("rows", [60, 75])
def test_vocabularies_of_different_length(rows, tmp_path):
    pair = Pair(tmp_path)

    def resized(state):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            x = state[name]
            extra = 0.3 * torch.randn(max(0, rows - len(x)), x.shape[1])
            state[name] = torch.cat([x[:rows], extra])
        return state

    other = changed_copy(pair.twin, tmp_path / "other", resized)
    set_config(other, vocab_size=rows)
    lone = config(
        "rotation_align",
        [other],
        None,
        parameters={"align_residual": "orthogonal", "align_reference": str(pair.reference)},
    )
    out = merged(lone, tmp_path / "out")
    common = min(rows, tiny.VOCABULARY)
    mine = weights(out)["model.embed_tokens.weight"][:common]
    theirs = weights(pair.reference)["model.embed_tokens.weight"][:common]
    assert (mine - theirs).abs().max() < 1e-4


def test_untrained_rows_of_the_embeddings(tmp_path):
    def untrained(state):
        state["model.embed_tokens.weight"][-9:] = 0.0
        state["lm_head.weight"][-9:] = state["lm_head.weight"][:-9].mean(0)
        return state

    pair = Pair(tmp_path)
    source = changed_copy(pair.reference, tmp_path / "source", untrained)
    pair.scramble(source, tmp_path / "other")
    both = [source, tmp_path / "other"]
    out = merged(
        config("rotation_linear", both, parameters={"align_residual": "orthogonal"}),
        tmp_path / "out",
    )
    assert pair.distance(out, source) < 1e-3


def frankenmerge(pair, **parameters):
    """The first layer of the reference, then the second one of the twin."""
    return {
        "merge_method": "rotation_passthrough",
        "slices": [
            {"sources": [{"model": str(pair.reference), "layer_range": [0, 1]}]},
            {"sources": [{"model": str(pair.twin), "layer_range": [1, 2]}]},
        ],
        "parameters": parameters,
        "dtype": "float32",
    }


def test_a_frankenmerge_speaks_one_language(tmp_path):
    pair = Pair(tmp_path)
    assert pair.distance(merged(frankenmerge(pair), tmp_path / "local")) > 0.1
    entries = frankenmerge(pair, align_residual="orthogonal")
    assert pair.distance(merged(entries, tmp_path / "out")) < 1e-3


def test_the_summary_of_a_frankenmerge_claims_the_map_alone(tmp_path):
    pair = Pair(tmp_path)
    file = write(frankenmerge(pair, align_residual="orthogonal"), tmp_path)
    result = command("mergekit-yaml", str(file), str(tmp_path / "out"), "--no-write-model-card")
    lines = [line for line in result.stderr.splitlines() if line.startswith("aligned ")]
    assert len(lines) == 1 and "residual stream moved" in lines[0], result.stderr


def with_tokenizers(pair):
    """Reorder the twin's vocabulary and give both models tokenizers; return the other and order."""
    order = torch.randperm(tiny.VOCABULARY, generator=torch.Generator().manual_seed(1))

    def reordered(state):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            state[name] = state[name][order].clone()
        return state

    other = changed_copy(pair.twin, pair.folder / "other", reordered)
    for folder, ids in ((pair.reference, torch.arange(tiny.VOCABULARY)), (other, order)):
        save_tokenizer(folder, [f"t{int(token)}" for token in ids])
    return other, order


def test_tokens_are_matched_by_name_where_there_are_tokenizers(tmp_path):
    pair = Pair(tmp_path)
    other, order = with_tokenizers(pair)
    lone = config(
        "rotation_align",
        [other],
        None,
        parameters={"align_residual": "orthogonal", "align_reference": str(pair.reference)},
    )
    out = weights(merged(lone, tmp_path / "out"))["model.embed_tokens.weight"]
    theirs = weights(pair.reference)["model.embed_tokens.weight"][order]
    assert (out - theirs).abs().max() < 1e-4


def test_embeddings_are_moved_first_and_permuted_second(tmp_path):
    pair = Pair(tmp_path)
    other, _ = with_tokenizers(pair)
    entries = config(
        "rotation_linear",
        [pair.reference, other],
        parameters={"align_residual": "orthogonal"},
        tokenizer={"source": str(pair.reference)},
    )
    assert pair.distance(merged(entries, tmp_path / "out")) < 1e-3


# -- what is refused ----------------------------------------------------------------------------


def test_families_with_norms_after_a_branch_refuse_rotations(tmp_path):
    pair = Pair(tmp_path, "gemma2", "permutation")
    text = error(pair.config(kind="orthogonal"), tmp_path / "out")
    assert "gemma2" in text
    assert "align_residual: permutation" in text


def test_a_tensor_that_the_family_does_not_declare_is_refused(tmp_path):
    pair = Pair(tmp_path)
    state = weights(pair.twin) | {"model.layers.0.adapter.weight": torch.zeros(3, tiny.HIDDEN)}
    odd = changed_copy(pair.twin, tmp_path / "odd", lambda _: state)
    both = [pair.reference, odd]
    parameters = {"align_residual": "orthogonal"}
    text = error(config("rotation_linear", both, parameters=parameters), tmp_path / "out")
    assert "model.layers.0.adapter.weight" in text


def test_a_slice_with_its_own_base_model_is_refused(tmp_path):
    pair = Pair(tmp_path)
    sources = [{"model": str(m), "layer_range": [0, 2]} for m in (pair.reference, pair.twin)]
    entries = {
        "merge_method": "rotation_slerp",
        "base_model": str(pair.reference),
        "slices": [{"sources": sources, "base_model": str(pair.twin)}],
        "parameters": {"t": 0.5, "align_residual": "orthogonal"},
        "dtype": "float32",
    }
    assert "one reference for the whole merge" in error(entries, tmp_path / "out")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"align_residual": "rotate"}, "none or permutation or orthogonal"),
        ({"align_residual": [0, 1]}, "none or permutation or orthogonal"),
        ({"align_residual": "orthogonal", "align_residual_rounds": 0}, "whole number"),
        ({"align_save": 3}, "one path"),
        ({"align_as": "x"}, "belongs to one input"),
        ({"align_load": "nowhere.safetensors"}, "cannot read"),
    ],
)
def test_wrong_values_are_refused(parameters, message, tmp_path):
    pair = Pair(tmp_path)
    both = [pair.reference, pair.twin]
    text = error(config("rotation_linear", both, parameters=parameters), tmp_path / "out")
    assert message in text


@pytest.mark.parametrize("name", ["align_residual", "align_save"])
def test_whole_model_parameters_stand_at_the_top(name, tmp_path):
    pair = Pair(tmp_path)
    entries = config("rotation_linear", [pair.reference, pair.twin])
    entries["models"][1]["parameters"][name] = "orthogonal"
    assert "top-level parameters:" in error(entries, tmp_path / "out")


# -- transformations as values ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "permutation", "orthogonal"])
def test_saved_transformations_are_applied_without_the_reference(kind, tmp_path):
    pair = Pair(tmp_path, kind="permutation" if kind == "none" else kind)
    file = str(tmp_path / "t.safetensors")
    first = merged(pair.config(kind=kind, align_save=file), tmp_path / "first")
    again = config("rotation_linear", [pair.reference, pair.twin], parameters={"align_load": file})
    second = merged(again, tmp_path / "second")
    assert same(weights(first), weights(second))

    reference = str(pair.reference)
    solved = {"align_residual": kind, "align_reference": reference}
    lone = merged(config("rotation_align", [pair.twin], None, parameters=solved), tmp_path / "b")
    hidden = pair.reference.rename(tmp_path / "hidden")
    loaded = {"align_load": file}
    alone = merged(config("rotation_align", [pair.twin], None, parameters=loaded), tmp_path / "c")
    hidden.rename(pair.reference)
    assert same(weights(lone), weights(alone))


def test_a_frankenmerge_is_reproduced_from_its_file(tmp_path):
    pair = Pair(tmp_path)
    file = str(tmp_path / "t.safetensors")
    entries = frankenmerge(pair, align_residual="orthogonal", align_save=file)
    first = weights(merged(entries, tmp_path / "first"))
    second = weights(merged(frankenmerge(pair, align_load=file), tmp_path / "second"))
    assert same(first, second)
    assert pair.distance(tmp_path / "second") < 1e-3


def test_a_transformation_of_other_weights_is_refused_unless_unchecked(tmp_path):
    pair = Pair(tmp_path)
    file = str(tmp_path / "t.safetensors")
    merged(pair.config(align_save=file), tmp_path / "first")
    near = changed_copy(pair.twin, tmp_path / "near", lambda s: noisy(s, 0.01))
    parameters = {"align_load": file}
    both = [pair.reference, near]
    text = error(config("rotation_linear", both, parameters=parameters), tmp_path / "out")
    assert "other weights" in text
    assert "align_load_unchecked: true" in text
    parameters["align_load_unchecked"] = True
    out = merged(config("rotation_linear", both, parameters=parameters), tmp_path / "out")
    assert pair.distance(out) < 0.5


def test_a_change_deep_in_a_model_is_found_while_it_streams(tmp_path):
    pair = Pair(tmp_path)
    file = str(tmp_path / "t.safetensors")
    merged(pair.config(align_save=file), tmp_path / "first")

    def change(state):
        state["model.layers.1.mlp.down_proj.weight"] *= 1.5
        return state

    other = changed_copy(pair.twin, tmp_path / "other", change)
    entries = config("rotation_linear", [pair.reference, other], parameters={"align_load": file})
    assert "mlp.down_proj.weight is not the tensor" in error(entries, tmp_path / "out")


@pytest.mark.parametrize("changed", [{"format": "mergekit-rotation transformation 1"}, None])
def test_a_transformation_of_another_version_is_refused(changed, tmp_path):
    pair = Pair(tmp_path)
    file = str(tmp_path / "t.safetensors")
    merged(pair.config(align_save=file), tmp_path / "first")
    with safe_open(file, "pt") as opened:
        (text,) = opened.metadata().values()
    contents = json.loads(text)
    if changed is None:  # as before version 2: an entry of the metadata for every key
        found = {key: x if isinstance(x, str) else json.dumps(x) for key, x in contents.items()}
    else:
        found = {saved.KEY: json.dumps(contents | changed)}
    save_file(load_file(file), file, metadata=found)
    lone = config("rotation_align", [pair.twin], None, parameters={"align_load": file})
    expected = f"{file} is not a file that align_save of this version has written"
    assert expected in error(lone, tmp_path / "out")


def test_a_transformation_of_another_shape_is_refused(tmp_path):
    pair = Pair(tmp_path)
    file = str(tmp_path / "t.safetensors")
    merged(pair.config(align_save=file), tmp_path / "first")
    tiny.save(tiny.build("llama", intermediate_size=96), tmp_path / "wide")
    lone = config("rotation_align", [tmp_path / "wide"], None, parameters={"align_load": file})
    assert "sizes" in error(lone, tmp_path / "out")


def finetuned(state):
    """What a fine-tune adds: a change of rank one, of the size of the weights."""
    for name, x in state.items():
        if x.dim() == 2:
            generator = torch.Generator().manual_seed(len(name))
            a, b = (torch.randn(n, generator=generator) for n in x.shape)
            state[name] = x + 0.5 * torch.outer(a, b) * x.std() / x.shape[1] ** 0.5
    return state


def test_align_as_uses_another_models_transformation(tmp_path):
    pair = Pair(tmp_path)
    changed_copy(pair.reference, tmp_path / "tuned", finetuned)
    pair.scramble(tmp_path / "tuned", tmp_path / "tuned-twin")
    entries = config(
        "rotation_align",
        [tmp_path / "tuned-twin"],
        None,
        parameters={"align_residual": "orthogonal", "align_reference": str(pair.reference)},
    )
    entries["models"][0]["parameters"] = {"align_as": str(pair.twin)}
    out = merged(entries, tmp_path / "out")
    assert pair.distance(out, tmp_path / "tuned") < 1e-3
    mine, theirs = weights(out), weights(tmp_path / "tuned")
    name = "model.layers.0.self_attn.o_proj.weight"
    assert (mine[name] - theirs[name]).abs().max() < 1e-4


@pytest.mark.parametrize("case", ["llama", "gpt2", "qwen3"])
def test_task_vectors_are_carried_between_coordinates(case, tmp_path):
    pair = Pair(tmp_path, case, "orthogonal", tie_word_embeddings=False)
    changed_copy(pair.reference, tmp_path / "tuned", finetuned)
    pair.scramble(tmp_path / "tuned", tmp_path / "tuned-twin")
    entries = {
        "merge_method": "rotation_task_arithmetic",
        "base_model": str(pair.reference),
        "models": [
            {
                "model": str(tmp_path / "tuned-twin"),
                "parameters": {"weight": 1.0, "align_task_base": str(pair.twin)},
            }
        ],
        "parameters": {"align_residual": "orthogonal"},
        "dtype": "float32",
    }
    out = merged(entries, tmp_path / "out")
    assert pair.distance(out, tmp_path / "tuned") < 1e-3
    assert pair.distance(out) > 0.1
    entries["models"][0]["model"] = str(pair.twin)  # nothing learnt: the reference itself
    entries["models"][0]["parameters"]["align_task_base"] = str(pair.twin)
    still, reference = weights(merged(entries, tmp_path / "still")), weights(pair.reference)
    assert all(torch.equal(still[name], reference[name]) for name in reference)


@pytest.mark.parametrize("method", ["ties", "dare_ties", "della", "breadcrumbs"])
def test_several_task_vectors_meet_in_every_method(method, tmp_path):
    pair = Pair(tmp_path)
    changed_copy(pair.reference, tmp_path / "tuned", finetuned)
    pair.scramble(tmp_path / "tuned", tmp_path / "tuned-twin")

    def entries(prefix, *models):
        listed = []
        for model, base in models:
            own = {"weight": 1.0, "density": 1.0}
            if base is not None:
                own["align_task_base"] = str(base)
            listed.append({"model": str(model), "parameters": own})
        return {
            "merge_method": prefix + method,
            "base_model": str(pair.reference),
            "models": listed,
            "dtype": "float32",
        }

    carried = entries("rotation_", (tmp_path / "tuned-twin", pair.twin), (pair.twin, pair.twin))
    carried["parameters"] = {"align_residual": "orthogonal"}
    out = merged(carried, tmp_path / "out", "--random-seed", "1")
    expected = entries("", (tmp_path / "tuned", None))
    wanted = merged(expected, tmp_path / "wanted", "--random-seed", "1")
    assert pair.distance(out) > 0.1
    if method in ("ties", "dare_ties"):  # the others drop entries at random or by rank
        assert pair.distance(out, wanted) < 1e-3


def test_a_model_of_another_family_is_refused_or_skipped(tmp_path):
    pair = Pair(tmp_path)
    wide = tmp_path / "wide"
    tiny.save(tiny.build("llama", num_attention_heads=8, num_key_value_heads=4, head_dim=8), wide)
    entries = config(
        "rotation_linear",
        [pair.reference, wide],
        parameters={"align_residual": "orthogonal"},
    )
    text = error(entries, tmp_path / "out")
    assert "num_attention_heads is 8, but 4" in text


def test_task_vectors_refuse_a_tokenizer(tmp_path):
    pair = Pair(tmp_path)
    entries = pair.config(method="rotation_linear")
    entries["models"][1]["parameters"]["align_task_base"] = str(pair.twin)
    entries["tokenizer_source"] = "union"
    assert "align_task_base cannot be combined" in error(entries, tmp_path / "out")
