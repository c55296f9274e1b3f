"""The same merge writes the same bytes whatever the order of sets, and draws no random numbers."""

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

import tiny
from merging import Twins, config, merged, save_tokenizer, weights, write


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Three models with configurations and tokens of their own."""
    twins = Twins("llama", tmp_path_factory.mktemp("llama"), count=2, num_hidden_layers=1)
    found = [twins.reference, *twins.others]
    common = [f"t{row}" for row in range(tiny.VOCABULARY - 9)]
    for number, folder in enumerate(found):
        save_tokenizer(folder, [*common, *(f"m{number}-{k}" for k in range(9))])
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"number": number}))
    return found


# -- hash seeds -----------------------------------------------------------------------------------

MERGES = """
import sys
from mergekit.scripts.run_yaml import main
for name in sys.argv[1:]:
    main([name + ".yml", name, "--random-seed", "1"], standalone_mode=False)
"""


def test_the_order_of_sets_changes_no_byte(models, tmp_path, tally):
    """All files of the output and of `align_save`, in interpreters with two hash seeds."""
    base, union = {"base_model": str(models[0])}, {"tokenizer_source": "union"}
    residual = {"align_residual": "orthogonal"}
    given = {
        "no-base": config("rotation_linear", models),
        "base": config("rotation_task_arithmetic", models, **base),
        "union": config("rotation_linear", models, **union),
        "union-base": config("rotation_ties", models, **base, **union),
        "random": config("rotation_dare_ties", models, parameters={"density": 0.5}, **base),
        "residual": config(
            "rotation_linear", models, parameters=residual | {"align_save": "saved.safetensors"}
        ),
    }
    folders = [tmp_path / str(seed) for seed in range(2)]
    running = []
    for seed, folder in enumerate(folders):
        folder.mkdir()
        for name, raw in given.items():
            write(raw, folder).rename(folder / f"{name}.yml")
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", MERGES, *given]
        running.append(subprocess.Popen(command, cwd=folder, env=environment))
    assert [process.wait() for process in running] == [0, 0]

    first, second = map(files, folders)
    assert first.keys() == second.keys()
    for name in given:
        assert {f"{name}/{file}" for file in WRITTEN} <= first.keys()
    for name in ("no-base", "union", "residual"):  # the reference gives what no base can give
        assert json.loads(first[f"{name}/config.json"])["number"] == 0
    assert b"m0-8" in first["no-base/tokenizer.json"]
    assert first["saved.safetensors"] == second["saved.safetensors"]
    differing = {file.split("/")[0] for file in first if first[file] != second[file]}
    tally("runs with other hash seeds equal", [name not in differing for name in given])
    assert not differing, [file for file in first if first[file] != second[file]]


WRITTEN = ("model.safetensors", "config.json", "alignment.json", "README.md", "tokenizer.json")


def files(folder):
    found = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in found}


# -- random numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "parameters"),
    [("llama", {"align_residual": "orthogonal", "align_scale": True}), ("mixtral", {})],
)
def test_solving_draws_no_random_numbers_of_others(case, parameters, tmp_path):
    twins = Twins(case, tmp_path)
    before = states()
    models = [twins.reference, *twins.others]
    merged(config("rotation_linear", models, parameters=parameters), tmp_path / "out")
    assert states() == before


def states():
    name, keys, *more = np.random.get_state()
    return torch.get_rng_state().tolist(), (name, keys.tolist(), *more), random.getstate()


# -- threads --------------------------------------------------------------------------------------

WIDE = {"hidden_size": 160, "intermediate_size": 320, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model whose matrices are large enough for several threads, and a twin."""
    twins = Twins("llama", tmp_path_factory.mktemp("wide"), **WIDE)
    return [twins.reference, *twins.others]


def test_threads_change_the_last_bits_of_rotated_tensors_only(wide, tmp_path, monkeypatch):
    """Sums of n products differ by n eps; polar factors by that, times their condition number.

    A polar factor of G changes by 2 |dG| / (sigma_min + sigma_min') at most (R.-C. Li, SIAM J.
    Matrix Anal. Appl. 16, 1995, theorem 1); cross-Grams are summed in float64.
    """
    conditions = []
    original = torch.linalg.svd

    def spied(matrix, **options):
        found = original(matrix, **options)
        values = found.S if hasattr(found, "S") else found[1]
        conditions.append(float((values.square().sum(-1).sqrt() / values[..., -1]).max()))
        return found

    monkeypatch.setattr(torch.linalg, "svd", spied)
    raw = config("rotation_linear", wide)
    one, two = (with_threads(number, raw, tmp_path / str(number)) for number in (1, 2))
    assert conditions
    n = WIDE["intermediate_size"]
    bound = n * torch.finfo(torch.float32).eps
    bound += 4 * n * torch.finfo(torch.float64).eps * max(conditions)
    assert bound < 1e-3
    for name, x in one.items():
        if "self_attn" in name:
            assert (two[name] - x).norm() <= bound * x.norm()
        else:
            assert torch.equal(two[name], x)


def with_threads(number, raw, out):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        return weights(merged(raw, out))
    finally:
        torch.set_num_threads(before)
