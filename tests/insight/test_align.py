"""``mergekit-rotation align``: what it writes, what it verifies, and what it takes back."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from mergekit.options import MergeOptions
from safetensors.torch import save_file

import tiny
from mergekit_rotation.cli import main
from mergekit_rotation.insight import align as aligning
from mergekit_rotation.insight.writing import WRITING
from merging import Twins, changed_copy, protected, same, save_adapter, weights

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart"
MODEL, FINE_TUNE = QUICKSTART / "model", QUICKSTART / "finetune-rotated"
WEIGHTS = "model.safetensors"


def run(*arguments):
    """Run the command; return its exit code and what it printed, in one line."""
    result = CliRunner().invoke(main, ["align", *map(str, arguments), "--quiet"])
    assert "Traceback" not in result.output
    return result.exit_code, " ".join(result.output.split())


def aligned(tmp_path, model, reference, *options):
    """Run a command that has to succeed; return its folder and its JSON."""
    out, file = tmp_path / "out", tmp_path / "aligned.json"
    code, output = run(model, "--to", reference, out, "--json", file, *options)
    said = f"{out} is the same function as {model}"
    assert code == 0 and said.replace(" ", "") in output.replace(" ", ""), output  # lines fold
    return out, json.loads(file.read_text())


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    return Twins("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("case", ["llama", "mixtral", "qwen3_moe", "t5"])
def test_a_twin_becomes_its_source(case, tmp_path):
    twins = Twins(case, tmp_path)
    out, data = aligned(tmp_path, twins.others[0], twins.reference)
    # mergekit writes experts packed, as transformers has them in memory; so compare there
    kind = type(twins.model)
    state, source = (kind.from_pretrained(f).state_dict() for f in (out, twins.reference))
    assert list(state) == list(source)
    for name, tensor in source.items():
        # Rows of width n are multiplied by matrices that are orthogonal to rounding.
        bound = 64 * tensor.shape[-1] * torch.finfo(torch.float32).eps
        assert float((state[name] - tensor).norm()) <= bound * float(tensor.norm()), name
    assert data["distance_after"] < 1e-3 < data["distance_before"]
    assert (data["model"], data["reference"]) == (str(twins.others[0]), str(twins.reference))
    assert data["out"] == str(out) and data["unverified"] is None
    assert data["verified"]["same"] and data["verified"]["models"][1] == str(out)
    told = json.loads((out / "alignment.json").read_text())
    assert {name: data[name] for name in told} == told


def test_a_fine_tune_keeps_its_dtype_and_its_files(tmp_path):
    text = QUICKSTART / "heldout-code.txt"
    out, data = aligned(tmp_path, FINE_TUNE, MODEL, "--text", text)
    before, after, reference = (weights(folder) for folder in (FINE_TUNE, out, MODEL))
    assert all(x.dtype == before[n].dtype == torch.bfloat16 for n, x in after.items())
    blocks = [n for n in reference if "layers" in n and "norm" not in n]
    for state, key in ((before, "distance_before"), (after, "distance_after")):
        apart = sum(
            float((state[n].double() - reference[n].double()).square().sum()) for n in blocks
        )
        size = sum(float(reference[n].double().square().sum()) for n in blocks)
        # the reported distance is that before the moved weights are rounded
        assert data[key] == pytest.approx(
            (apart / size) ** 0.5, abs=torch.finfo(torch.bfloat16).eps
        )
    assert data["distance_after"] < 0.2 < 1.4 < data["distance_before"]
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (FINE_TUNE / name).read_bytes()
    assert "distance before" in (out / "README.md").read_text()
    assert str(text) in data["verified"]["inputs"]


def test_independent_seeds_meet_in_one_stream(tmp_path):
    seeds = [QUICKSTART / f"seed-{k}" for k in (0, 1)]
    out, data = aligned(tmp_path, seeds[1], seeds[0], "--residual", "orthogonal")
    assert data["stream"]["map"] == "orthogonal" and data["verified"]["stream"] == "other"
    embeddings = [weights(f)["model.embed_tokens.weight"].double() for f in (*seeds, out)]
    first, before, after = embeddings
    assert float((first - after).norm()) < float((first - before).norm())


def test_tied_embeddings_that_are_rotated_are_untied(tmp_path):
    twins = Twins("llama", tmp_path, count=0, tie_word_embeddings=True)
    reference = twins.turned(tmp_path / "turned")
    assert "lm_head.weight" not in weights(twins.reference)
    out, data = aligned(tmp_path, twins.reference, reference, "--residual", "orthogonal")
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    assert "lm_head.weight" in weights(out) and data["verified"]["stream"] == "other"


def test_parts_that_are_not_run_are_said_not_to_be_verified(tmp_path):
    twins = Twins("gemma3_vl", tmp_path)
    out = tmp_path / "out"
    code, output = run(twins.others[0], "--to", twins.reference, out)
    assert code == 0 and "not verified: model.vision_tower" in output


# -- what is taken back, and what is not ----------------------------------------------------------


def spoilt(monkeypatch, factor):
    """Let the merge write a tensor that is wrong."""
    merge = aligning.mergekit_merge.run_merge

    def run_merge(config, out, options):
        merge(config, out, options)
        state = weights(Path(out))
        name = next(name for name in state if "layers.1.mlp.down_proj" in name)
        save_file({**state, name: factor * state[name]}, Path(out) / WEIGHTS, {"format": "pt"})

    monkeypatch.setattr(aligning.mergekit_merge, "run_merge", run_merge)


@pytest.mark.parametrize(
    ("factor", "reason"),
    [(1.01, "they differ from layer 1 on"), (float("nan"), "its outputs hold NaN or Inf")],
)
def test_another_function_does_not_stay(factor, reason, twins, tmp_path, monkeypatch):
    spoilt(monkeypatch, factor)
    out, file = tmp_path / "out", tmp_path / "aligned.json"
    arguments = (twins.others[0], "--to", twins.reference, out)
    code, output = run(*arguments, "--json", file)
    assert code == 1 and reason in output and "its weights and config.json are removed" in output
    assert not (out / "config.json").exists() and not (out / WEIGHTS).exists()
    data = json.loads(file.read_text())
    assert data["out"] is None and reason in data["unverified"]
    assert data["verified"] is None or data["verified"]["same"] is False
    code, output = run(*arguments, "--no-verify", "--json", file)
    assert code == 0 and "same function" not in output and (out / WEIGHTS).exists()
    data = json.loads(file.read_text())
    assert data["out"] == str(out) and data["verified"] is data["unverified"] is None


def test_what_cannot_be_run_stays_unverified(twins, tmp_path):
    def unknown(source, name):
        target = changed_copy(source, tmp_path / name, lambda state: state)
        text = (target / "config.json").read_text()
        (target / "config.json").write_text(text.replace("LlamaForCausalLM", "LLaMaForCausalLM"))
        return target

    a, b = unknown(twins.others[0], "a"), unknown(twins.reference, "b")
    out, file = tmp_path / "out", tmp_path / "aligned.json"
    code, output = run(a, "--to", b, out, "--json", file)
    assert code == 2 and "transformers has no class LLaMaForCausalLM" in output
    assert f"{out} is written, but whether it is the same function as {a} cannot be told" in output
    data = json.loads(file.read_text())
    assert data["out"] == str(out) and data["verified"] is None
    assert "no class" in data["unverified"] and (out / "config.json").exists()


def test_an_older_model_is_replaced(twins, tmp_path):
    tiny.save(tiny.build("llama", seed=7), tmp_path / "out", max_shard_size="50KB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    first, _ = aligned(tmp_path, twins.others[0], twins.reference)
    state = weights(first)
    assert [file.name for file in first.glob("*.safetensors*")] == [WEIGHTS]
    second, _ = aligned(tmp_path, twins.others[0], twins.reference)  # over its own result
    assert same(weights(second), state)


def test_all_files_but_weights_come_along(twins, tmp_path):
    model = changed_copy(twins.others[0], tmp_path / "a", lambda state: state)
    kept = ["vocab.txt", "modeling_own.py", "1_Pooling/config.json", "README.md"]
    left = ["pytorch_model.bin.index.json", "original/consolidated.pth", ".git/config"]
    for name in (*kept, *left):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(name)
    (model / "alignment.json").write_text("of an earlier alignment")
    out = model / "inside"
    code, output = run(model, "--to", twins.reference, out, "--no-write-model-card")
    assert code == 0, output
    found = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    assert found - {"generation_config.json"} == {"config.json", "alignment.json", WEIGHTS, *kept}
    assert all((out / name).read_text() == name for name in kept)
    assert json.loads((out / "alignment.json").read_text())["model"] == str(model)
    bare = tmp_path / "bare"
    code, output = run(model, "--to", twins.reference, bare, "--no-copy-tokenizer")
    assert code == 0 and not (bare / "vocab.txt").exists() and (bare / "README.md").exists()


def test_a_full_disk_leaves_no_model(twins, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(aligning.shutil, "copyfile", full)
    code, output = run(twins.others[0], "--to", twins.reference, tmp_path / "out")
    assert code == 2 and "disk full" in output
    left = {file.name for file in (tmp_path / "out").iterdir()}
    assert left <= {"README.md", "mergekit_config.yml"}


def test_an_adapter_is_merged_and_what_is_protected_is_undone(tmp_path):
    twins = Twins("llama", tmp_path, count=0)
    save_adapter(twins.model, tmp_path / "adapter")
    adapted = f"{twins.reference}+{tmp_path / 'adapter'}"
    other = protected(twins.model, tmp_path / "protected", condition=4.0)
    options = ("--scale", "--lora-merge-cache", tmp_path / "cache")
    _, data = aligned(tmp_path, adapted, other, *options)
    assert data["distance_after"] < data["distance_before"] / 2  # what was learnt is left
    code, output = run(twins.reference, "--to", other, tmp_path / "unscaled")
    assert code == 0 and "note: neurons of" in output and "use --scale to undo it" in output
    blocks = [b for layer in data["layers"] for b in layer["blocks"]]
    assert {"^qk", "^vo", "^f"} <= {axis for block in blocks for axis in block["moved"]}


# -- errors and options ---------------------------------------------------------------------------


def test_errors_are_one_sentence_and_nothing_is_written(twins, tmp_path):
    a, b = twins.others[0], twins.reference
    before = [weights(folder) for folder in (a, b)]
    for name, more in (("deep", {"num_hidden_layers": 3}), ("wide", {"hidden_size": 64})):
        tiny.save(tiny.build("llama", **more), tmp_path / name)
    for name in ("t5-a", "t5-b"):
        tiny.save(tiny.build("t5"), tmp_path / name)
    out = tmp_path / "out"
    for arguments, word in (
        ((a, "--to", b, a), "is one of the inputs; write to another folder"),
        ((a, "--to", b, f"{b}/../{b.name}"), "is one of the inputs; write to another folder"),
        ((a, "--to", a, out), "is the reference itself; name another model after --to"),
        ((a, "--to", tmp_path / "nothing", out), "nothing: there is no such folder"),
        ((tmp_path / "nothing", "--to", b, out), "nothing: there is no such folder"),
        ((tmp_path / "deep", "--to", b, out), "choose another model for --to"),
        ((tmp_path / "wide", "--to", b, out), "hidden_size is 64, but 48 in the reference"),
        (
            (tmp_path / "t5-a", "--to", tmp_path / "t5-b", out, "--residual", "orthogonal"),
            "use --residual none",
        ),
        ((a, "--to", b, tmp_path / "o+p"), "choose another output folder"),
        ((a, "--to", b, out, "--device", "cuda:99"), "the device cuda:99 cannot be used"),
        ((a, out), "Missing option '--to'"),
        ((a, "--to", b, out, "--out-shard-size", "big"), "write a number like 500M or 5B"),
    ):
        result = CliRunner().invoke(main, ["align", *map(str, arguments), "--quiet"])
        assert result.exit_code == 2 and word in result.output, result.output
        assert "Usage" in result.output or result.output.count("\n") == 1, result.output
        assert "align_" not in result.output and not out.exists()
    assert all(map(same, before, [weights(folder) for folder in (a, b)]))


def test_verbose_shows_where_an_error_comes_from(twins, tmp_path, caplog):
    arguments = [twins.others[0], "--to", twins.others[0], tmp_path / "out", "--verbose"]
    result = CliRunner().invoke(main, ["align", *map(str, arguments)])
    assert result.exit_code == 2
    assert "Traceback" in caplog.text and "is the reference itself" in caplog.text


def test_options_are_those_of_mergekit(twins, tmp_path):
    given = main.commands["align"].make_context("align", ["a", "--to", "b", "out"]).params
    assert {name: given[name] for name in WRITING} == {
        name: MergeOptions.model_fields[name].default for name in WRITING
    }
    out, _ = aligned(tmp_path, twins.others[0], twins.reference, "--out-shard-size", "10k")
    assert len(list(out.glob("*.safetensors"))) > 1
