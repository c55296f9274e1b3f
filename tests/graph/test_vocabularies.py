"""Every way to bring vocabularies together, with every map of the residual stream."""

import json

import pytest
import torch

import scramble
import scramble_stream
import tiny
from mergekit_rotation.graph import run
from merging import changed_copy, config, merge, merged, save_tokenizer, weights

KINDS = ["none", "permutation", "orthogonal"]
ROWS = ("model.embed_tokens.weight", "lm_head.weight")

FORMS = {
    "union": {"tokenizer_source": "union"},
    "base": {"tokenizer_source": "base"},
    "a model's": {"tokenizer": {"source": "OTHER"}},
    "padded": {"tokenizer": {"source": "union", "pad_to_multiple_of": 16}},
    "by token": {
        "tokenizer": {
            "source": "union",
            "tokens": {
                "t5": {"source": "OTHER", "force": True},
                "t6": {"source": {"kind": "model_token", "model": "OTHER", "token": "t7"}},
                "x": {"source": {"kind": "zero"}},
            },
        },
    },
    "truncated": {},
}


class Vocabularies:
    """A model, and one that has its tokens in another order and one more.

    ``same`` is in the coordinates of the reference, ``other`` in coordinates of its own. Both
    models may have spare rows at the end, for which there are no tokens.
    """

    def __init__(self, folder, kind, tied, spare=0):
        self.model = tiny.build("llama", tie_word_embeddings=tied)
        self.reference = folder / "reference"
        tiny.save(self.model, self.reference)
        generator = torch.Generator().manual_seed(1)
        tokens = tiny.VOCABULARY - spare
        order = torch.randperm(tokens, generator=generator)
        new = 0.3 * torch.randn(1, tiny.HIDDEN, generator=generator)

        def more(state):
            some = {name: state[name] for name in ROWS if name in state}
            rows = {name: torch.cat([x[order], new, x[tokens:]]) for name, x in some.items()}
            return {**state, **rows}

        def moved(state):
            state = more(state)
            if kind != "none":
                state = scramble_stream.scramble_stream(
                    state, self.model.config, "llama", kind, seed=5
                )
            return scramble.scramble(state, self.model.config, "llama", seed=6)

        self.same = changed_copy(self.reference, folder / "same", more)
        self.other = changed_copy(self.reference, folder / "other", moved)
        save_tokenizer(self.reference, [f"t{k}" for k in range(tokens)])
        for model in (self.same, self.other):
            save_tokenizer(model, [*(f"t{int(k)}" for k in order), "x"])
            entries = {"vocab_size": tiny.VOCABULARY + 1}
            if kind == "orthogonal" and model == self.other:
                entries["tie_word_embeddings"] = False
            settings = json.loads((model / "config.json").read_text())
            (model / "config.json").write_text(json.dumps(settings | entries))

    def config(self, method, other, form, **parameters):
        """Return a merge of the reference with another model."""
        more = json.loads(json.dumps(FORMS[form]).replace("OTHER", str(other)))
        both = [self.reference, other]
        # Without a base, mergekit takes config and tokenizer from any of its models.
        more["base_model"] = str(self.reference)
        return config(method, both, parameters=parameters, **more)

    def outputs(self, folder, tokens):
        """Return the outputs for inputs of the first tokens."""
        loaded = type(self.model).from_pretrained(folder, attn_implementation="eager").eval()
        given = tiny.inputs("llama")
        return tiny.outputs(loaded, {**given, "input_ids": given["input_ids"] % tokens})


@pytest.fixture(scope="module", params=[(k, t) for k in KINDS for t in (True, False)], ids=str)
def models(request, tmp_path_factory):
    kind, tied = request.param
    return kind, tied, Vocabularies(tmp_path_factory.mktemp("models"), kind, tied)


@pytest.mark.parametrize("form", FORMS)
def test_vocabularies_meet_as_without_the_prefix(form, models, tmp_path):
    assert_as_without_the_prefix(form, *models, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_spare_rows_go_where_mergekit_lets_them_go(kind, tmp_path):
    given = Vocabularies(tmp_path, kind, tied=False, spare=9)
    for form in ("base", "padded"):
        folder = tmp_path / form
        folder.mkdir()
        assert_as_without_the_prefix(form, kind, False, given, folder)


def assert_as_without_the_prefix(form, kind, tied, given, folder):
    """The merge with a model in other coordinates is the plain one with it in the reference's."""
    options = ("--unsafe-truncate-embeddings",) if form == "truncated" else ()
    plain = merged(given.config("linear", given.same, form), folder / "plain", *options)
    raw = given.config("rotation_linear", given.other, form, align_residual=kind)
    ours = merged(raw, folder / "ours", *options)

    untied = tied and kind == "orthogonal"
    expected, found = weights(plain), weights(ours)
    assert set(found) == set(expected) | ({"lm_head.weight"} if untied else set())
    assert all(found[name].shape == x.shape for name, x in expected.items())
    configs = [json.loads((out / "config.json").read_text()) for out in (plain, ours)]
    assert configs[1] == configs[0] | ({"tie_word_embeddings": False} if untied else {})
    assert len(found[ROWS[0]]) == configs[1]["vocab_size"] or form == "truncated"
    for file in plain.glob("*token*"):
        assert (ours / file.name).read_bytes() == file.read_bytes()
    tokens = len(expected[ROWS[0]])
    assert (given.outputs(ours, tokens) - given.outputs(plain, tokens)).abs().max() < 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_vocabularies_of_different_size_need_a_tokenizer(kind, tmp_path, monkeypatch):
    """mergekit's hint, but before anything is solved or written."""
    given = Vocabularies(tmp_path, kind, tied=False)
    monkeypatch.setattr(run.Run, "record", lambda *_: pytest.fail("something was solved"))
    raw = given.config("rotation_linear", given.other, "truncated", align_residual=kind)
    result = merge(raw, tmp_path / "out")
    assert result.exit_code == 1
    assert "has 68 rows, but 67 in" in result.output
    assert "for example with tokenizer: {source: base}" in result.output
    assert not (tmp_path / "out").exists()
