"""``mergekit-rotation compare``: numbers against a routine of its own, verdicts, errors."""

import copy
import json
import math
import weakref
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import save_file

import scramble_stream
import tiny
from mergekit_rotation.cli import main
from mergekit_rotation.graph.tasks import CheckedLoad
from mergekit_rotation.graph.verdict import THRESHOLDS, VERDICTS, Evidence, judge
from merging import Twins, changed_copy, config, merged, save_adapter, weights

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart"
CASES = ["llama", "gpt2", "qwen3_moe", "bert"]


def run(*arguments):
    return CliRunner().invoke(main, [*map(str, arguments), "--quiet"])


def compared(tmp_path, *models, options=()):
    """Run the command, and return its JSON and what it printed."""
    file = tmp_path / "compared.json"
    result = run("compare", *models, "--json", file, *options)
    assert result.exit_code == 0, result.output
    return json.loads(file.read_text()), result.output


def parameters(folder):
    """Parameters as transformers loads them, tied ones once."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    loaded = getattr(transformers, name).from_pretrained(folder)
    return {name: x.detach().double() for name, x in loaded.named_parameters()}


def distance(reference, other, part=""):
    """|A - B| / |A| over the parameters of two folders, in float64 and nothing of the package."""
    a, b = parameters(reference), parameters(other)
    names = [name for name in a if name in b and part in name]
    apart = math.fsum(float((a[n] - b[n]).pow(2).sum()) for n in names)
    return math.sqrt(apart / math.fsum(float(a[n].pow(2).sum()) for n in names))


def cosine(reference, other):
    a, b = parameters(reference), parameters(other)
    inner = math.fsum(float((a[n] * b[n]).sum()) for n in a)
    norms = [math.fsum(float(x.pow(2).sum()) for x in state.values()) for state in (a, b)]
    return inner / math.sqrt(norms[0] * norms[1])


def noisy(source, target, size, seed=0):
    def change(state):
        generator = torch.Generator().manual_seed(seed)
        for x in state.values():
            x += size * x.std() * torch.randn(x.shape, generator=generator)

    return changed_copy(source, target, change)


def tolerance(folder):
    """Sums of squares of n float32 numbers err like n eps; distances like the root of that."""
    n = sum(x.numel() for x in weights(folder).values())
    return n * torch.finfo(torch.float32).eps


def aligned(other, reference, residual, out):
    """Move a model to another's coordinates by a merge."""
    parameters = {"align_reference": str(reference), "align_residual": residual}
    return merged(config("rotation_align", [other], weight=None, parameters=parameters), out)


# -- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_distances_are_those_of_the_stored_tensors_and_of_the_aligned_model(case, tmp_path):
    twins = Twins(case, tmp_path)
    other = noisy(twins.others[0], tmp_path / "other", 0.05)
    data, _ = compared(tmp_path, twins.reference, other)
    moved = aligned(other, twins.reference, "none", tmp_path / "moved")
    assert data["stream"] is None or data["stream"]["map"] is None
    near = tolerance(twins.reference)
    assert data["distance_before"] == pytest.approx(distance(twins.reference, other), rel=near)
    assert data["distance_after"] == pytest.approx(distance(twins.reference, moved), rel=near)
    assert data["cosine_before"] == pytest.approx(cosine(twins.reference, other), abs=near)
    assert data["cosine_after"] == pytest.approx(cosine(twins.reference, moved), abs=near)
    assert len(data["layers"]) == tiny.LAYERS and not data["left_out"]
    assert data["verdict"] == "same-function"
    for index, layer in enumerate(data["layers"]):
        alone = distance(twins.reference, other, f".{index}.")
        assert layer["distance_before"] == pytest.approx(alone, rel=near)


def test_a_moved_stream_is_measured_in_the_coordinates_of_the_aligned_model(tmp_path):
    twins = Twins("llama", tmp_path)

    def change(state):
        cfg = twins.model.config
        return scramble_stream.scramble_stream(state, cfg, "llama", "orthogonal", seed=5)

    other = changed_copy(twins.others[0], tmp_path / "other", change)
    file = other / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": False}))
    data, _ = compared(tmp_path, twins.reference, other)
    moved = aligned(other, twins.reference, "orthogonal", tmp_path / "moved")
    assert data["stream"]["map"] == "orthogonal" and data["stream"]["explained"] > 0.9
    assert data["verdict"] == "same-function"
    near = tolerance(twins.reference)
    assert data["distance_before"] == pytest.approx(distance(twins.reference, other), rel=near)
    assert data["distance_after"] == pytest.approx(distance(twins.reference, moved), abs=near)


def test_what_was_moved_is_described(tmp_path):
    twins = Twins("llama", tmp_path)
    data, _ = compared(tmp_path, twins.reference, twins.others[0])
    for layer in data["layers"]:
        blocks = {block["block"]: block for block in layer["blocks"]}
        assert set(blocks) == {"attention", "neurons", "other"}
        found = {(m["kind"], m["axis"]): m for b in blocks.values() for m in b["motions"]}
        assert found["order", "f"]["size"] == tiny.INTERMEDIATE
        assert found["order", "f"]["fixed"] < 0.2
        angles = found["rotation", "vo"]["angles"]
        assert len(angles) == 5 and angles == sorted(angles) and angles[2] > 10
    same, _ = compared(tmp_path, twins.reference, copy_of(twins.reference, tmp_path / "copy"))
    motions = [m for layer in same["layers"] for b in layer["blocks"] for m in b["motions"]]
    assert motions and all(m["fixed"] == 1 and m["kind"] == "order" for m in motions)
    assert same["distance_before"] == same["distance_after"] == 0
    assert same["verdict"] == "same-coordinates"


def copy_of(source, target):
    return changed_copy(source, target, lambda state: None)


def test_one_layer_is_resident_at_a_time(tmp_path, monkeypatch):
    """What is read and still alive never exceeds the embeddings and three layers of both models."""
    model = tiny.build("llama", num_hidden_layers=12)
    for name in ("a", "b"):
        tiny.save(model, tmp_path / name)
    noisy(tmp_path / "b", tmp_path / "c", 0.05)
    alive, peak = {}, [0]
    execute = CheckedLoad.execute

    def counted(self):
        x = execute(self)
        if x is not None:
            alive[id(x)] = x.numel()
            weakref.finalize(x, alive.pop, id(x), None)
            peak[0] = max(peak[0], sum(alive.values()))
        return x

    monkeypatch.setattr(CheckedLoad, "execute", counted)
    compared(tmp_path, tmp_path / "a", tmp_path / "c")
    layer = sum(x.numel() for x in model.model.layers[0].parameters())
    outer = model.model.embed_tokens.weight.numel()
    assert 0 < peak[0] <= 2 * (outer + 3 * layer)
    assert peak[0] < sum(x.numel() for x in model.parameters())


# -- verdicts -------------------------------------------------------------------------------------


def test_trained_models_get_the_right_verdict(tmp_path):
    names = ("model", "finetune-rotated", "seed-0", "seed-1")
    data, output = compared(tmp_path, *(QUICKSTART / name for name in names))
    found = {
        (Path(p["reference"]).name, Path(p["model"]).name): p["verdict"] for p in data["pairs"]
    }
    assert found.pop(("model", "finetune-rotated")) == "same-function"
    assert set(found.values()) == {"unrelated"}
    assert data["models"] == [str(QUICKSTART / name) for name in names]
    for name in ("distance_before", "distance_after", "cosine_before", "cosine_after"):
        matrix = data["matrix"][name]
        assert [len(row) for row in matrix] == [4] * 4
        assert all(matrix[i][j] == matrix[j][i] for i in range(4) for j in range(4))
    assert data["matrix"]["distance_after"][0][1] == data["pairs"][0]["distance_after"]
    assert "same-function" in output and "before alignment" in output


def test_a_fine_tune_is_in_the_same_coordinates(tmp_path):
    tiny.save(tiny.build("llama"), tmp_path / "a")
    data, output = compared(tmp_path, tmp_path / "a", noisy(tmp_path / "a", tmp_path / "b", 0.2))
    assert data["verdict"] == "same-coordinates"
    assert data["evidence"]["in_place"] == 1
    assert "merge them as they are" in output


def test_other_shapes_are_unrelated_and_said_to_be(tmp_path):
    tiny.save(tiny.build("llama"), tmp_path / "a")
    tiny.save(tiny.build("llama", intermediate_size=96), tmp_path / "b")
    tiny.save(tiny.build("gpt2"), tmp_path / "c")
    data, output = compared(tmp_path, tmp_path / "a", tmp_path / "b")
    assert data["verdict"] == "unrelated" and data["layers"] == []
    assert data["distance_before"] is None and data["evidence"] is None
    assert "intermediate_size is 96, but 80" in data["reason"]
    assert "intermediate_size" in output
    data, _ = compared(tmp_path, tmp_path / "a", tmp_path / "c")
    assert data["verdict"] == "unrelated" and data["reason"]


@pytest.mark.parametrize("depths", [(2, 3), (3, 2)])
def test_models_of_other_depth_are_compared_as_far_as_they_go(depths, tmp_path):
    model = tiny.build("llama", num_hidden_layers=3)
    for name, depth in zip("ab", depths, strict=True):
        part = copy.deepcopy(model)
        part.model.layers = part.model.layers[:depth]
        part.config.num_hidden_layers = depth
        tiny.save(part, tmp_path / name)
    data, output = compared(tmp_path, tmp_path / "a", tmp_path / "b")
    assert data["verdict"] == "same-coordinates" and len(data["layers"]) == 2
    assert data["distance_before"] == 0
    assert any("the first 2 of both" in note for note in data["notes"])
    assert "the first 2 of both" in output


def test_protected_models_are_found_without_being_asked_for(tmp_path):
    from merging import protected

    model = tiny.build("llama")
    tiny.save(model, tmp_path / "a")
    data, _ = compared(tmp_path, tmp_path / "a", protected(model, tmp_path / "b", condition=4.0))
    assert data["verdict"] == "same-function"
    assert data["distance_after"] < 1e-3 < data["distance_before"]


def test_verdicts_follow_the_thresholds():
    at = THRESHOLDS
    assert at.related < at.same < 1 and 0 < at.gain < 1
    kinships = {"same-function": at.same, "related": at.related, "unrelated": at.related - 1e-9}
    for verdict, kinship in kinships.items():
        assert judge(Evidence(0.0, 1.0, kinship, False)) == verdict
        assert judge(Evidence(1.0, 1.0, kinship, False)) == verdict
        assert judge(Evidence(1.0, 0.0, kinship, True)) == verdict
        assert judge(Evidence(1.0, 0.0, kinship, False)) == "same-coordinates"
    assert set(kinships) | {"same-coordinates"} == set(VERDICTS)


# -- errors ---------------------------------------------------------------------------------------


def test_errors_are_one_sentence(tmp_path):
    tiny.save(tiny.build("llama"), tmp_path / "a")
    (tmp_path / "empty").mkdir()
    for models in ([tmp_path / "a", tmp_path / "empty"], [tmp_path / "a", tmp_path / "nothing"]):
        result = run("compare", *models)
        assert result.exit_code == 1
        assert result.output.startswith("Error: ") and result.output.count("\n") == 1
        assert str(models[1]) in result.output and "Traceback" not in result.output
    for models in ([tmp_path / "a"], [tmp_path / "a"] * 2):
        assert run("compare", *models).exit_code == 2
    damaged = changed_copy(tmp_path / "a", tmp_path / "b", lambda state: _nan(state))
    result = run("compare", tmp_path / "a", damaged)
    assert result.exit_code == 1 and "NaN" in result.output and result.output.count("\n") == 1


def test_what_cannot_be_done_is_refused_before_models_are_read(tmp_path):
    (tmp_path / "file").touch()
    absent = tmp_path / "absent" / "x.json"
    for arguments, why in (
        (("no", tmp_path / "file"), f"{tmp_path / 'file'} is a file; name the folder"),
        (("no", "models", "--json", absent), f"there is no folder {absent.parent}"),
        (("no", "no/"), "a model is named twice"),
    ):
        result = run("compare", *arguments)
        assert result.exit_code == 2 and why in result.output, result.output
    result = run("compare", "no/model", tmp_path)
    assert result.exit_code == 1 and "no/model: there is no such folder" in result.output


def test_models_of_several_modules_are_told_what_aligns_them(tmp_path):
    models = [tmp_path / name for name in "ab"]
    for model in models:
        tiny.save(tiny.build("t5"), model)
    result = run("compare", *models)
    assert result.exit_code == 1 and result.output.count("\n") == 1
    assert "several modules (encoder, decoder)" in result.output
    assert "rotation_* methods align each module" in result.output


def test_a_model_with_an_adapter_is_compared(tmp_path):
    """Twice: what mergekit merged into a folder that is gone must not be looked for there."""
    model = tiny.build("llama")
    tiny.save(model, tmp_path / "a")
    save_adapter(model, tmp_path / "adapter")
    for _ in range(2):
        data, _ = compared(tmp_path, tmp_path / "a", f"{tmp_path / 'a'}+{tmp_path / 'adapter'}")
        assert data["verdict"] == "same-coordinates" and data["distance_before"] > 0
        result = run("verify", tmp_path / "a", f"{tmp_path / 'a'}+{tmp_path / 'adapter'}")
        assert result.exit_code == 1 and "they differ from layer 0 on" in result.output


def _nan(state):
    state["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")


def test_tensors_that_only_one_model_stores_are_named(tmp_path):
    tiny.save(tiny.build("bert"), tmp_path / "a")
    state = weights(tmp_path / "a")
    other = copy_of(tmp_path / "a", tmp_path / "b")
    save_file({**state, "extra.weight": torch.ones(3)}, other / "model.safetensors")
    data, output = compared(tmp_path, tmp_path / "a", other)
    assert data["left_out"] == ["extra.weight: unknown to the family"]
    assert "extra.weight" in output
