"""``--plot``: every layer has its mark, everything is labelled, nothing overlaps."""

import itertools
import random
import re
import sys
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

import tiny
from mergekit_rotation.cli import main
from mergekit_rotation.insight.plots import plot_comparison


def distances(generator, low=0.1, high=1.5):
    return {f"distance_{when}": generator.uniform(low, high) for when in ("before", "after")}


def pair(depth, reference="models/base", model="models/other", verdict="related", kinship=0.6):
    """What compare writes of two models, of random numbers."""
    generator = random.Random(depth)
    kinds = ("attention", "neurons", "other")
    return {
        "reference": reference,
        "model": model,
        "verdict": verdict,
        "evidence": {"kinship": kinship},
        "reason": None,
        "distance_before": 1.41,
        "distance_after": 0.2,
        "layers": [
            {
                "reference_layer": k,
                "blocks": [{"block": kind, **distances(generator)} for kind in kinds],
            }
            for k in range(depth)
        ],
        "outside": [
            {"tensor": f"model.{name}.weight", **distances(generator)}
            for name in ("embed_tokens", "norm")
        ],
    }


def several(count):
    """Two families of models, in turns."""
    models = [f"models/some-team/model-{k}-7b-instruct" for k in range(count)]
    pairs = [
        pair(1, a, b, *(("same-coordinates", 0.9) if (i - j) % 2 == 0 else ("unrelated", 0.2)))
        for (i, a), (j, b) in itertools.combinations(enumerate(models), 2)
    ]
    return {"models": models, "pairs": pairs}


def texts(file):
    """All texts of an SVG."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", file.read_text(encoding="utf-8"))


def marks(file, gid):
    """How many marks a line has: uses of one shape in its group."""
    (group,) = (g for g in ElementTree.parse(file).iter() if g.get("id") == gid)
    return sum(1 for _ in group.iter("{http://www.w3.org/2000/svg}use"))


@pytest.mark.parametrize("depth", [4, 80])
def test_every_layer_has_its_marks(depth, tmp_path):
    file = tmp_path / "pair.svg"
    plot_comparison(pair(depth), file)
    for kind, when in itertools.product(("attention", "neurons", "other"), ("before", "after")):
        assert marks(file, f"{kind}-{when}") == depth
    assert marks(file, "outside-before") == marks(file, "outside-after") == 2
    shown = texts(file)
    for label in (
        *("attention", "neurons", "norms and other tensors", "outside of the layers"),
        *("before alignment", "after alignment", "layer of the reference", "relative distance"),
        *("model.embed_tokens", "model.norm", "other aligned to base: related"),
    ):
        assert label in shown, label


def test_a_layer_that_lacks_a_part_has_no_mark_there(tmp_path):
    data = pair(6)
    for entry in data["layers"][::2]:
        del entry["blocks"][0]
    data["layers"][1]["blocks"][2] |= {"distance_before": None, "distance_after": None}
    plot_comparison(data, tmp_path / "pair.svg")
    found = [
        marks(tmp_path / "pair.svg", f"{kind}-after") for kind in ("attention", "neurons", "other")
    ]
    assert found == [3, 6, 5]


def test_models_that_cannot_be_compared_are_said_to_be(tmp_path):
    data = {**pair(0), "outside": [], "reason": "intermediate_size is 96, but 80"}
    plot_comparison(data, tmp_path / "pair.svg")
    assert "intermediate_size is 96, but 80" in texts(tmp_path / "pair.svg")


@pytest.mark.parametrize("count", [3, 12])
def test_relatives_stand_together_in_the_matrix(count, tmp_path):
    plot_comparison(several(count), tmp_path / "matrix.svg")
    shown = texts(tmp_path / "matrix.svg")
    columns = [int(t.split("-")[1]) % 2 for t in shown if t.startswith("model-")][:count]
    assert sum(a != b for a, b in itertools.pairwise(columns)) == 1
    words = ("same-coordinates", "unrelated") if count == 3 else ("C", "U")
    for word, equal in zip(words, (True, False), strict=True):
        pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
        assert shown.count(word) == sum(((i - j) % 2 == 0) == equal for i, j in pairs)
    assert "kinship: cosine of heads and neurons, once aligned" in shown
    assert any(t.startswith("C: same-coordinates") for t in shown) == (count == 12)


@pytest.mark.parametrize(
    "data",
    [pair(4), pair(80), pair(4, "a" * 60, "b" * 60), several(3), several(8), several(12)],
    ids=["4 layers", "80 layers", "long names", "3 models", "8 models", "12 models"],
)
def test_nothing_overlaps(data, tmp_path, monkeypatch):
    boxes, draw = {}, Text.draw

    def recorded(text, renderer):
        if text.get_text() and text.get_visible() and text.get_rotation() in (0, 90):
            boxes[text] = text.get_window_extent(renderer)
        draw(text, renderer)

    figures = []
    monkeypatch.setattr(Text, "draw", recorded)
    monkeypatch.setattr(Figure, "savefig", lambda figure, file: figures.append(figure))
    plot_comparison(data, tmp_path / "x.png")
    FigureCanvasAgg(figures[0]).draw()
    canvas = figures[0].bbox.padded(1)
    assert len(boxes) > 10
    for text, box in boxes.items():
        assert canvas.contains(box.x0, box.y0) and canvas.contains(box.x1, box.y1), text
    for (first, a), (second, b) in itertools.combinations(boxes.items(), 2):
        assert not a.padded(-1).overlaps(b.padded(-1)), (first, second)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_command_draws(suffix, tmp_path):
    tiny.save(tiny.build("llama"), tmp_path / "a")
    tiny.save(tiny.build("llama", seed=1), tmp_path / "b")
    file = tmp_path / f"picture.{suffix}"
    models = [str(tmp_path / name) for name in "ab"]
    result = CliRunner().invoke(main, ["compare", *models, "--plot", str(file), "--quiet"])
    assert result.exit_code == 0, result.output
    assert file.read_bytes()[:5] == (b"\x89PNG\r" if suffix == "png" else b"<?xml")
    if suffix == "svg":
        assert marks(file, "attention-before") == tiny.LAYERS


def test_what_cannot_be_drawn_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    def refused(file):
        return CliRunner().invoke(main, ["compare", "no", "models", "--plot", str(file)])

    for file, why in (("x.pdf", ".png or .svg"), (tmp_path / "no" / "x.png", "there is no folder")):
        result = refused(file)
        assert result.exit_code == 2 and why in result.output
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = refused("x.png")
    assert result.exit_code == 1 and result.output.count("\n") == 1
    assert "pip install 'mergekit-rotation[plot]'" in result.output
