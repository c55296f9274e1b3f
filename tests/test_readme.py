"""What the README says is so."""

import re
from pathlib import Path

import pytest

from mergekit_rotation.architecture.table import support_table
from mergekit_rotation.graph.parameters import KNOWN, RESERVED
from merging import command

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_of_families_is_generated():
    between = re.search(r"<!-- table:.*?-->\n(.*?)\n<!-- /table -->", README, re.DOTALL)
    assert between is not None
    assert between.group(1) == support_table()


@pytest.mark.parametrize("name", [*KNOWN, *RESERVED])
def test_every_parameter_is_documented(name):
    assert f"`{name}`" in README


def losses(*folders):
    """Return {folder: (code, docs)} as the quickstart prints it."""
    result = command("python", "recipes/quickstart/loss.py", *map(str, folders), cwd=ROOT)
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()[1:]]
    return {name: (float(code), float(docs)) for name, code, docs in rows}


def test_the_quickstart_merges_what_plain_averaging_destroys(tmp_path):
    for recipe, out in (("quickstart", "merged"), ("quickstart-plain", "plain")):
        result = command("mergekit-yaml", f"recipes/{recipe}.yml", str(tmp_path / out), cwd=ROOT)
        assert result.returncode == 0, result.stderr
        assert "Traceback" not in result.stderr
    model, finetune = "recipes/quickstart/model", "recipes/quickstart/finetune-rotated"
    merged, plain = tmp_path / "merged", tmp_path / "plain"
    loss = losses(model, finetune, merged, plain)
    parents = [max(loss[model][k], loss[finetune][k]) for k in (0, 1)]
    for k in (0, 1):
        assert loss[str(merged)][k] < parents[k]
        assert loss[str(plain)][k] > parents[k] + 1
    shown = re.findall(r"\| `?([\w -]+)`? \| \**([\d.]+)\** \| \**([\d.]+)\** \|", README)
    quoted = {name: (float(code), float(docs)) for name, code, docs in shown}
    names = {
        "the model": model,
        "the fine-tune": finetune,
        "rotation_linear": str(merged),
        "linear": str(plain),
    }
    assert set(quoted) == set(names)
    for name, folder in names.items():
        # Another processor rounds the evaluation differently in the last printed digit.
        assert quoted[name] == pytest.approx(loss[folder], abs=2e-3)
