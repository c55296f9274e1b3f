"""A twin in other coordinates merges with its origin, through the real command."""

import pytest

import tiny
from mergekit_rotation.architecture import all_families
from merging import QUIET, Twins, command, config, merged, write

MERGEABLE = [name for name, case in tiny.FAMILIES.items() if case.mergeable]
#: one class of every family through the installed command, the others in this process
FIRST = {tiny.FAMILIES[name].family: name for name in reversed(MERGEABLE)}


def test_every_family_is_merged():
    assert set(FIRST) == {family.family for family in all_families()}


@pytest.mark.parametrize("case", sorted(FIRST.values()))
def test_twin_returns_through_mergekit_yaml(case, tmp_path):
    twins = Twins(case, tmp_path)
    file = write(config("rotation_linear", [twins.reference, *twins.others]), tmp_path)
    result = command("mergekit-yaml", str(file), str(tmp_path / "out"), *QUIET)
    assert result.returncode == 0, result.stderr
    assert twins.distance(tmp_path / "out") < 1e-3
    plain = merged(config("linear", [twins.reference, *twins.others]), tmp_path / "plain")
    assert twins.distance(plain) > 0.1


@pytest.mark.parametrize("case", sorted(set(MERGEABLE) - set(FIRST.values())))
def test_twin_returns_with_every_head(case, tmp_path):
    twins = Twins(case, tmp_path)
    models = [twins.reference, *twins.others]
    assert twins.distance(merged(config("rotation_linear", models), tmp_path / "out")) < 1e-3
    assert twins.distance(merged(config("linear", models), tmp_path / "plain")) > 0.05
