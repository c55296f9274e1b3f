"""The planned graph: order, residency, sharing; slices and vocabularies of outputs."""

import gc

import pytest
import torch
from mergekit.io.tasks import LoadTensor
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask

import tiny
from mergekit_rotation.graph import run
from mergekit_rotation.graph.motion import Motion
from mergekit_rotation.graph.tasks import AlignBlock
from merging import Twins, changed_copy, config, merged, schedule, scrambled, weights


def merges(tasks):
    return [t.output_weight.name for t in tasks if isinstance(t, ExecuteMergeMethodTask)]


def most_loads_alive(tasks, last):
    alive = [
        sum(1 for j, t in enumerate(tasks[: i + 1]) if isinstance(t, LoadTensor) and last[t] >= i)
        for i in range(len(tasks))
    ]
    return max(alive)


def deep(case, folder, layers):
    key = "n_layer" if case == "gpt2" else "num_hidden_layers"
    extra = {"layer_types": None} if case == "gemma3" else {}
    for name, seed in (("a", 0), ("b", 1), ("c", 2)):
        tiny.save(tiny.build(case, seed=seed, **{key: layers}, **extra), folder / name)
    return [folder / "a", folder / "b", folder / "c"]


@pytest.mark.parametrize("case", ["llama", "qwen2", "gpt2", "phi3", "bert-masked-lm"])
def test_tensors_are_merged_in_mergekits_order(case, tmp_path):
    models = deep(case, tmp_path, 3)
    ours, _ = schedule(config("rotation_linear", models), tmp_path / "ours")
    plain, _ = schedule(config("linear", models), tmp_path / "plain")
    assert merges(ours) == merges(plain)
    assert not any(
        t.method_name.startswith("rotation") for t in ours if isinstance(t, ExecuteMergeMethodTask)
    )


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_about_one_layer_of_each_model_is_resident(case, tmp_path):
    alive = {}
    for layers in (3, 12):
        folder = tmp_path / str(layers)
        models = deep(case, folder, layers)
        tasks, last = schedule(config("rotation_linear", models), folder / "out")
        alive[layers] = most_loads_alive(tasks, last)
        blocks = [task for task in tasks if isinstance(task, AlignBlock)]
        assert len(blocks) == 2 * 2 * layers  # two blocks, two models other than the reference
    largest = max(len(block.legs) for block in blocks)
    assert alive[3] == alive[12] <= 3 * (largest + 1)


def bytes_alive():
    """Bytes of all tensors that anything holds, each stretch of memory counted once."""
    held = {x.data_ptr(): x.nbytes for x in gc.get_objects() if type(x) is torch.Tensor}
    return sum(held.values())


def test_nothing_of_a_layer_is_kept_once_it_is_merged(tmp_path, monkeypatch):
    """Neither weights nor transformations: what is alive at most does not grow with the depth."""
    execute, alive = ExecuteMergeMethodTask.execute, []

    def watched(task, **inputs):
        alive.append(bytes_alive())
        return execute(task, **inputs)

    monkeypatch.setattr(ExecuteMergeMethodTask, "execute", watched)
    peaks = {}
    for layers in (3, 12):
        folder = tmp_path / str(layers)
        model, *rest = deep("llama", folder, layers)
        options = ("--out-shard-size", "1")  # written as soon as it is merged
        gc.collect()
        before = bytes_alive()
        alive.clear()
        merged(config("rotation_linear", [model, *rest]), folder / "out", *options)
        peaks[layers] = max(alive) - before
    layer = sum(x.nbytes for n, x in weights(model).items() if "layers.0." in n)
    assert run.current().records, "nothing was aligned"
    assert abs(peaks[12] - peaks[3]) < layer / 8
    assert peaks[12] < 3 * 3 * layer


def test_every_leg_is_read_once(tmp_path):
    models = deep("llama", tmp_path, 2)
    tasks, _ = schedule(config("rotation_linear", models), tmp_path / "out")
    reads = [
        (t.model, t.tensor) for t in tasks if isinstance(t, LoadTensor) and "layers" in t.tensor
    ]
    assert len(reads) == len(set(reads))


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    return Twins("llama", tmp_path_factory.mktemp("llama"), count=2)


def layers_of(state):
    names = {name.split(".")[2] for name in state if name.startswith("model.layers.")}
    return len(names)


def test_slices_align_each_pair_of_layers(tmp_path):
    model = tiny.build("llama")
    tiny.save(model, tmp_path / "a")
    a = weights(tmp_path / "a")

    # The other model holds the reference's two layers in the opposite order, scrambled.
    def swap(state):
        state = scrambled("llama", seed=5)(state)
        moved = {}
        for name, tensor in state.items():
            for here, there in ((".layers.0.", ".layers.1."), (".layers.1.", ".layers.0.")):
                if here in name:
                    moved[name.replace(here, there)] = tensor
        return {**state, **moved}

    b = changed_copy(tmp_path / "a", tmp_path / "b", swap)
    slices = [
        {
            "sources": [
                {
                    "model": str(tmp_path / "a"),
                    "layer_range": [i, i + 1],
                    "parameters": {"weight": 0.5},
                },
                {"model": str(b), "layer_range": [1 - i, 2 - i], "parameters": {"weight": 0.5}},
            ]
        }
        for i in (0, 1)
    ]
    raw = {"merge_method": "rotation_linear", "slices": slices, "dtype": "float32"}
    out = weights(merged(raw, tmp_path / "out"))
    for name, tensor in a.items():
        bound = 64 * tensor.shape[-1] * torch.finfo(torch.float32).eps
        assert float((out[name] - tensor).norm()) <= bound * float(tensor.norm()), name


def test_a_frankenmerge_of_single_sources_is_untouched(twins, tmp_path):
    sources = [
        {"model": str(twins.reference), "layer_range": [0, 2]},
        {"model": str(twins.others[0]), "layer_range": [0, 2]},
        {"model": str(twins.reference), "layer_range": [1, 2]},
    ]
    outputs = [
        merged(
            {
                "merge_method": method,
                "slices": [{"sources": [s]} for s in sources],
                "dtype": "float32",
            },
            tmp_path / method,
            "--clone-tensors",
        )
        for method in ("rotation_passthrough", "passthrough")
    ]
    ours, plain = (weights(out) for out in outputs)
    assert layers_of(ours) == 5
    assert ours.keys() == plain.keys()
    assert all(torch.equal(ours[name], plain[name]) for name in plain)


def test_three_models_are_aligned_independently_of_their_order(twins, tmp_path):
    a, b, c = twins.reference, *twins.others
    first = weights(merged(config("rotation_linear", [a, b, c], weight=1 / 3), tmp_path / "1"))
    second = weights(merged(config("rotation_linear", [a, c, b], weight=1 / 3), tmp_path / "2"))
    for name, tensor in weights(a).items():
        scale = float(tensor.norm())
        # A sum of three in another order: two roundings more.
        assert float((first[name] - second[name]).norm()) <= 4 * 2.0**-23 * scale
        assert float((first[name] - tensor).norm()) <= 64 * tensor.shape[-1] * 2.0**-23 * scale


def test_a_near_copy_is_not_moved_and_the_summary_says_so(twins, tmp_path):
    generator = torch.Generator().manual_seed(0)

    def noisy(state):
        return {
            n: t + 0.01 * t.std() * torch.randn(t.shape, generator=generator)
            for n, t in state.items()
        }

    near = changed_copy(twins.reference, tmp_path / "near", noisy)
    models = [twins.reference, near]
    ours = weights(merged(config("rotation_linear", models), tmp_path / "ours"))
    (line,) = run.current().summary()
    assert "nothing had to move" in line
    plain = weights(merged(config("linear", models), tmp_path / "plain"))
    assert all(torch.equal(ours[name], plain[name]) for name in plain)


def test_alignment_never_increases_the_distance(tmp_path):
    models = deep("llama", tmp_path, 2)[:2]
    merged(config("rotation_linear", models), tmp_path / "out")
    assert run.current().records
    for record in run.current().records:
        assert record.after < record.before


@pytest.mark.parametrize(
    ("case", "entries", "words"),
    [
        (
            "granitemoehybrid",
            {"layer_types": ["full_attention", "linear_attention", "linear_attention"]},
            "attention in 1",
        ),
        (
            "lfm2",
            {"layer_types": ["full_attention", "conv", "conv"]},
            "attention in 1, convolution in 2",
        ),
        ("qwen3_moe", {"mlp_only_layers": [1, 2]}, "experts in 1, neurons in 2"),
    ],
)
def test_layers_of_several_kinds_have_one_line_per_model(case, entries, words, tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for seed, folder in enumerate(folders):
        tiny.save(tiny.build(case, seed=seed, num_hidden_layers=3, **entries), folder)
    out = weights(merged(config("rotation_linear", folders), tmp_path / "out"))
    (line,) = run.current().summary()
    assert f": 3 layers ({words}), relative distance" in line
    assert "values and outputs rotated in" in line and "neurons reordered in 3/3" in line
    a, b = (weights(folder) for folder in folders)
    inner = [name for name in out if ".mamba." in name]  # nothing of it is declared to move
    assert bool(inner) == (case == "granitemoehybrid")
    assert all(torch.allclose(out[name], (a[name] + b[name]) / 2) for name in inner)


def test_the_summary_is_shown_unless_quiet(twins, tmp_path):
    from click.testing import CliRunner
    from mergekit.scripts.run_yaml import main

    from merging import write

    file = write(config("rotation_linear", [twins.reference, twins.others[0]]), tmp_path)
    arguments = [str(file), str(tmp_path / "out"), "--no-copy-tokenizer", "--no-write-model-card"]
    loud = CliRunner().invoke(main, arguments).output
    assert f"aligned {twins.others[0]} -> {twins.reference}: 2 layers, relative distance" in loud
    assert "neurons reordered in 2/2" in loud
    assert "aligned" not in CliRunner().invoke(main, [*arguments, "--quiet"]).output


@pytest.mark.parametrize(
    ("gaps", "words"),
    [
        ((0.0, 6.4e-5), "neurons reordered in 2/2, order of neurons within 6.4e-05 of the best"),
        ((0.0, 0.0), "neurons reordered in 2/2"),
    ],
)
def test_the_summary_tells_how_far_an_order_may_be_from_the_best(gaps, words):
    records = [
        run.Record(
            *("a", "b", "neurons", str(layer)),
            *(("f",), 1.0, 0.5, 1.0, 0.0),
            orders=(Motion("f", "order", 8, 0.0, gap=gap),),
        )
        for layer, gap in enumerate(gaps)
    ]
    assert run.moves_of(records) == words
