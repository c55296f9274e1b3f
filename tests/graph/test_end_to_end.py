"""A twin in other coordinates merges with its origin, through the real command."""

import pytest

import tiny
from merging import QUIET, Twins, command, config, merged, write

#: one of every kind through the installed command, the others in this process
INSTALLED = ["bert-masked-lm", "gemma3", "gpt2", "llama", "mixtral"]


@pytest.mark.parametrize("case", INSTALLED)
def test_twin_returns_through_the_installed_command(case, tmp_path):
    twins = Twins(case, tmp_path)
    file = write(config("rotation_linear", [twins.reference, *twins.others]), tmp_path)
    result = command("mergekit-yaml", str(file), str(tmp_path / "out"), *QUIET)
    assert result.returncode == 0, result.stderr
    assert twins.distance(tmp_path / "out") < 1e-3


@pytest.mark.parametrize("case", tiny.FAMILIES)
def test_twin_returns(case, tmp_path):
    twins = Twins(case, tmp_path)
    models = [twins.reference, *twins.others]
    assert twins.distance(merged(config("rotation_linear", models), tmp_path / "out")) < 1e-3
    if tiny.FAMILIES[case].mergeable:
        assert twins.distance(merged(config("linear", models), tmp_path / "plain")) > 0.05
