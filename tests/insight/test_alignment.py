"""``alignment.json`` and the model card: what a merge tells of its alignment."""

import inspect
import json

import mergekit.merge
import pytest
import torch
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import FinalizeModel
from mergekit.plan import MergePlanner

import tiny
from mergekit_rotation.graph import alignment, run
from mergekit_rotation.graph.errors import RotationError
from merging import Twins, config, merge, merged, weights

CARD = "--write-model-card"


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    return Twins("llama", tmp_path_factory.mktemp("llama"), count=2)


def told(out):
    return json.loads((out / "alignment.json").read_text())


def distance(a, b, part):
    """|A - B| / |A| over some tensors of two folders."""
    first, second = ({n: x.double() for n, x in weights(f).items() if part in n} for f in (a, b))
    apart = sum(float((x - second[name]).square().sum()) for name, x in first.items())
    return (apart / sum(float(x.square().sum()) for x in first.values())) ** 0.5


def test_a_merge_writes_what_compare_would_as_far_as_it_knows_it(twins, tmp_path):
    models = [twins.reference, twins.others[0]]
    data = told(merged(config("rotation_linear", models), tmp_path / "out"))
    assert (data["reference"], data["model"]) == tuple(map(str, models))
    assert data["verdict"] is data["evidence"] is data["cosine_before"] is None
    assert data["outside"] == data["left_out"] == []
    assert [layer["model_layer"] for layer in data["layers"]] == list(range(tiny.LAYERS))
    n = sum(x.numel() for x in twins.model.parameters())
    for index, layer in enumerate(data["layers"]):
        blocks = {block["block"]: block for block in layer["blocks"]}
        assert list(blocks) == ["attention", "neurons"]
        before = distance(*models, f"layers.{index}.mlp")
        rel = n * torch.finfo(torch.float32).eps
        assert blocks["neurons"]["distance_before"] == pytest.approx(before, rel=rel)
        assert blocks["neurons"]["distance_after"] < 1e-3 < layer["distance_before"]
        (order,) = blocks["neurons"]["motions"]
        assert order["size"] == tiny.INTERMEDIATE and order["fixed"] < 0.2
        assert order["gap"] == 0
        assert all(motion["gap"] is None for motion in blocks["attention"]["motions"])
    assert data["distance_after"] < 1e-3 < data["distance_before"]
    assert data["settings"] == {"merge_method": "rotation_linear"}
    assert set(data["versions"]) == {"mergekit", "mergekit-rotation", "torch"}


@pytest.mark.parametrize("residual", ["none", "orthogonal"])
def test_two_runs_write_the_same_bytes(residual, twins, tmp_path):
    models = [twins.reference, *twins.others]
    raw = config("rotation_linear", models, 1 / 3, parameters={"align_residual": residual})
    outs = [merged(raw, tmp_path / name, *options) for name, options in RUNS.items()]
    first, *rest = [(out / "alignment.json").read_bytes() for out in outs]
    assert all(other == first for other in rest)
    data = json.loads(first)
    assert data["models"] == [str(model) for model in models]
    assert [pair["model"] for pair in data["pairs"]] == data["models"][1:]
    assert data["settings"]["align_residual"] == residual
    for pair in data["pairs"]:
        assert (pair["stream"] is None) == (residual == "none")
        assert len(pair["layers"]) == tiny.LAYERS and pair["distance_after"] < 1e-3
        angles = [m["angles"] for e in pair["layers"] for b in e["blocks"] for m in b["motions"]]
        assert angles and not any(angles)


RUNS = {"one": (), "two": ("--async-write",)}


def test_it_is_written_between_weights_and_configuration(twins, tmp_path, monkeypatch):
    seen = []
    execute = alignment.WriteAlignment.execute

    def watched(self, finalize):
        execute(self, finalize)
        seen.append({file.name for file in (tmp_path / "out").iterdir()})

    monkeypatch.setattr(alignment.WriteAlignment, "execute", watched)
    models = [twins.reference, twins.others[0]]
    merged(config("rotation_linear", models), tmp_path / "out")
    (files,) = seen
    assert "config.json" not in files and "alignment.json" in files
    assert any(name.endswith(".safetensors") for name in files)


def test_the_model_card_has_a_section(twins, tmp_path):
    models = [twins.reference, twins.others[0]]
    out = merged(config("rotation_linear", models), tmp_path / "out", CARD)
    text = (out / "README.md").read_text()
    before, section = text.split("### Alignment")
    assert "### Configuration" in before
    (row,) = [line for line in section.splitlines() if line.startswith(f"| {models[1]} |")]
    data, cells = told(out), [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1] == str(models[0])
    assert [float(x) for x in cells[2:4]] == pytest.approx(
        [data["distance_before"], data["distance_after"]], rel=1e-3
    )
    assert "neurons reordered in" in cells[4]
    for name, number in data["versions"].items():
        assert f"{name} {number}" in section
    assert '`merge_method: "rotation_linear"`' in section


def test_off_means_off_and_an_older_report_goes_with_the_older_model(twins, tmp_path):
    models, out = [twins.reference, twins.others[0]], tmp_path / "out"
    merged(config("rotation_linear", models), out)
    assert (out / "alignment.json").exists() and not (out / "README.md").exists()
    raw = config("rotation_linear", models, parameters={"align_report": False})
    merged(raw, out, CARD)
    assert not (out / "alignment.json").exists()
    assert "### Alignment" not in (out / "README.md").read_text()
    with pytest.raises(RotationError, match="write true or false, not 'off'"):
        read = MergeConfiguration.model_validate
        read(config("rotation_linear", models, parameters={"align_report": "off"}))


def test_nothing_is_left_of_a_merge_that_fails(twins, tmp_path, monkeypatch):
    models, out = [twins.reference, twins.others[0]], tmp_path / "out"

    def fail(*args, **kw):
        raise RuntimeError("no space left")

    monkeypatch.setattr(type(twins.model.config), "save_pretrained", fail)
    assert "no space left" in merge(config("rotation_linear", models), out).output
    assert not list(out.iterdir())


def test_what_was_not_aligned_is_named_with_the_reason(twins, tmp_path):
    models = [twins.reference, twins.others[0]]
    for residual in ("none", "orthogonal"):
        off = [{"filter": "mlp", "value": False}, {"filter": None, "value": True}]
        switched = {"align_neurons": off, "align_residual": residual}
        raw = config("rotation_linear", models, parameters=switched)
        data = told(merged(raw, tmp_path / residual))
        labels = [layer["layer"] for layer in data["layers"]]
        assert data["left_out"] == [f"{label} neurons: switched off" for label in labels]
        assert len(labels) == tiny.LAYERS
        assert data["settings"] == {"merge_method": "rotation_linear", **switched}


def test_models_that_cannot_be_aligned_are_named(twins, tmp_path):
    other = tmp_path / "other"
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    tiny.save(tiny.build("llama", **heads), other)
    skip = {"align_unsupported": "skip"}
    raw = config("rotation_linear", [twins.reference, other], parameters=skip)
    out = merged(raw, tmp_path / "out", CARD)
    data = told(out)
    assert data["layers"] == [] and len(data["left_out"]) == tiny.LAYERS
    assert "num_attention_heads is 8, but 4" in data["left_out"][0]
    assert f"* {other}: not aligned: " in (out / "README.md").read_text()


def test_layers_of_one_source_are_named(twins, tmp_path):
    slices = [
        {"sources": [{"model": str(model), "layer_range": [k, k + 1]}]}
        for k, model in enumerate([twins.reference, twins.others[0]])
    ]
    raw = {"merge_method": "rotation_passthrough", "slices": slices, "dtype": "float32"}
    out = merged(raw, tmp_path / "out", CARD)
    data = told(out)
    assert data["model"] == str(twins.others[0]) and data["distance_before"] is None
    (entry,) = data["left_out"]
    assert entry.endswith("nothing else is merged into this layer")
    alone = {
        **raw,
        "slices": [{"sources": [{"model": str(twins.reference), "layer_range": [0, 1]}]}],
    }
    out = merged(alone, tmp_path / "alone", CARD)
    assert told(out)["pairs"] == []
    assert "No two models meet" in (out / "README.md").read_text()


def test_a_loaded_transformation_is_named(twins, tmp_path):
    file = str(tmp_path / "t.safetensors")
    models = [twins.reference, twins.others[0]]
    merged(config("rotation_linear", models, parameters={"align_save": file}), tmp_path / "saved")
    raw = config("rotation_align", [models[1]], None, parameters={"align_load": file})
    data = told(merged(raw, tmp_path / "loaded"))
    assert data["reference"] is None and data["layers"] == []
    assert data["notes"] == [f"moved by the transformation in {file}"]


def test_planning_alone_reports_nothing(twins, tmp_path):
    from merging import planner

    raw = config("rotation_linear", [twins.reference, twins.others[0]])
    merged(raw, tmp_path / "before")
    tasks = planner(raw).plan_to_disk(str(tmp_path / "out"))
    assert not [task for task in tasks if isinstance(task, alignment.WriteAlignment)]
    assert run.current().config is not None  # of the merge before


# -- facts about mergekit -------------------------------------------------------------------------


def test_a_plan_holds_its_last_task_and_the_configuration_that_was_given():
    source = inspect.getsource(inspect.unwrap(MergePlanner.plan_to_disk))
    assert "finalize = FinalizeModel(" in source and "res = save_tasks + [finalize]" in source
    assert FinalizeModel.main_thread_only
    source = inspect.getsource(mergekit.merge.run_merge.__wrapped__)
    assert source.index("exec.run(") < source.index("cfg_out.save_pretrained(out_path)")
    assert "card_md = generate_card(" in source
    assert mergekit.merge.generate_card._mergekit_rotation
