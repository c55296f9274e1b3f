"""Merges on accelerators that are not there, see `accelerator`: what would fail on a real one."""

from collections import defaultdict

import pytest
from mergekit import multigpu_executor

from mergekit_rotation.graph.gathering import gathering
from mergekit_rotation.graph.tasks import AlignBlock
from mergekit_rotation.symmetry import experts
from merging import Twins, config, merged, planner, same, weights

ONE = ("--device", "cuda:0")
OPTIONS = {
    "one": ONE,
    "stays": (*ONE, "--low-cpu-memory"),
    "read": (*ONE, "--read-to-gpu"),
    "two": (*ONE, "--multi-gpu"),
    "two, stays": (*ONE, "--multi-gpu", "--low-cpu-memory", "--read-to-gpu"),
}
MERGES = [
    ("llama", {}, tuple(OPTIONS)),
    ("llama", {"align_scale": True}, ("one",)),
    ("llama", {"align_residual": "orthogonal", "align_residual_rounds": 2}, ("stays", "two")),
    ("gpt2", {"align_residual": "orthogonal"}, ("two, stays",)),
    ("gpt2", {"align_residual": "permutation"}, ("one",)),
    ("qwen2", {}, ("two",)),
    ("mixtral", {}, ("two",)),
]


@pytest.fixture
def estimates(monkeypatch):
    """Let experts be assigned by estimates, as those of large models are."""
    monkeypatch.setattr(experts, "AFFORDABLE", 0)
    monkeypatch.setattr(experts, "WIDTH", 4)


@pytest.mark.parametrize(("case", "parameters", "options"), MERGES)
def test_a_merge_on_accelerators_is_that_on_the_cpu(
    case, parameters, options, tmp_path, accelerators, estimates
):
    """Nothing meets a tensor of another device; with the same arithmetic, every bit is the same."""
    twins = Twins(case, tmp_path, num_hidden_layers=1)
    other = twins.others[0]
    if "align_residual" in parameters:
        other = twins.turned(tmp_path / "turned")
    raw = config("rotation_linear", [twins.reference, other], parameters=parameters)
    expected = weights(merged(raw, tmp_path / "cpu"))
    for name in options:
        found = weights(merged(raw, tmp_path / "out", *OPTIONS[name]))
        assert same(found, expected), name


@pytest.mark.parametrize("kind", ["none", "orthogonal"])
def test_every_layer_is_aligned_on_the_accelerator_that_merges_it(
    kind, tmp_path, accelerators, monkeypatch
):
    """Layers are islands of their own; all that belongs to one is computed in one place."""
    twins = Twins("llama", tmp_path, num_hidden_layers=6)
    models = [twins.reference, *twins.others]
    raw = config("rotation_linear", models, parameters={"align_residual": kind})
    kind_of_executor = gathering(multigpu_executor.MultiGPUExecutor)
    executor = kind_of_executor(planner(raw).plan_to_disk(str(tmp_path / "out")))
    blocks, layers = defaultdict(set), defaultdict(set)
    for device, handles in executor.gpu_assignments.items():
        for handle in handles:
            task = handle.task()
            if isinstance(task, AlignBlock):
                blocks[task.layer, task.spec.kind].add(device)
                layers[device].add(task.layer)
                users = [h for h in handles if handle in h.arguments().values()]
                assert len(users) >= len(task.legs)
    assert len(executor.gpu_assignments) == 2
    if kind == "orthogonal":  # solved while planning: tensors do not wait for one another
        one, two = map(len, executor.gpu_assignments.values())
        assert min(one, two) > 0.4 * (one + two)
        return
    assert len(blocks) == 12 and all(len(where) == 1 for where in blocks.values())
    assert all(len(some) >= 3 for some in layers.values())

    ran = {}
    execute = AlignBlock.execute

    def watched(task, **tensors):
        ran[task.layer, task.spec.kind] = {x.device for x in tensors.values()}
        return execute(task, **tensors)

    monkeypatch.setattr(AlignBlock, "execute", watched)
    executor.execute()
    assert ran == blocks
