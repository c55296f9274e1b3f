"""What `plan` tells of merges that would work."""

import json
import shutil
import struct
import time

import psutil
import pytest
import torch
from mergekit.options import MergeOptions
from transformers import AutoConfig

import tiny
from mergekit_rotation.graph import run
from mergekit_rotation.graph.tasks import AlignBlock
from mergekit_rotation.insight.pace import Pace
from mergekit_rotation.insight.plan import plan
from mergekit_rotation.insight.workspace import Allocations, Cost, block_cost
from merging import (
    Twins,
    changed_copy,
    config,
    merge,
    merged,
    planned,
    save_adapter,
    save_tokenizer,
    schedule,
    stored,
    weights,
)

_MEASURED = Pace.measured.__func__

pytestmark = pytest.mark.usefixtures("at_a_pace")


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    return Twins("llama", tmp_path_factory.mktemp("llama"), count=2)


def found(raw, tmp_path, *options):
    """Return what the command prints, and its JSON."""
    file = tmp_path / "plan.json"
    result = planned(raw, tmp_path / "out", "--json", str(file), *options)
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "out").exists()
    return result.output, json.loads(file.read_text())


def sizes(folder):
    """Bytes of all tensors of a model, and the number of its files."""
    return sum(x.nbytes for x in weights(folder).values()), len(list(folder.glob("*.safetensors")))


# -- what would happen ----------------------------------------------------------------------------


def test_layers_that_are_treated_alike_share_a_row(twins, tmp_path):
    raw = config("rotation_linear", [twins.reference, *twins.others])
    shown, data = found(raw, tmp_path)
    assert data["reference"] == str(twins.reference)
    assert [entry["model"] for entry in data["models"]] == [
        str(model) for model in (twins.reference, *twins.others)
    ]
    assert [(row["model"], row["layers"], row["block"]) for row in data["layers"]] == [
        (str(other), "0-1", block) for other in twins.others for block in ("attention", "neurons")
    ]
    attention, neurons = data["layers"][:2]
    assert attention["aligned_by"] == [
        "heads reordered",
        "query heads reordered",
        "queries and keys rotated by a phase per frequency",
        "values and outputs rotated",
    ]
    assert neurons["aligned_by"] == ["neurons reordered, with signs"]
    assert data["output"]["class"] == "LlamaForCausalLM"
    assert data["output"]["vocabulary"] == tiny.VOCABULARY
    assert "about" in shown and "roughly" in shown


def test_what_is_left_out_has_its_reason(twins, tmp_path):
    raw = config("rotation_linear", [twins.reference, twins.others[0]])
    raw["parameters"] = {
        "align_neurons": [{"filter": "layers.1.", "value": False}, {"value": True}],
        "align_heads": False,
    }
    _, data = found(raw, tmp_path)
    rows = {(row["layers"], row["block"]): row for row in data["layers"]}
    assert rows["1", "neurons"]["reason"] == "switched off"
    assert rows["0", "neurons"]["reason"] is None
    assert "heads reordered" not in rows["0-1", "attention"]["aligned_by"]


def test_a_model_that_is_skipped_is_a_row(twins, tmp_path):
    tiny.save(tiny.build("llama", num_key_value_heads=4), tmp_path / "other")
    raw = config("rotation_linear", [twins.reference, tmp_path / "other"])
    raw["parameters"] = {"align_unsupported": "skip"}
    result = planned(raw, tmp_path / "out")
    assert result.exit_code == 1  # the shapes differ, so skipping does not help
    assert "k_proj.weight" in result.output


@pytest.mark.parametrize("parameters", [{"align_residual": "orthogonal"}, {"align_save": "t.st"}])
def test_whole_models_are_not_solved_for(parameters, twins, tmp_path, monkeypatch):
    def fault(*_, **__):
        raise AssertionError("a plan must not solve anything")

    monkeypatch.setattr("mergekit_rotation.graph.solving.ModelSolver.solve", fault)
    monkeypatch.chdir(tmp_path)
    raw = config("rotation_linear", [twins.reference, twins.others[0]], parameters=parameters)
    _, data = found(raw, tmp_path)
    assert {row["layers"] for row in data["layers"]} == {"0-1"}
    assert not list(tmp_path.glob("*.st*"))


def test_a_transformation_from_a_file(twins, tmp_path):
    file = str(tmp_path / "t.safetensors")
    raw = config("rotation_linear", [twins.reference, twins.others[0]])
    merged({**raw, "parameters": {"align_save": file}}, tmp_path / "saved")
    found({**raw, "parameters": {"align_load": file}}, tmp_path)
    result = planned({**raw, "parameters": {"align_load": "none.st"}}, tmp_path / "out")
    assert "align_load: cannot read none.st" in result.output


def test_align_save_to_a_place_that_cannot_be_written(twins, tmp_path):
    raw = config("rotation_linear", [twins.reference, twins.others[0]])
    (tmp_path / "folder").mkdir()
    raw["parameters"] = {"align_save": str(tmp_path / "folder")}
    for command in (planned, merge):
        result = command(raw, tmp_path / "out")
        assert result.exit_code == 1
        assert f"align_save: cannot write {tmp_path / 'folder'}" in result.output


def test_a_plain_merge(twins, tmp_path):
    shown, data = found(config("linear", [twins.reference, twins.others[0]]), tmp_path)
    assert data["reference"] is None and data["layers"] == []
    assert "linear is a method of mergekit's own" in shown
    bad = changed_copy(
        twins.reference, tmp_path / "bad", lambda s: {**s, "model.norm.weight": torch.ones(3)}
    )
    result = planned(config("linear", [twins.reference, bad]), tmp_path / "out")
    assert result.exit_code == 1
    assert "Tensor size mismatch for model.norm.weight: [(48,), (3,)]" in result.output


def test_several_merges_in_a_file_are_refused_in_a_sentence(twins, tmp_path):
    result = planned("merge_method: linear\n---\nmerge_method: ties\n", tmp_path / "out")
    assert result.exit_code == 1
    assert "plan each of them in a file of its own" in result.output


@pytest.mark.parametrize("text", ["a: [", "text", ""])
def test_what_is_no_configuration_is_refused_in_a_sentence(text, tmp_path):
    result = planned(text, tmp_path / "out")
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert result.output.startswith("Error: ")


def test_warnings_are_those_of_the_merge(twins, tmp_path):
    raw = config("rotation_linear", [twins.reference, twins.others[0]], normalize=True)
    shown, data = found(raw, tmp_path)
    assert ["is not told of normalize" in text for text in data["warnings"]] == [True]
    assert "warning: rotation_linear is not told of normalize" in shown.replace("\n", " ")


def test_a_refused_merge_has_its_sentence_in_the_json(twins, tmp_path):
    raw = config("rotation_linaer", [twins.reference, twins.others[0]])
    result = planned(raw, tmp_path / "out", "--json", str(tmp_path / "plan.json"))
    data = json.loads((tmp_path / "plan.json").read_text())
    assert result.output == f"Error: {data['error']}\n"
    assert not data["accepted"]


def test_a_disk_that_is_too_small(twins, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    result = planned(
        config("rotation_linear", [twins.reference, twins.others[0]]), tmp_path / "out"
    )
    assert result.exit_code == 1
    assert "free space or choose another output folder" in result.output


def test_a_chat_template_that_fails_at_the_end_of_the_merge(twins, tmp_path):
    for model in (twins.reference, twins.others[0]):
        save_tokenizer(model, [f"t{k}" for k in range(tiny.VOCABULARY)])
    raw = config("rotation_linear", [twins.reference, twins.others[0]], tokenizer_source="base")
    for command in (planned, merge):
        result = command({**raw, "chat_template": "nonsense"}, tmp_path / "out")
        assert result.exit_code == 1
        assert "chat_template: 'nonsense' is neither" in result.output


def test_an_adapter_is_not_merged(twins, tmp_path):
    save_adapter(twins.model, tmp_path / "adapter")
    raw = config("rotation_linear", [twins.reference, f"{twins.others[0]}+{tmp_path / 'adapter'}"])
    cache = ("--lora-merge-cache", str(tmp_path / "cache"))
    shown, data = found(raw, tmp_path, *cache)
    assert "is merged first" in shown
    assert data["disk"]["adapters"] == sizes(twins.reference)[0] + _header(twins.reference)
    assert not (tmp_path / "cache").exists()
    for command in (planned, merge):
        assert "--lora-merge-cache FOLDER" in command(raw, tmp_path / "out").output
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert planned(raw, tmp_path / "out", *cache).exit_code == 1


def _header(folder):
    with open(folder / "model.safetensors", "rb") as file:
        return 8 + struct.unpack("<Q", file.read(8))[0]


# -- nothing is read ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Two models of 2 GB whose files hold a header, and nothing behind it on the disk."""
    folders = []
    for name in "ab":
        folder = tmp_path_factory.mktemp(name)
        settings = tiny.FAMILIES["llama"].config | {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_hidden_layers": 8,
        }
        configuration = AutoConfig.for_model("llama", **settings)
        configuration.architectures = ["LlamaForCausalLM"]
        configuration.save_pretrained(folder)
        with torch.device("meta"):
            model = tiny.FAMILIES["llama"].model_class(configuration)
        header, end = {}, 0
        for key, x in model.state_dict().items():
            size = 4 * x.numel()
            header[key] = {
                "dtype": "F32",
                "shape": list(x.shape),
                "data_offsets": [end, end + size],
            }
            end += size
        text = json.dumps(header).encode()
        with open(folder / "model.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
        folders.append((folder, end))
    return folders


def test_weights_are_not_read(large, tmp_path):
    (first, size), (second, _) = large
    before = psutil.Process().memory_info().rss
    raw = config("rotation_linear", [first, second], parameters={"align_residual": "orthogonal"})
    _, data = found(raw, tmp_path)
    assert psutil.Process().memory_info().rss - before < size / 20
    assert data["read"] >= 2 * size
    assert data["disk"]["output"] >= size
    memory = data["memory"]
    assert memory["peak"] - memory["process"] > 3 * size  # both files, and the output


# -- what it takes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, ()),
        ({"dtype": "bfloat16"}, ("--out-shard-size", "50K")),
        ({"dtype": None, "out_dtype": "float16"}, ("--clone-tensors",)),
        ({"parameters": {"align_residual": "permutation"}}, ()),
        ({"merge_method": "linear"}, ("--no-safe-serialization",)),
    ],
)
def test_output_is_as_large_as_it_says(changes, options, twins, tmp_path):
    raw = {**config("rotation_linear", [twins.reference, twins.others[0]]), **changes}
    raw = {key: value for key, value in raw.items() if value is not None}
    _, data = found(raw, tmp_path, *options)
    out = merged(raw, tmp_path / "out", *options)
    written = weights(out)
    assert data["disk"]["output"] == sum(x.nbytes for x in written.values())
    assert data["disk"]["files"] == len([*out.glob("*.safetensors"), *out.glob("*.bin")])
    assert data["output"]["tensors"] == len(written)
    assert data["output"]["dtype"] == [str(x.dtype)[6:] for x in list(written.values())[:1]]


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_every_format_is_read_as_often_as_it_says(pickled, sharded, twins, tmp_path):
    models = [
        stored(model, tmp_path / name, pickled, sharded)
        for model, name in ((twins.reference, "a"), (twins.others[0], "b"))
    ]
    _, data = found(config("rotation_linear", models), tmp_path)
    total = sum(x.nbytes for x in weights(models[0]).values())
    assert data["read"] == 2 * total  # every tensor of both, once
    assert data["disk"]["output"] == total
    if pickled:
        assert data["memory"]["mapped_files"] == 0


def test_memory_grows_as_the_output_does_and_not_with_depth(tmp_path):
    """With small shards the peak, mapped files aside, is that of a layer."""
    held = []
    for depth in (4, 8):
        twins = Twins("llama", tmp_path / str(depth), num_hidden_layers=depth)
        raw = config("rotation_linear", [twins.reference, twins.others[0]])
        text = json.dumps({**raw, "dtype": "bfloat16"})
        usages = [
            plan(text, None, MergeOptions(out_shard_size=size)).usage for size in (10**3, 10**9)
        ]
        assert all(usage.mapped <= sum(2 * [sizes(twins.reference)[0]]) for usage in usages)
        held.append([usage.held for usage in usages])
    assert held[0][0] == held[1][0]
    assert held[1][1] - held[0][1] == pytest.approx(usages[1].written / 2, rel=0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_workspace_of_a_block_is_about_what_it_allocates(dtype, tmp_path):
    """Tensors that are made while a block is solved and moved, at sizes where they dominate."""
    twins = Twins(
        "llama",
        tmp_path,
        hidden_size=256,
        intermediate_size=1024,
        head_dim=32,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_hidden_layers=1,
    )
    raw = config("rotation_linear", [twins.reference, twins.others[0]])
    tasks, _ = schedule(raw, tmp_path / "out")
    for task in (task for task in tasks if isinstance(task, AlignBlock)):
        inputs = {key: load.execute().to(dtype) for key, load in task.arguments().items()}
        run.start()
        with Allocations() as made:
            result = task.execute(**inputs)
        returned = sum(x.nbytes for x in result.values())
        cost = block_cost(task.spec, [x.dtype for x in inputs.values()], returned)
        assert isinstance(cost, Cost) and cost.memory <= cost.most
        assert (cost.memory + returned) / made.peak == pytest.approx(1, abs=0.45), task.spec.kind


def test_an_accelerator_has_a_line_of_its_own(twins, tmp_path):
    raw = config("rotation_linear", [twins.reference, twins.others[0]])
    shown, data = found(raw, tmp_path, "--device", "cuda")
    assert data["memory"]["device"] > 0
    assert "cuda       about" in shown and "on the CPU, less with cuda" in shown
    _, kept = found(raw, tmp_path, "--device", "cuda", "--low-cpu-memory")
    assert kept["memory"]["device"] > data["memory"]["device"]


def test_rates_are_measured_in_a_moment():
    start = time.perf_counter()
    pace = _MEASURED(Pace)
    assert time.perf_counter() - start < 10
    assert all(rate > 0 for rate in vars(pace).values())
    least, most = pace.seconds([Cost(products=1e9, assigned=1e6)], 1e6, 1e6, 1e6)
    assert pace.startup < least < most
    assert most - least == pytest.approx(pace.assigned * 1e6, rel=1e-6)
