"""``mergekit-rotation barrier``: losses of merges that are never written, and what they say."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import tiny
from mergekit_rotation.cli import main
from mergekit_rotation.insight import barrier as barriers
from mergekit_rotation.insight.lines import Barrier, Line
from mergekit_rotation.insight.plots import plot_barrier
from merging import Twins, changed_copy, config, merged, protected, write

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart"
CODE = QUICKSTART / "heldout-code.txt"
MODELS = [QUICKSTART / "model", QUICKSTART / "finetune-rotated"]
SEEDS = [QUICKSTART / "seed-0", QUICKSTART / "seed-1"]
TOKENS = 1024


def told(tmp_path, configuration, *arguments, text=CODE):
    """Run the command; return its exit code, its JSON and what it printed."""
    file = tmp_path / "barrier.json"
    file.unlink(missing_ok=True)
    given = [write(configuration, tmp_path), "--text", text, "--json", file, *arguments]
    result = CliRunner().invoke(main, ["barrier", *map(str, given), "--quiet"])
    data = json.loads(file.read_text()) if file.exists() else None
    return result.exit_code, data, " ".join(result.output.split())


def measured(tmp_path, configuration, *arguments, **more):
    """What a run says that has to succeed."""
    code, data, output = told(tmp_path, configuration, "--points", "3", *arguments, **more)
    assert code == 0, output
    return data


def losses(folder):
    """Loss of every token of a byte-level model on disk, by a routine of its own."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(list(CODE.read_bytes()[:TOKENS])).view(-1, 128)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    return cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").double()


def rounding(folder, entries=8):
    """By how much a mean loss may differ from that of the same weights, merged in other orders.

    Sums of about as many terms as a row has entries, in each layer, twice; in float32.
    """
    width = AutoModelForCausalLM.from_pretrained(folder).config.hidden_size
    return entries * torch.finfo(torch.float32).eps * width


@pytest.mark.parametrize(("models", "more"), [(MODELS, {}), (SEEDS, "orthogonal")])
def test_the_losses_are_those_of_merges_that_are_written(models, more, tmp_path):
    more = {"parameters": {"align_residual": more}} if more else {}
    data = measured(tmp_path, config("rotation_linear", models, **more), "--tokens", str(TOKENS))
    aligned = merged(config("rotation_linear", models, **more), tmp_path / "aligned")
    plain = merged(config("linear", models), tmp_path / "plain")
    limit = rounding(models[0])
    for line, folder in (("aligned", aligned), ("plain", plain)):
        first, middle, last = data[line]["loss"]
        assert abs(middle - float(losses(folder).mean())) < limit, line
        for loss, model in ((first, models[0]), (last, models[1])):
            assert abs(loss - float(losses(model).mean())) < limit, line
    assert data["tokens"] == TOKENS // 128 * 127 and data["t"] == [0, 0.5, 1]
    assert data["ends"]["same"] and data["ends"]["apart"] > 0
    chord = (data["plain"]["loss"][0] + data["plain"]["loss"][2]) / 2
    assert data["plain"]["barrier"] == pytest.approx(data["plain"]["loss"][1] - chord)
    assert data["plain"]["top"] == 0.5 and data["plain"]["barrier"] > 1.5
    if more:
        assert 0.4 < data["removed"] < 0.9
    else:
        assert data["removed"] == 1 and data["aligned"]["top"] is None
    assert not (set(tmp_path.iterdir()) - {aligned, plain, *tmp_path.glob("*.*")})


def test_what_is_merged_how_does_not_matter_to_the_line(tmp_path):
    """Other methods and shapes of a configuration give the same two ends."""
    want = measured(tmp_path, config("rotation_linear", MODELS), "--tokens", "256")
    base, other = map(str, MODELS)
    layers = [{"sources": [{"model": m, "layer_range": r} for m in (base, other)]} for r in
              ([0, 1], [1, 4])]  # fmt: skip
    saved = tmp_path / "saved.safetensors"
    shapes = [
        {"merge_method": "rotation_slerp", "base_model": base, "models": [{"model": other}],
         "parameters": {"t": [0.1, 0.9]}},
        {"merge_method": "rotation_linear", "slices": layers, "parameters": {"weight": 0.3}},
        {"merge_method": "rotation_align", "models": [{"model": other}],
         "parameters": {"align_reference": base}},
        {"method": "rotation_ties", "base_model": base, "tokenizer_source": "base",
         "models": [{"model": other, "parameters": {"weight": 1, "density": 0.2}}]},
    ]  # fmt: skip
    for shape in shapes:
        found = measured(tmp_path, {**shape, "dtype": "float32"}, "--tokens", "256")
        assert found["plain"] == want["plain"] and found["aligned"] == want["aligned"], shape
        assert (found["reference"], found["model"]) == (base, other)
    parameters = {"align_save": str(saved), "align_query_key": False}
    found = measured(
        tmp_path, config("rotation_linear", MODELS, parameters=parameters), "--tokens", "256"
    )
    assert not saved.exists() and found["plain"] == want["plain"]
    assert found["aligned"]["loss"][1] > want["aligned"]["loss"][1]


@pytest.mark.parametrize("dtype", ["bfloat16", None])
def test_ends_are_compared_in_the_precision_of_the_merge(dtype, tmp_path):
    given = {**config("rotation_linear", MODELS), "dtype": dtype}
    data = measured(tmp_path, given, "--tokens", "512")
    assert data["ends"]["same"]
    assert data["ends"]["bound"] > 4 * torch.finfo(torch.bfloat16).eps / 100
    assert abs(data["aligned"]["loss"][2] - data["plain"]["loss"][2]) < data["ends"]["bound"]


def save_words(folder, tokens):
    """Give a model a tokenizer that splits at spaces."""
    words = Tokenizer(WordLevel({t: row for row, t in enumerate(tokens)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


@pytest.mark.parametrize("case", ["gpt2", "qwen3_moe", "gemma3_vl"])
def test_families_whose_tensors_have_other_names_in_transformers(case, tmp_path):
    twins = Twins(case, tmp_path)
    tokens = [f"t{row}" for row in range(tiny.VOCABULARY)]
    for model in (twins.reference, *twins.others):
        save_words(model, tokens)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"t{k * k % tiny.VOCABULARY}" for k in range(100)))
    models = [twins.reference, twins.others[0]]
    data = measured(tmp_path, config("rotation_linear", models), text=text)
    assert data["ends"]["same"]
    ranges = [max(data[line]["loss"]) - min(data[line]["loss"]) for line in ("aligned", "plain")]
    assert ranges[0] < data["ends"]["bound"] < ranges[1] / 10


def test_maps_that_are_not_orthogonal_amplify_rounding(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(MODELS[0])
    other = protected(model, tmp_path / "other", condition=30.0)
    models = [MODELS[0], other]
    given = config("rotation_linear", models, parameters={"align_scale": True})
    assert measured(tmp_path, given, "--tokens", "256")["ends"]["same"]


def test_an_alignment_that_changes_the_function_is_warned_of(tmp_path, monkeypatch):
    read = barriers.Ends.tensors

    def damaged(ends, aligned):
        first, second = read(ends, aligned)
        if aligned:
            second["model.layers.1.mlp.down_proj.weight"] *= 1.01
        return first, second

    monkeypatch.setattr(barriers.Ends, "tensors", damaged)
    code, data, output = told(
        tmp_path, config("rotation_linear", MODELS), "--points", "3", "--tokens", "256"
    )
    assert code == 0 and not data["ends"]["same"]
    assert "warning: alignment changes the losses at the ends" in output


def test_a_pair_without_a_barrier_has_no_share(tmp_path):
    given = config("rotation_linear", [MODELS[0], *copies(tmp_path)])
    code, data, output = told(tmp_path, given, "--tokens", "256")
    assert code == 0 and data["removed"] is None and len(data["t"]) == 11
    assert len(set(data["plain"]["loss"])) == len(set(data["aligned"]["loss"])) == 1
    assert "no barrier stands between the two as they are" in output


def copies(folder):
    return [changed_copy(MODELS[0], folder / "copy", lambda state: state)]


def test_what_cannot_be_measured_is_said_in_one_sentence(tmp_path):
    short, binary = tmp_path / "short.txt", tmp_path / "text.bin"
    short.write_text("a few words")
    binary.write_bytes(b"\xff\xfe\xfa" * 1000)
    for case in ("bert", "t5", "llama"):
        tiny.save(tiny.build(case), tmp_path / case)
        tiny.save(tiny.build(case, seed=1), tmp_path / f"{case}-1")
    pair = config("rotation_linear", MODELS)
    base, other = map(str, MODELS)
    one = {"sources": [{"model": base, "layer_range": [0, 4]}]}
    both = {"sources": [{"model": m, "layer_range": [0, 3]} for m in (base, other)]}
    for configuration, word, *text in (
        (config("rotation_linear", [*MODELS, SEEDS[0]]), "names 3 models"),
        (config("rotation_linear", MODELS, parameters={"align_reference": str(SEEDS[0])}), "3 mod"),
        (config("rotation_linear", MODELS[:1]), "names 1 model ("),
        (config("linear", MODELS), "write rotation_linear to see"),
        (config("rotation_linaer", MODELS), "did you mean"),
        ({**pair, "parameters": {"align_heads": "yes"}}, "write true or false"),
        ("merge_method: [", "is no configuration of one merge"),
        ("just words", "is no configuration of a merge"),
        ({"merge_method": "rotation_linear", "slices": [both]}, "not the two models from the fir"),
        ({"merge_method": "rotation_passthrough", "slices": [one],
          "parameters": {"align_reference": other}}, "is none of its inputs"),
        (config("rotation_linear", [tmp_path / "bert", tmp_path / "bert-1"]), "does not predict"),
        (config("rotation_linear", [tmp_path / "t5", tmp_path / "t5-1"]), "does not predict"),
        (config("rotation_linear", [tmp_path / "llama", tmp_path / "llama-1"]), "its tokenizer"),
        (pair, "has 11 tokens, and 128 are needed", short),
        (pair, "cannot be read", binary),
        ({**pair, "models": [*pair["models"][:1], {"model": str(tmp_path / "no")}]}, "no such fol"),
    ):  # fmt: skip
        code, data, output = told(tmp_path, configuration, text=text[0] if text else CODE)
        assert code == 1 and data is None and word in output, output
        assert output.startswith("Error: ") and output.count("Error") == 1


def test_other_tokens_are_told_of(tmp_path):
    twins = Twins("llama", tmp_path)
    tokens = [f"t{row}" for row in range(tiny.VOCABULARY)]
    save_words(twins.reference, tokens)
    save_words(twins.others[0], [tokens[0], *reversed(tokens[1:])])
    text = tmp_path / "text.txt"
    text.write_text(" ".join(tokens[1:50]))
    models = [twins.reference, twins.others[0]]
    data = measured(tmp_path, config("rotation_linear", models), text=text)
    assert "its tokens differ from those of" in data["notes"][0]
    given = config("rotation_linear", models, tokenizer={"source": "union"})
    data = measured(tmp_path, given, text=text)
    assert not data["notes"] and data["ends"]["same"]


def test_what_is_not_aligned_is_told(tmp_path):
    given = config("rotation_linear", MODELS, parameters={"align_neurons": False})
    code, data, output = told(tmp_path, given, "--points", "3", "--tokens", "256")
    assert code == 0 and data["removed"] < 0.5
    assert data["notes"] == [
        *(f"{MODELS[1]}: default.{k} neurons not aligned: switched off" for k in range(3)),
        "and 1 more",
    ]
    assert "neurons not aligned: switched off" in output


def test_files_without_a_folder_are_refused_before_anything_is_read(tmp_path):
    for option in ("--json", "--plot"):
        given = ["barrier", str(CODE), "--text", str(CODE), option, str(tmp_path / "no" / "x.png")]
        result = CliRunner().invoke(main, given)
        assert result.exit_code == 2 and "there is no folder" in result.output


def test_time_and_memory_are_said_before(tmp_path, monkeypatch):
    class Little:
        available = 2**20

    monkeypatch.setattr(barriers.psutil, "virtual_memory", Little)
    file = write(config("rotation_linear", MODELS), tmp_path)
    given = ["barrier", str(file), "--text", str(CODE), "--points", "3", "--tokens", "256"]
    result = CliRunner().invoke(main, given)
    assert result.exit_code == 0
    said = [result.output.index(w) for w in ("GiB of memory are needed", "7 evaluations of 256")]
    assert said == sorted(said) and said[1] < result.output.index("aligned ")
    count, width, rows = 771200, 4, 128 * 256
    need = count * 3 * width + 3 * width * max(barriers._LOGITS, rows)
    assert f"about {need / 2**30:.3g} GiB of memory" in result.output


# -- numbers and pictures -------------------------------------------------------------------------


def test_a_barrier_is_what_lies_above_the_line_between_the_ends():
    line = Line([0, 0.25, 0.5, 1], [2.0, 3.0, 2.5, 1.0])
    assert line.barrier == pytest.approx(1.25) and line.top == 0.25
    low = Line([0, 0.5, 1], [2.0, 1.0, 1.0])
    assert low.barrier == 0 and low.top is None
    found = Barrier(("a", "b"), "t", 1, line, Line(line.points, [2, 2, 2, 1]), 0.0, 1e-6, 1.0)
    assert found.removed == pytest.approx(1 - 0.5 / 1.25)
    assert found.data()["aligned"]["barrier"] == pytest.approx(0.5)
    assert replace(found, bound=2.0).removed is None
    assert replace(found, bound=2.0, tokens=100).removed == found.removed


@pytest.mark.parametrize("t", [0.0, 1.0, 0.3])
def test_ends_of_the_interpolation_are_exact(t):
    generator = torch.Generator().manual_seed(0)
    first, second = ({"x": torch.randn(50, generator=generator)} for _ in range(2))
    between = barriers.between(first, second, t)["x"]
    if t in (0.0, 1.0):
        assert torch.equal(between, (first, second)[int(t)]["x"])
    exact = (1 - t) * first["x"].double() + t * second["x"].double()
    size = first["x"].abs() + second["x"].abs()
    assert bool(((between - exact).abs() <= 2 * torch.finfo(torch.float32).eps * size).all())


def drawn(points, names=("models/base", "models/other")):
    t = [k / (points - 1) for k in range(points)]
    plain = [1.2 + 8 * x * (1 - x) + 0.2 * x for x in t]
    aligned = [1.2 + 0.4 * x * (1 - x) + 0.2 * x for x in t]
    lines = [Line(t, loss) for loss in (plain, aligned)]
    return Barrier(names, "text", 4064, *lines, 1e-6, 1e-5, 1.0).data()


@pytest.mark.parametrize("points", [3, 11, 101])
@pytest.mark.parametrize("names", [("base", "other"), ("x/" + "a" * 60, "x/" + "b" * 60)])
def test_the_picture_is_labelled_and_nothing_overlaps(points, names, tmp_path, monkeypatch):
    boxes, draw = {}, Text.draw

    def recorded(text, renderer):
        if text.get_text() and text.get_visible():
            boxes[text] = text.get_window_extent(renderer)
        draw(text, renderer)

    figures = []
    monkeypatch.setattr(Text, "draw", recorded)
    monkeypatch.setattr(Figure, "savefig", lambda figure, file: figures.append(figure))
    plot_barrier(drawn(points, names), tmp_path / "x.png")
    FigureCanvasAgg(figures[0]).draw()
    canvas = figures[0].bbox.padded(1)
    for text, box in boxes.items():
        assert canvas.contains(box.x0, box.y0) and canvas.contains(box.x1, box.y1), text
    for (first, a), (second, b) in itertools.combinations(boxes.items(), 2):
        assert not a.padded(-1).overlaps(b.padded(-1)), (first, second)
    (axes,) = figures[0].axes
    assert [len(line.get_xdata()) for line in axes.lines] == [points, points, 2]
    shown = " ".join(text.get_text() for text in boxes)
    for label in (
        "nats per token",
        "95% of the barrier removed",
        "plain, barrier 2",
        "aligned, ba",
    ):
        assert label in shown, label


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_command_draws(suffix, tmp_path):
    file = tmp_path / f"picture.{suffix}"
    measured(tmp_path, config("rotation_linear", MODELS), "--tokens", "256", "--plot", str(file))
    assert file.read_bytes()[:5] == (b"\x89PNG\r" if suffix == "png" else b"<?xml")
    if suffix == "svg":
        assert "From model to finetune-rotated" in file.read_text(encoding="utf-8")


def test_the_layout_of_the_json_is_what_the_help_says(tmp_path):
    data = measured(tmp_path, yaml.safe_dump(config("rotation_linear", MODELS)), "--tokens", "256")
    words = " ".join(CliRunner().invoke(main, ["barrier", "--help"]).output.split())
    words = words[words.index("The JSON has") : words.index("Options:")]
    for key in (*data, *data["plain"], *data["ends"]):
        assert key in words, key
