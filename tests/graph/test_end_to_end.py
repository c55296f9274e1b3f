"""A twin in other coordinates merges with its origin, through the real command."""

import pytest

import tiny
from merging import QUIET, Twins, command, config, merged, protected, write

#: one of every kind through the installed command, the others in this process
INSTALLED = ["bert-masked-lm", "gemma3", "gpt2", "llama", "mixtral"]


@pytest.mark.parametrize("case", INSTALLED)
def test_twin_returns_through_the_installed_command(case, tmp_path):
    twins = Twins(case, tmp_path)
    file = write(config("rotation_linear", [twins.reference, *twins.others]), tmp_path)
    result = command("mergekit-yaml", str(file), str(tmp_path / "out"), *QUIET)
    assert result.returncode == 0, result.stderr
    assert twins.distance(tmp_path / "out") < 1e-3


@pytest.mark.parametrize("case", sorted(tiny.FAMILIES))
def test_twin_returns(case, tmp_path):
    twins = Twins(case, tmp_path)
    models = [twins.reference, *twins.others]
    assert twins.distance(merged(config("rotation_linear", models), tmp_path / "out")) < 1e-3
    if tiny.FAMILIES[case].mergeable:
        assert twins.distance(merged(config("linear", models), tmp_path / "plain")) > 0.05


@pytest.mark.parametrize("case", ["llama", "gpt2", "gemma3", "arcee", "mixtral"])
def test_protected_model_returns_with_align_scale(case, tmp_path, caplog):
    """Heads multiplied by matrices of condition number 100, neurons by factors up to 10."""
    twins = Twins(case, tmp_path, count=0)
    other = protected(twins.model, tmp_path / "protected", condition=100.0)
    assert twins.distance(other) < 1e-3
    models = [twins.reference, other]
    on = config("rotation_linear", models, parameters={"align_scale": True})
    assert twins.distance(merged(on, tmp_path / "on")) < 1e-2
    assert "align_scale" not in caplog.text
    file = tmp_path / "saved.safetensors"
    for more in ({"align_scale": True, "align_save": str(file)}, {"align_load": str(file)}):
        saved = config("rotation_linear", models, parameters=more)
        out = merged(saved, tmp_path / "-".join(more))
        assert twins.distance(out) < 1e-2
    assert twins.distance(merged(config("rotation_linear", models), tmp_path / "off")) > 0.05
    assert caplog.text.count("set align_scale: true") == 1
