"""Tables: at every width of a terminal nothing is cut and nothing vanishes."""

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from mergekit_rotation.graph.motion import Motion
from mergekit_rotation.graph.report import Part, Report, Sums
from mergekit_rotation.insight.compared import Comparison
from mergekit_rotation.insight.tables import Column, show_comparison, stacked

LAYERS = 3
SUMS = Sums(1.0, 1.0, 1.0, 1.9876, 1.2345e-9, -0.001234, 0.999)
NUMBERS = "1.41 → 3.51e-05", "-0.00123 → 0.999"
AXES = {"kv": "heads", "g": "group", "f": "neurons", "x": "experts"}
HEADINGS = {"layer", "distance", "cosine", *AXES.values(), "q/k", "v/o"}
OUTSIDE = {
    "encoder.token_type_embeddings.weight": "token_type_embeddings",
    "encoder.LayerNorm.bias": "LayerNorm.bias",
}


def motions():
    orders = [Motion(axis, "order", 8, 1.0, ()) for axis in AXES]
    return (
        *orders,
        *(Motion(axis, "rotation", 8, 0.0, (0, 90, 104, 120, 180)) for axis in ("qk", "vo")),
    )


def report(reference="models/a", model="models/b"):
    """A pair with every kind of motion, and numbers as wide as they get."""
    parts = [
        Part(f"model.{k}", (k, k + 8), "attention", SUMS, (), motions()) for k in range(LAYERS)
    ]
    return Report(reference, model, parts, dict.fromkeys(OUTSIDE, SUMS))


def shown(comparison, width, terminal=True):
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None)
    show_comparison(comparison, console)
    assert all(cell_len(line) <= width for line in out.getvalue().splitlines())
    return out.getvalue()


def tables(text):
    """Every table as {row: cells}, with its headings as a row of their own."""
    found, lines = [], text.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if set(following.strip()) == {"─"}:
            found.append([line.split()])
        elif found and re.match(" [^ ─]", line):
            found[-1].append(re.split(r"\s{2,}", line.strip()))
    return found


@pytest.mark.parametrize(("width", "count"), [(60, 2), (80, 2), (120, 1)])
def test_all_of_a_pair_is_told_at_every_width(width, count):
    found = tables(shown(Comparison(("models/a", "models/b"), [report()]), width))
    assert len(found) == count
    assert all(table[0][0] == "layer" for table in found)
    assert {heading for table in found for heading in table[0]} == HEADINGS
    rows = {}
    for table in found:
        for name, *cells in table[1:]:
            assert len(cells) in (len(table[0]) - 1, 2)
            rows.setdefault(name, []).extend(cells)
    layers = [f"{k} - {k + 8}" for k in range(LAYERS)]
    assert list(rows) == [*layers, *OUTSIDE.values(), "all"]
    for layer in layers:
        assert rows[layer] == [*NUMBERS, *["100%"] * 4, "104°", "104°"]
    for name in (*OUTSIDE.values(), "all"):
        assert rows[name] == list(NUMBERS)


def test_what_is_no_terminal_gets_whole_lines(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    show_comparison(Comparison(("a", "b"), [report()]))
    lines = capsys.readouterr().out.splitlines()
    (heading,) = (line.split() for line in lines if line.startswith(" layer"))
    assert set(heading) == HEADINGS
    assert lines[-2].startswith("verdict: ") and lines[-1].startswith("  neurons in place 100%")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_models_of_a_matrix_are_told_apart_by_numbers(width):
    models = [f"a-really-long-name-of-a-team/a-really-long-name-{k}" for k in range(12)]
    pairs = [report(a, b) for i, a in enumerate(models) for b in models[i + 1 :]]
    text = shown(Comparison(models, pairs), width)
    places = [str(k) for k in range(1, 13)]
    assert text.splitlines()[:12] == [
        f"{place:>3}  {model}" for place, model in zip(places, models, strict=True)
    ]
    found = tables(text)
    columns = [heading for table in found for heading in table[0]]
    assert columns == places * 2
    assert all([row[0] for row in table[1:]] == places for table in found)
    half = len(found) // 2
    for part, value in ((found[:half], "1.41"), (found[half:], "3.51e-05")):
        for i, place in enumerate(places):
            cells = [
                cell for table in part for row in table[1:] if row[0] == place for cell in row[1:]
            ]
            assert cells == [value] * i + ["0"] + [value] * (11 - i)


def test_names_are_no_markup_and_blank_rows_are_left_out():
    out = io.StringIO()
    console = Console(file=out, width=80, color_system=None)
    columns = [Column("first", ["1", ""]), Column("second", ["", ""])]
    for table in stacked(console, "corner", [["[bold]x[/bold]", "y"]], [columns]):
        console.print(table)
    assert "[bold]x[/bold]" in out.getvalue() and " y " not in out.getvalue()


def test_models_of_other_shapes_are_told_not_to_be_merged():
    text = shown(Comparison(("a", "b"), [Report("a", "b", apart="hidden_size is 2, but 1")]), 120)
    assert "unrelated: tensors of different shapes cannot be merged\n" in text
    assert "hidden_size is 2, but 1" in text and "align_residual" not in text
