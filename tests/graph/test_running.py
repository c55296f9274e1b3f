"""Every way to run mergekit, every option of it and every format of its inputs."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import time

import mergekit.merge
import pytest
import torch
from click.testing import CliRunner
from mergekit import multigpu_executor
from mergekit.config import MergeConfiguration
from mergekit.evo.genome import ModelGenome, ModelGenomeDefinition
from mergekit.graph import Executor
from mergekit.io.tasks import LoadTensor, ReturnTensor, SaveTensor
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from mergekit.scripts import legacy, merge_raw_pytorch, moe, multimerge, tokensurgeon
from pydantic import ValidationError

import tiny
from mergekit_rotation.graph.errors import RotationError
from mergekit_rotation.graph.gathering import gathered, gathering
from merging import (
    QUIET,
    Twins,
    changed_copy,
    config,
    merge,
    merged,
    planner,
    same,
    save_adapter,
    save_tokenizer,
    schedule,
    stored,
    weights,
)


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    return Twins("llama", tmp_path_factory.mktemp("llama"), count=2)


@pytest.fixture(scope="module")
def copies(twins, tmp_path_factory):
    folder = tmp_path_factory.mktemp("copies")
    return [twins.reference, changed_copy(twins.reference, folder / "copy", lambda state: state)]


def succeeded(result):
    if result.exception is not None:
        raise result.exception


def near(twins, target):
    generator = torch.Generator().manual_seed(0)

    def noisy(state):
        return {
            name: x + 0.02 * x.std() * torch.randn(x.shape, generator=generator)
            for name, x in state.items()
        }

    return changed_copy(twins.reference, target, noisy)


# -- options ------------------------------------------------------------------------------------


@pytest.fixture
def two_accelerators(monkeypatch):
    """Let the CPU stand for two accelerators, each with a worker thread.

    Plain merges lose no result either, or now and then there would be none to compare with.
    """
    whole = gathering(mergekit.merge.MultiGPUExecutor)
    monkeypatch.setattr(mergekit.merge, "MultiGPUExecutor", whole)
    monkeypatch.setattr(multigpu_executor, "get_torch_accelerator_type", lambda: "cpu")
    monkeypatch.setattr(multigpu_executor, "get_torch_accelerator_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)


OPTIONS = [
    "--low-cpu-memory",
    "--read-to-gpu",
    "--multi-gpu",
    "--multi-gpu --low-cpu-memory",
    "--async-write",
    "--async-write --write-threads 2 --out-shard-size 10K",
    "--out-shard-size 10K",
    "--clone-tensors",
    "--no-safe-serialization",
    "--no-safe-serialization --out-shard-size 10K",
    "--random-seed 1",
    "--unsafe-truncate-embeddings",
    "--allow-crimes",
    "--lazy-unpickle",
]


@pytest.mark.tally("options")
@pytest.mark.parametrize("options", OPTIONS)
def test_options(options, twins, copies, two_accelerators, tmp_path):
    given = options.split()
    ours = merged(config("rotation_linear", copies), tmp_path / "ours", *given)
    plain = merged(config("linear", copies), tmp_path / "plain", *given)
    assert same(weights(ours), weights(plain))
    assert {file.name for file in ours.iterdir()} >= {file.name for file in plain.iterdir()}
    models = [twins.reference, *twins.others]
    out = merged(config("rotation_linear", models, weight=1 / 3), tmp_path / "out", *given)
    assert twins.distance(out) < 1e-3


def test_no_result_of_several_accelerators_is_lost(copies, two_accelerators, monkeypatch, tmp_path):
    """mergekit's collector of results ends with the workers, however much it has left to take."""
    running = []

    class Slow(queue.Queue):
        """Lets the workers end before the first tensor that was saved is told."""

        def get(self, *args, **kwargs):
            taken = super().get(*args, **kwargs)
            (executor,) = running
            while not self.queue and not executor.done_event.is_set():
                time.sleep(1e-3)
            following = executor.universe.tasks[self.queue[0][0]] if self.queue else None
            if isinstance(following, SaveTensor) and not following.optional:
                assert executor.done_event.wait(60)
            return taken

    def execute(method, kind):
        targets = planner(config(method, copies)).plan_to_disk(str(tmp_path / method))
        running[:] = [kind(targets)]
        running[0].execute()

    monkeypatch.setattr(multigpu_executor.queue, "Queue", Slow)
    stock = multigpu_executor.MultiGPUExecutor
    with pytest.raises(Exception, match=r"No value for required tensor|NoneType"):
        execute("linear", stock)
    execute("rotation_linear", gathering(stock))
    monkeypatch.setattr(mergekit.merge, "MultiGPUExecutor", stock)
    with gathered():
        assert mergekit.merge.MultiGPUExecutor is not stock
    assert mergekit.merge.MultiGPUExecutor is stock


@pytest.mark.parametrize("kind", ["none", "orthogonal"])
def test_the_graph_falls_into_islands_for_several_accelerators(kind, tmp_path, two_accelerators):
    """Layers do not wait for one another, so they spread over the accelerators."""
    twins = Twins("llama", tmp_path, count=2, num_hidden_layers=6)
    models = [twins.reference, *twins.others]
    raw = config("rotation_linear", models, parameters={"align_residual": kind})
    executor = multigpu_executor.MultiGPUExecutor(planner(raw).plan_to_disk(str(tmp_path / "out")))
    one, two = executor.gpu_assignments.values()
    assert min(len(one), len(two)) > 0.4 * (len(one) + len(two))


def test_weights_are_read_to_the_accelerator(twins, tmp_path):
    raw = config("rotation_linear", [twins.reference, *twins.others])
    tasks, _ = schedule(raw, tmp_path / "out", device="meta", read_to_gpu=True)
    loads = [task for task in tasks if isinstance(task, LoadTensor)]
    assert loads and {load.device for load in loads} == {"meta"}


def test_random_methods_draw_what_they_draw_without_the_prefix(twins, tmp_path):
    """A fine-tune in the reference's coordinates stays where it is: same seed, same bytes."""
    both = [twins.reference, near(twins, tmp_path / "near")]
    for method in ("dare_ties", "dare_linear", "della", "della_linear"):
        found = {}
        for name, seed in (("rotation_", "1"), ("", "1"), ("rotation_", "2")):
            raw = config(name + method, both, base_model=str(both[0]), parameters={"density": 0.5})
            out = merged(raw, tmp_path / f"{name}{method}{seed}", "--random-seed", seed)
            found[name, seed] = weights(out)
        assert same(found["rotation_", "1"], found["", "1"])
        assert not same(found["rotation_", "1"], found["rotation_", "2"])


def test_architectures_are_mixed_only_on_request(twins, tmp_path):
    other = changed_copy(twins.others[0], tmp_path / "mistral", lambda state: state)
    settings = json.loads((other / "config.json").read_text())
    settings |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    (other / "config.json").write_text(json.dumps(settings))
    raw = config("rotation_linear", [twins.reference, other])
    refused = merge(raw, tmp_path / "out")
    assert "--allow-crimes" in refused.output
    assert isinstance(refused.exception, SystemExit)
    assert twins.distance(merged(raw, tmp_path / "out", "--allow-crimes")) < 1e-3


# -- formats of the inputs ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "orthogonal"])
@pytest.mark.parametrize(
    ("pickled", "sharded", "options"),
    [
        (False, True, ()),
        (True, False, ()),
        (True, False, ("--lazy-unpickle",)),
        (True, True, ()),
        (True, True, ("--lazy-unpickle",)),
    ],
)
def test_formats_of_inputs(kind, pickled, sharded, options, twins, tmp_path):
    models = [twins.reference, twins.others[0]]
    others = [stored(model, tmp_path / str(k), pickled, sharded) for k, model in enumerate(models)]
    parameters = {"align_residual": kind}
    first = merged(config("rotation_linear", models, parameters=parameters), tmp_path / "first")
    raw = config("rotation_linear", others, parameters=parameters)
    assert same(weights(first), weights(merged(raw, tmp_path / "second", *options)))
    assert twins.distance(first) < 1e-3


def test_adapters_are_applied_before_anything_is_aligned(twins, tmp_path):
    from peft import PeftModel

    save_adapter(twins.model, tmp_path / "adapter")
    base = type(twins.model).from_pretrained(twins.others[0])
    applied = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    applied.save_pretrained(tmp_path / "applied")
    given = f"{twins.others[0]}+{tmp_path / 'adapter'}"
    cache = ("--lora-merge-cache", str(tmp_path / "cache"))
    for kind in ("none", "orthogonal"):
        parameters = {"align_residual": kind}
        found = [
            weights(
                merged(
                    config("rotation_linear", [twins.reference, other], parameters=parameters),
                    tmp_path / f"{kind}-{k}",
                    *cache,
                )
            )
            for k, other in enumerate((tmp_path / "applied", given))
        ]
        assert same(*found)
        assert not same(found[0], weights(twins.reference))


# -- commands and the interface -------------------------------------------------------------------


def test_run_merge(twins, tmp_path):
    raw = config("rotation_linear", [twins.reference, *twins.others], weight=1 / 3)
    expected = weights(merged(raw, tmp_path / "command"))
    options = MergeOptions(copy_tokenizer=False, write_model_card=False, quiet=True)
    run_merge(MergeConfiguration.model_validate(raw), str(tmp_path / "read"), options)
    run_merge(MergeConfiguration(**raw), str(tmp_path / "built"), options)
    assert same(weights(tmp_path / "read"), expected)
    assert same(weights(tmp_path / "built"), expected)


def test_a_configuration_that_a_program_builds_is_checked_too(twins, tmp_path):
    raw = config("rotation_linear", [twins.reference, *twins.others])
    built = MergeConfiguration(**raw, parameters={"align_headz": True})
    with pytest.raises(RotationError, match="did you mean 'align_heads'"):
        run_merge(built, str(tmp_path / "out"), MergeOptions())
    assert not (tmp_path / "out").exists()


MEMORY = [
    ("linear", False, {}),
    ("slerp", True, {"t": 0.3}),
    ("ties", True, {"density": 0.5}),
    ("passthrough", False, {}),
    ("linear", False, {"align_residual": "orthogonal"}),
]


@pytest.mark.parametrize(("method", "base", "parameters"), MEMORY)
def test_merging_in_memory(method, base, parameters, twins, tmp_path):
    models = [twins.reference, twins.others[0]][: 1 if method == "passthrough" else 2]
    more = {"base_model": str(models[0])} if base else {}
    raw = config(f"rotation_{method}", models, parameters=parameters, out_dtype="bfloat16", **more)
    tasks = planner(raw).plan_in_memory()
    assert all(isinstance(task, ReturnTensor) for task in tasks)
    found = {task.weight_info.name: x for task, x in Executor(tasks).run(quiet=True)}
    expected = weights(merged(raw, tmp_path / "out"))
    assert same(dict(sorted(found.items())), dict(sorted(expected.items())))


def test_mergekit_itself_cannot_plan_in_memory(copies):
    with pytest.raises(TypeError):
        planner(config("linear", copies)).plan_in_memory()


IMPORTS = """
from mergekit.config import MergeConfiguration
MergeConfiguration.model_validate({"merge_method": "rotation_linear", "models": [{"model": "a"}]})
from mergekit.evo.genome import METHOD_PARAM_MAPS
assert "rotation_ties" in METHOD_PARAM_MAPS
"""


def test_a_program_may_read_a_configuration_before_it_imports_anything_else():
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)


MULTI = """
name: first
merge_method: rotation_linear
models:
  - {{model: {0}, parameters: {{weight: 0.5}}}}
  - {{model: {1}, parameters: {{weight: 0.5}}}}
dtype: float32
---
merge_method: rotation_linear
models:
  - {{model: {2}, parameters: {{weight: 0.5}}}}
  - {{model: first, parameters: {{weight: 0.5}}}}
parameters: {{align_reference: first}}
dtype: float32
"""


def test_several_merges_in_one_file(twins, tmp_path):
    """Names of earlier merges are understood everywhere; what is there already is used again."""
    file, work, out = (tmp_path / name for name in ("config.yml", "work", "out"))
    file.write_text(MULTI.format(twins.reference, *twins.others))
    arguments = [str(file), "--intermediate-dir", str(work), "--out-path", str(out), *QUIET]
    succeeded(CliRunner().invoke(multimerge.main, arguments))
    assert twins.distance(work / "first") < 1e-3
    final, first = weights(out), weights(work / "first")
    for name, x in first.items():  # the reference is the first merge, not the second model
        bound = 64 * x.shape[-1] * torch.finfo(torch.float32).eps
        assert float((final[name] - x).norm()) <= bound * float(x.norm()), name
    (out / "config.json").unlink()
    before = (work / "first" / "model.safetensors").stat().st_mtime_ns
    succeeded(CliRunner().invoke(multimerge.main, arguments))
    assert (work / "first" / "model.safetensors").stat().st_mtime_ns == before
    assert same(weights(out), final)


def test_the_command_with_arguments_of_old(twins, tmp_path):
    models = [argument for m in (twins.reference, twins.others[0]) for argument in ("--merge", m)]
    given = [str(tmp_path / "out"), *map(str, models), "--method", "rotation_linear", *QUIET]
    given += ["--weight", "0.5"]
    succeeded(CliRunner().invoke(legacy.main, given))
    assert twins.distance(tmp_path / "out") < 1e-3


def test_merging_files_without_an_architecture_is_refused_in_one_sentence(copies, tmp_path):
    files = [str(folder / "model.safetensors") for folder in copies]
    for method, code in (("rotation_linear", 1), ("linear", 0)):
        file, out = tmp_path / "config.yml", tmp_path / method
        file.write_text(json.dumps(config(method, files)))
        result = CliRunner().invoke(merge_raw_pytorch.main, [str(file), str(out), *QUIET])
        assert result.exit_code == code, result.output
        assert (out / "model.safetensors").exists() == (code == 0)
        if code:
            assert result.stderr.splitlines()[-1] == (
                "Error: rotation_linear aligns whole models and needs to know their "
                "architecture; use it through mergekit-yaml, or use linear here"
            )


UNTOUCHED = """
import sys
from click.testing import CliRunner
from mergekit.scripts import moe, tokensurgeon
for command, *arguments in {calls!r}:
    main = {{"moe": moe, "tokensurgeon": tokensurgeon}}[command].main
    result = CliRunner().invoke(main, arguments)
    if result.exception is not None:
        raise result.exception
"""


def test_commands_without_merge_methods_are_untouched(twins, copies, tmp_path):
    """mergekit-moe and mergekit-tokensurgeon write the same with and without this package."""
    a, b = twins.reference, changed_copy(twins.others[0], tmp_path / "b", lambda state: state)
    a = changed_copy(a, tmp_path / "a", lambda state: state)
    for folder, shift in ((a, 0), (b, 5)):
        ids = [(i + shift) % tiny.VOCABULARY for i in range(tiny.VOCABULARY)]
        save_tokenizer(folder, [f"t{i}" for i in ids])
    file = tmp_path / "moe.yml"
    experts = [{"source_model": str(m), "positive_prompts": ["t3"]} for m in (a, b)]
    raw = {"base_model": str(a), "gate_mode": "random", "dtype": "float32", "experts": experts}
    file.write_text(json.dumps(raw))

    def calls(folder):
        return [
            ("moe", str(file), str(folder / "moe"), "--random-seed", "1"),
            ("tokensurgeon", str(a), str(b), str(folder / "surgeon"), "-k", "2"),
        ]

    for command, *arguments in calls(tmp_path / "with"):
        main = {"moe": moe, "tokensurgeon": tokensurgeon}[command].main
        succeeded(CliRunner().invoke(main, arguments))
    subprocess.run(
        [sys.executable, "-c", UNTOUCHED.format(calls=calls(tmp_path / "without"))],
        env={**os.environ, "MERGEKIT_ROTATION_DISABLE": "1"},
        check=True,
    )
    for name in ("moe", "surgeon"):
        first, second = tmp_path / "with" / name, tmp_path / "without" / name
        assert weights(first) and same(weights(first), weights(second))
        assert (first / "config.json").read_bytes() == (second / "config.json").read_bytes()


# -- evolution ------------------------------------------------------------------------------------

GENOMES = [
    ("linear", {}),
    ("linear", {"smooth": True, "layer_granularity": 1}),
    ("slerp", {"layer_granularity": 1}),
    ("task_arithmetic", {"base": True, "filters": ["self_attn", "mlp"]}),
    ("ties", {"base": True, "layer_granularity": 2}),
    ("dare_ties", {"base": True}),
]


def genome(method, models, base=False, **more):
    named = {"base_model": str(models[0])} if base else {}
    listed = [str(model) for model in (models[1:] if base else models)]
    raw = {"merge_method": method, "models": listed, **named, **more}
    return ModelGenome(ModelGenomeDefinition.model_validate(raw))


@pytest.mark.parametrize(("method", "more"), GENOMES)
def test_genomes_become_the_plain_ones_configurations_with_the_prefix(
    method, more, twins, tmp_path
):
    models = [twins.reference, *twins.others]
    plain, ours = (genome(prefix + method, models, **more) for prefix in ("", "rotation_"))
    genotype = plain.initial_genotype()
    assert torch.equal(ours.initial_genotype(), genotype)
    assert ours.genotype_to_param_arrays(genotype).keys() == (
        plain.genotype_to_param_arrays(genotype).keys()
    )
    expected = plain.genotype_merge_config(genotype).model_dump()
    found = ours.genotype_merge_config(genotype)
    assert found.model_dump() == expected | {"merge_method": f"rotation_{method}"}
    options = MergeOptions(copy_tokenizer=False, write_model_card=False, quiet=True)
    exact = found.model_copy(update={"dtype": "float32"})
    run_merge(exact, str(tmp_path / "out"), options)
    assert twins.distance(tmp_path / "out") < 1e-3


def test_genomes_are_checked_as_the_plain_ones_are(twins):
    models = [twins.reference, *twins.others]
    with pytest.raises(ValidationError, match="base_model is required"):
        genome("rotation_ties", models)
    with pytest.raises(ValidationError, match="smooth is not supported"):
        genome("rotation_slerp", models, smooth=True)
    with pytest.raises(ValidationError, match="Invalid merge method"):
        genome("rotation_karcher", models)
