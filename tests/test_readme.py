"""What the README says is so."""

import json
import re
from pathlib import Path

import pytest

from mergekit_rotation.architecture import VARIABLE, Family
from mergekit_rotation.architecture.table import support_table
from mergekit_rotation.graph.parameters import KNOWN
from mergekit_rotation.proof import check_family
from merging import command

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_of_families_is_generated():
    between = re.search(r"<!-- table:.*?-->\n(.*?)\n<!-- /table -->", README, re.DOTALL)
    assert between is not None
    assert between.group(1) == support_table()


def test_the_declaration_that_is_shown_holds():
    text = re.search(r"```json\n(.*?)```", README, re.DOTALL)
    assert text is not None
    shown = json.loads(text.group(1))
    family = Family.model_validate({**shown, "models": {"mistral": ["MistralForCausalLM"]}})
    (report,) = check_family(family)
    assert report.holds and len(report.rows) == 7
    assert not report.absent and not report.idle


def anchors(file):
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere():
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md")]
    found = []
    for page in pages:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:", link):
                path, _, anchor = link.partition("#")
                file = page.parent / path if path else page
                assert file.exists(), (page.name, link)
                assert not anchor or anchor in anchors(file), (page.name, link)
                found.append(link)
    assert "#adding-an-architecture" in found and "docs/reading-the-numbers.md" in found


@pytest.mark.parametrize("name", [*KNOWN, VARIABLE])
def test_every_parameter_is_documented(name):
    assert f"`{name}`" in README or f"`{name}=" in README


def losses(*folders):
    """Return {folder: (code, docs)} as the quickstart prints it."""
    result = command("python", "recipes/quickstart/loss.py", *map(str, folders), cwd=ROOT)
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()[1:]]
    return {name: (float(code), float(docs)) for name, code, docs in rows}


SEEDS = "recipes/quickstart/seed-0", "recipes/quickstart/seed-1"
ROWS = {
    "the model": "recipes/quickstart/model",
    "the fine-tune": "recipes/quickstart/finetune-rotated",
    "rotation_linear": "quickstart",
    "linear": "quickstart-plain",
    "seed 0": SEEDS[0],
    "seed 1": SEEDS[1],
    "with align_residual": "independent",
    "without": "independent-local",
}


@pytest.fixture(scope="module")
def loss(tmp_path_factory):
    """Losses by row of the README's tables."""
    tmp = tmp_path_factory.mktemp("quickstart")
    folders = {}
    for row, name in ROWS.items():
        if not name.startswith("recipes/"):
            out = tmp / name
            result = command("mergekit-yaml", f"recipes/{name}.yml", str(out), cwd=ROOT)
            assert result.returncode == 0, result.stderr
            assert "Traceback" not in result.stderr
            name = str(out)
        folders[row] = name
    found = losses(*folders.values())
    return {row: found[folder] for row, folder in folders.items()}


def test_the_quickstart_merges_what_plain_averaging_destroys(loss):
    for k in (0, 1):
        parent = max(loss["the model"][k], loss["the fine-tune"][k])
        assert loss["rotation_linear"][k] < parent
        assert loss["linear"][k] > parent + 1


def test_independent_models_come_together_by_their_streams(loss):
    chord = (loss["seed 0"][0] + loss["seed 1"][0]) / 2
    with_map, without = loss["with align_residual"][0], loss["without"][0]
    assert with_map - chord < 0.5 * (without - chord)


def test_the_losses_are_those_that_are_quoted(loss):
    shown = re.findall(r"\| `?([\w -]+)`? \| \**([\d.]+)\** \| \**([\d.]+)\** \|", README)
    quoted = {name: (float(code), float(docs)) for name, code, docs in shown}
    assert set(quoted) >= set(ROWS)
    for row in ROWS:
        # Another processor rounds the evaluation differently in the last printed digit.
        assert quoted[row] == pytest.approx(loss[row], abs=2e-3)
