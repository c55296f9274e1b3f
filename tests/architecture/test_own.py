"""A user's own declarations: where they are found, and what is refused."""

import json
import os
from importlib.resources import files

import pytest

import tiny
from mergekit_rotation.architecture import (
    VARIABLE,
    DeclarationError,
    all_families,
    find_family,
    own_families,
    read_families,
    read_family,
)

LLAMA = (files("mergekit_rotation.architecture") / "data" / "llama.json").read_text("utf-8")


def written(file, **changes):
    """Write our declaration of Llama with some entries changed."""
    file.write_text(json.dumps({**json.loads(LLAMA), **changes}), encoding="utf-8")
    return file


def test_a_file_of_ours_is_a_declaration(tmp_path):
    family = read_family(written(tmp_path / "mine.json", family="mine"))
    assert family.family == "mine"
    assert family.attention == next(f for f in all_families() if f.family == "llama").attention


def test_own_families_come_first_for_the_classes_that_they_name(tmp_path):
    own = read_family(written(tmp_path / "mine.json", models={"llama": ["LlamaForCausalLM"]}))
    families = (own, *all_families())
    config = tiny.build("llama").config
    assert find_family(config, "LlamaForCausalLM", families) is own
    other = find_family(config, "LlamaForSequenceClassification", families)
    assert other is find_family(config, "LlamaForSequenceClassification") is not own


def test_files_and_folders_in_order(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    b, a = (written(folder / f"{name}.json", family=name) for name in "ba")
    c = written(tmp_path / "c.json", family="c")
    (folder / "notes.txt").write_text("nothing")
    listed = os.pathsep.join(["", str(folder), str(c), ""])
    assert list(own_families(None, {VARIABLE: listed})) == [a, b, c]
    assert list(own_families(str(c), {VARIABLE: listed})) == [c, a, b]
    assert list(own_families(str(folder), {})) == [a, b]
    assert own_families(None, {}) == own_families(None, {VARIABLE: ""}) == {}


def test_the_environment_is_read_each_time(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(written(tmp_path / "mine.json")))
    assert len(own_families(None)) == 1
    monkeypatch.delenv(VARIABLE)
    assert own_families(None) == {}


def without(key):
    data = json.loads(LLAMA)
    del data[key]
    return data


def attention(**changes):
    data = json.loads(LLAMA)
    return {**data, "attention": {**data["attention"], **changes}}


def stream(**changes):
    data = json.loads(LLAMA)
    return {**data, "stream": {**data["stream"], **changes}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", "Invalid JSON"),
        (without("family"), "family: Field required"),
        ({**json.loads(LLAMA), "attension": {}}, "attension: Extra inputs are not permitted"),
        (attention(value_output={"group": "O"}), "attention.0.value_output.group: Input should be"),
        (attention(tensors={"q": "(kv g qk"}, folded={}), "cannot read axis pattern"),
        (
            attention(tensors={"q": "(kv h qk) ~e"}, folded={}),
            "q: sizes of axes ['h'] are missing",
        ),
        (attention(shifted=["k_porj"]), "shifted or folded ['k_porj'] are no tensors"),
        (stream(tensors={"x": "v ~e ~e"}), "names an axis twice"),
        (stream(norms={"n": ["q_porj"]}), "n: its readers ['q_porj'] are no tensors"),
        ({**json.loads(LLAMA), "size_names": {}}, "size_names of axes"),
    ],
)
def test_a_bad_declaration_names_file_and_field(data, message, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    with pytest.raises(DeclarationError) as caught:
        own_families(str(file), {})
    assert str(caught.value).startswith(f"align_architecture: {file}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(DeclarationError, match=f"^{VARIABLE}: "):
        own_families(None, {VARIABLE: str(file)})


def test_missing_files_and_empty_folders(tmp_path):
    with pytest.raises(DeclarationError, match=r"cannot read .*nowhere\.json"):
        read_families(str(tmp_path / "nowhere.json"))
    with pytest.raises(DeclarationError, match=r"holds no \.json file"):
        read_families(str(tmp_path))
