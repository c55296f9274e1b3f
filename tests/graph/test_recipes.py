"""Every recipe of `recipes` beside its plain counterpart: the same file without the prefix.

The recipes name models as a user would and are meant for models of 32 or 40 layers; here they run
on models of `LAYERS` layers, and every layer number shrinks in the same proportion. mergekit
accepts all of them without the prefix.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from mergekit.scripts import multimerge, run_yaml

import tiny
from merging import QUIET, Twins, planned, save_adapter, save_tokenizer, weights

RECIPES = Path(__file__).parents[2] / "recipes"
LAYERS = 4
WEIGHTS = {".safetensors", ".bin"}

#: what people write with mergekit, and our recipes of that shape
SHAPES = {
    "linear, three weights": ("linear",),
    "slerp with gradients by filter, slices": ("slerp-gradient",),
    "slerp, models": ("slerp-chat-template", "slerp-one-model"),
    "ties with gradients and filters": ("ties",),
    "dare_ties": ("dare-ties", "dare-ties-gradient"),
    "task_arithmetic": ("task-arithmetic", "chat-vector"),
    "model_stock": ("model-stock",),
    "nuslerp": ("nuslerp", "nuslerp-task-vectors"),
    "della": ("della", "della-linear"),
    "della_linear, modules": ("della-linear-modules",),
    "karcher": ("karcher",),
    "arcee_fusion with parameters of other methods": ("arcee-fusion",),
    "several merges in one file": ("multi-frankenmerge", "multi-karcher", "multi-model-stock"),
    "modules of a vision model": ("vision",),
    "frankenmerge": ("frankenmerge", "frankenmerge-scaled"),
    "adapters": ("lora",),
    "less common methods": (
        "breadcrumbs",
        "breadcrumbs-ties",
        "multislerp",
        "nearswap",
        "ram",
        "ramplus-tl",
        "sce",
    ),
}
#: recipes about other things than the shapes of configurations
OTHERS = {"independent", "independent-local", "quickstart", "quickstart-plain"}
TEXTS = {name: (RECIPES / f"{name}.yml").read_text() for names in SHAPES.values() for name in names}
MODELS = sorted(set(re.findall(r"\./models/([\w-]+)", "".join(TEXTS.values()))))

COUNTED = [
    pytest.param(name, id=name, marks=pytest.mark.tally("recipe shapes", case=shape))
    for shape, names in SHAPES.items()
    for name in names
]


class Zoo:
    """The models that the recipes name: copies of one model, and twins in other coordinates."""

    def __init__(self, folder):
        vision = tiny.FAMILIES["mistral3"].config["text_config"] | {"num_hidden_layers": LAYERS}
        self.kinds = {
            False: Twins("llama", folder / "language", count=0, num_hidden_layers=LAYERS),
            True: Twins("mistral3", folder / "vision", count=0, text_config=vision),
        }
        for kind in self.kinds.values():
            save_tokenizer(kind.reference, [f"t{i}" for i in range(tiny.VOCABULARY)])
        self.copies, self.twins = folder / "copies", folder / "twins"
        for seed, name in enumerate(MODELS):
            kind = self.kinds[name.startswith("vision")]
            for models in (self.copies, self.twins):
                if name.startswith("adapter"):
                    save_adapter(kind.model, models / name, learnt=False)
                elif models is self.copies:
                    shutil.copytree(kind.reference, models / name)
                else:
                    kind.twin(models / name, seed)
                    save_tokenizer(models / name, [f"t{i}" for i in range(tiny.VOCABULARY)])


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    return Zoo(tmp_path_factory.mktemp("zoo"))


def scaled(text):
    """Return a recipe for models of `LAYERS` layers; its largest layer number is its depth."""
    ranges = re.findall(r"layer_range: \[(\d+), (\d+)\]", text)
    depth = max((int(end) for _, end in ranges), default=LAYERS)

    def shrunk(match):
        numbers = [int(number) * LAYERS / depth for number in match.groups()]
        assert all(number.is_integer() for number in numbers), match.group()
        return "layer_range: [{:.0f}, {:.0f}]".format(*numbers)

    return re.sub(r"layer_range: \[(\d+), (\d+)\]", shrunk, text)


def run(name, models, out, prefix=True, dtype=None, more=""):
    """Run a recipe, or its plain counterpart, through mergekit's command."""
    text = scaled(TEXTS[name]).replace("./models", str(models)) + more
    text = text if prefix else text.replace("rotation_", "")
    text = text if dtype is None else re.sub(r"dtype: \w+", f"dtype: {dtype}", text)
    file = out.with_suffix(".yml")
    file.write_text(text)
    options = [*QUIET, "--copy-tokenizer", "--random-seed", "7", "--clone-tensors"]
    options += ["--lora-merge-cache", str(out.with_suffix(".adapters"))]
    if "\n---\n" in text:
        more = ["--intermediate-dir", str(out.with_suffix(".stages")), "--out-path", str(out)]
        result = CliRunner().invoke(multimerge.main, [str(file), *more, *options])
    else:
        result = CliRunner().invoke(run_yaml.main, [str(file), str(out), *options])
    if result.exception is not None:
        raise result.exception
    return out


def plan_of(name, models, folder):
    """Return what `plan` says of a recipe whose adapters are not merged yet."""
    text = scaled(TEXTS[name]).replace("./models", str(models))
    options = ("--json", str(folder / "plan.json"), "--lora-merge-cache", str(folder / "none"))
    result = planned(text, folder / "planned", *options)
    assert result.exit_code == 0, result.output
    return json.loads((folder / "plan.json").read_text())


def outputs(kind, folder):
    loaded = type(kind.model).from_pretrained(folder, attn_implementation="eager").eval()
    return tiny.outputs(loaded, kind.inputs)


def other_files(folder):
    """Return what lies beside the weights."""
    files = (file for file in folder.iterdir() if file.suffix not in WEIGHTS)
    return {file.name: file.read_bytes() for file in files}


@pytest.mark.parametrize("name", COUNTED)
def test_recipe(name, zoo, tmp_path, at_a_pace):
    """Copies merge bitwise as without the prefix; twins merge to the function of the copies."""
    plain = run(name, zoo.copies, tmp_path / "plain", prefix=False)
    ours = run(name, zoo.copies, tmp_path / "ours")
    files = other_files(plain)
    assert {name: other_files(ours).get(name) for name in files} == files
    assert {"config.json", "tokenizer.json"} <= set(files)
    expected, found = weights(plain), weights(ours)
    if not name.startswith("multi-"):
        foreseen = plan_of(name, zoo.copies, tmp_path)
        assert foreseen["disk"]["output"] == sum(x.nbytes for x in found.values())
    assert list(found) == list(expected)
    for tensor, x in expected.items():
        assert found[tensor].dtype == x.dtype and torch.equal(found[tensor], x), tensor

    kind = zoo.kinds["models/vision" in TEXTS[name]]
    loaded = type(kind.model).from_pretrained(ours, dtype="float32").eval()
    prompt = {key: value[:1] for key, value in kind.inputs.items()}
    grown = loaded.generate(**prompt, max_new_tokens=1, min_new_tokens=1)
    assert grown.shape[1] == prompt["input_ids"].shape[1] + 1

    exact, back, broken = (
        outputs(kind, run(name, models, tmp_path / out, prefix, "float32"))
        for models, out, prefix in (
            (zoo.copies, "exact", False),
            (zoo.twins, "back", True),
            (zoo.twins, "broken", False),
        )
    )
    assert (back - exact).abs().max() < 1e-3
    if name in SHAPES["frankenmerge"]:  # nothing is averaged, so no coordinates have to agree
        assert torch.equal(back, broken)
    else:
        assert (broken - exact).abs().max() > 0.05


def test_a_key_in_the_wrong_place_is_ignored_as_mergekit_does(zoo, tmp_path):
    """A frequent mistake: ``normalize`` beside ``parameters:`` in place of under it."""
    found = [
        run("linear", zoo.twins, tmp_path / str(k), more=more)
        for k, more in enumerate(("", "normalize: false\n"))
    ]
    first, second = (weights(out) for out in found)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_every_recipe_has_a_shape():
    assert {file.stem for file in RECIPES.glob("*.yml")} == set(TEXTS) | OTHERS
    assert len(SHAPES) == 17
