"""``mergekit-rotation check-architecture``: what holds is found to hold, and what does not, not."""

import json
from importlib.resources import files

import pytest
import transformers
from click.testing import CliRunner

import tiny
from mergekit_rotation.architecture import Family, all_families
from mergekit_rotation.cli import main
from mergekit_rotation.proof import check_family, models

DATA = {family.family: family for family in all_families()}
#: of these all classes are checked, of the others one: `test_families` proves all of them
RUN = ["bert", "cohere2", "falcon_alibi", "gemma3", "gpt2", "llama", "mixtral", "phi"]
#: whose code is part of transformers
BUILT = [family.family for family in all_families() if family.checked == "run"]
#: what nobody sees: softmax takes no notice of a shift of all keys
UNSEEN = ("key.bias", "k_lin.bias", "k_proj.bias", ".k.bias", "pos_key_proj.bias")
FOLDER = files("mergekit_rotation.architecture") / "data"


@pytest.fixture(autouse=True)
def quiet():
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


def data(name):
    """Our declaration of a family, for changing it."""
    return json.loads((FOLDER / f"{name}.json").read_text("utf-8"))


def only(declaration, *classes):
    """Check a changed declaration, on one class unless others are named."""
    model_type, names = next(iter(declaration["models"].items()))
    declaration["models"] = {model_type: list(classes) or names[:1]}
    return list(check_family(Family.model_validate(declaration)))


def fails(report):
    return {row.what for row in report.rows if not row.holds}


# -- what holds -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUN)
def test_our_own_declarations_hold(name):
    reports = list(check_family(DATA[name]))
    for report in reports:
        assert report.holds, "\n".join(report.lines())
        assert all(idle.endswith(UNSEEN) for idle in report.idle)
    skipped = {report.title for report in reports if not report.rows}
    assert skipped <= {"LLaMaForCausalLM"}
    seen = {row.what for report in reports for row in report.rows}
    assert {"values and output", "neurons", "stream: permutation", "all of these"} <= seen
    assert ("stream: orthogonal" in seen) == ("orthogonal" in DATA[name].stream.maps)
    assert ("experts" in seen) == (DATA[name].experts is not None)


@pytest.mark.parametrize("name", sorted(set(BUILT) - set(RUN)))
def test_small_models_of_every_file_can_be_built_and_hold(name):
    for report in only(data(name)):
        assert report.rows, "\n".join(report.lines())
        assert report.holds, "\n".join(report.lines())
        assert all(idle.endswith(UNSEEN) for idle in report.idle)
        every = {**DATA[name].block_tensors(), **DATA[name].stream.tensors}
        assert not set(report.absent) & set(every), "layers of all kinds"  # optional ones end in ?


def test_alternatives_are_models_of_their_own():
    titles = [report.title for report in check_family(DATA["glm4_moe"])]
    assert [title.split("(")[1] for title in titles] == [
        "use_qk_norm: true)",
        "use_qk_norm: false)",
    ]


# -- what does not --------------------------------------------------------------------------------


def test_a_group_that_is_too_large():
    wrong = data("qwen3")
    wrong["attention"]["query_key"]["group"] = "rotary"
    (report,) = only(wrong)
    assert fails(report) == {"queries and keys", "all of these"}
    assert any("DOES NOT HOLD" in line for line in report.lines())


def test_the_other_pairing():
    wrong = data("llama")
    wrong["attention"]["query_key"]["pairing"] = "interleaved"
    (report,) = only(wrong)
    assert fails(report) == {"queries and keys", "all of these", "scale: queries, keys"}


def test_a_leg_that_is_left_out():
    wrong = data("llama")
    name = "model.layers.${layer_index}.self_attn.v_proj.bias?"
    wrong["stream"]["tensors"][name] = "n"
    del wrong["attention"]["tensors"][name], wrong["attention"]["folded"]
    (report,) = only(wrong)
    assert fails(report) == {
        "order of heads",
        "values and output",
        "all of these",
        "scale: values, output",
    }


def test_a_sign_that_is_left_out():
    wrong = data("llama")
    wrong["neurons"]["tensors"]["model.layers.${layer_index}.mlp.down_proj.weight"] = "~e f^-1"
    (report,) = only(wrong)
    assert fails(report) == {"neurons", "all of these"}


@pytest.mark.parametrize(
    ("name", "right", "wrong", "row"),
    [
        ("llama", "~e ~f^-1", "~e ~f", "scale: neurons"),
        ("arcee", "~e f^-2", "~e f^-1", "scale: neurons"),
        ("llama", "(kv qk^-1) ~e", "(kv qk) ~e", "scale: queries, keys"),
        ("llama", "~e (kv g vo^-1)", "~e (kv g vo)", "scale: values, output"),
    ],
)
def test_an_exponent_that_is_wrong(name, right, wrong, row):
    text = json.dumps(data(name))
    assert right in text
    (report,) = only(json.loads(text.replace(right, wrong)))
    # How the bias of values is folded is read off the same exponents.
    assert fails(report) - {"free biases"} == {row}


def test_biases_that_are_not_free():
    """Weights of a softmax with sinks do not add up to one."""
    wrong = data("gpt_oss")
    attention = "model.layers.${layer_index}.self_attn."
    wrong["attention"]["folded"] = {attention + "v_proj.bias": attention + "o_proj.bias"}
    (report,) = only(wrong)
    assert fails(report) == {"free biases"}
    wrong["attention"]["folded"] = {"v_proj.bias": attention + "o_proj.bias"}
    with pytest.raises(ValueError, match="are no tensors"):
        Family.model_validate(wrong)


def test_experts_of_a_router_with_groups():
    wrong = data("glm4_moe")
    wrong["experts"]["groups"] = []
    for report in only(wrong):
        assert "experts" in fails(report)


def test_rotations_behind_norms_after_a_branch():
    wrong = data("gemma2")
    wrong["stream"]["maps"].append("orthogonal")
    wrong["stream"]["tensors"] = {
        name: text.replace("e", "~e") if text == "e" else text
        for name, text in wrong["stream"]["tensors"].items()
    }
    tied, untied = only(wrong)
    assert "stream: orthogonal" not in {row.what for row in tied.rows}
    assert "stream: orthogonal" in fails(untied)


def test_a_writer_of_the_stream_that_is_left_out():
    wrong = data("phi")
    del wrong["stream"]["tensors"]["model.layers.${layer_index}.self_attn.dense.bias?"]
    (report,) = only(wrong)
    assert fails(report) == {"stream: permutation", "stream: orthogonal"}
    assert report.unmentioned == ("model.layers.*.self_attn.dense.bias (2 layers)",)


def test_tensors_that_the_file_does_not_mention():
    wrong = data("qwen3")
    wrong["stream"]["fixed"] = []
    (report,) = only(wrong)
    assert not fails(report) and not report.holds
    assert report.unmentioned == (
        "model.layers.*.self_attn.q_norm.weight (2 layers)",
        "model.layers.*.self_attn.k_norm.weight (2 layers)",
    )


def test_tensors_on_which_nothing_acts():
    """Leaving them out cannot show, so that nothing is proven of them."""
    wrong = data("llama")
    wrong["attention"] |= {"heads": False, "query_key": [], "value_output": {"group": "none"}}
    (report,) = only(wrong)
    assert not fails(report) and not report.holds
    assert {name.split(".")[4] for name in report.unseen} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }


# -- what cannot be checked -----------------------------------------------------------------------


def test_a_tensor_of_another_shape():
    wrong = data("llama")
    wrong["sizes"]["vo"] = ["e"]
    (report,) = only(wrong)
    assert "self_attn.v_proj" in report.trouble and "'(kv vo^1)" in report.trouble
    assert not report.holds


def test_a_stream_of_another_width():
    wrong = data("llama")
    wrong["stream"]["tensors"]["lm_head.weight?"] = "~e v"
    (report,) = only(wrong)
    assert report.trouble.startswith("lm_head.weight: shape (67, 64)")


def test_a_misspelt_tensor():
    wrong = json.loads(json.dumps(data("llama")).replace("q_proj.weight", "q_porj.weight"))
    (report,) = only(wrong)
    assert "q_porj.weight: layer 0 of the model has no such tensor" in report.trouble


def test_a_norm_that_the_model_does_not_have():
    wrong = json.loads(json.dumps(data("llama")).replace("input_layernorm", "input_layer_norm"))
    (report,) = only(wrong)
    assert "input_layer_norm.weight: the model has no such norm" in report.trouble


def test_models_that_read_something_else_and_classes_that_are_not_there():
    other = data("llama")
    other["models"] = {"wav2vec2": ["Wav2Vec2ForCTC", "Wav2Vec2ForNothing"]}
    sounds, nothing = check_family(Family.model_validate(other))
    assert sounds.skipped == (
        "it reads input_values, and only models of tokens, images and spectrograms can be checked"
    )
    assert nothing.skipped == "transformers has no class of this name"
    assert not sounds.rows and not nothing.rows


def test_entries_that_transformers_does_not_take():
    wrong = data("llama")
    wrong["example"] = {"num_hidden_layers": "two"}
    (report,) = only(wrong)
    assert 'write entries that fit under "example"' in report.trouble


def test_conditions_that_no_small_model_fulfils():
    wrong = data("llama")
    wrong["attention"]["query_key"]["when"] = {"rope_parameters.rope_type": ["yarn"]}
    (report,) = only(wrong)
    assert 'the conditions "when" rope_parameters.rope_type: "yarn" do not hold' in report.trouble


def test_sizes_that_contradict_each_other():
    wrong = data("llama")
    wrong["attention"]["query_key"]["rotary_dims"] = ["kv / 2"]
    (report,) = only(wrong)
    assert report.trouble == "1 rotary dimensions in a head of 32"


def test_a_model_that_does_not_run():
    wrong = data("llama")
    wrong["example"] = {"pad_token_id": 5, "num_key_value_heads": 3}
    (report,) = only(wrong)
    assert report.trouble == "heads / kv: 4 is not a multiple of 3"
    wrong["example"] = {"hidden_act": "nothing"}
    (report,) = only(wrong)
    assert report.trouble.startswith("transformers cannot build it")


# -- a user's own configuration -------------------------------------------------------------------


def saved(config, folder, name):
    config.architectures = [name]
    config.save_pretrained(folder)
    return folder


def test_a_model_is_its_config_with_few_layers(tmp_path):
    config = transformers.Gemma3TextConfig(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    folder = saved(config, tmp_path, "Gemma3ForCausalLM")
    name, short = models.read_config(folder, DATA["gemma3"])
    assert (name, short.num_hidden_layers, short.hidden_size) == ("Gemma3ForCausalLM", 2, 48)
    (report,) = check_family(DATA["gemma3"], folder)
    assert report.holds
    assert any("bias" in template for template in report.absent)


@pytest.mark.parametrize(
    ("case", "overrides", "layers"),
    [
        ("cohere2", {"layer_types": [*["sliding_attention"] * 3, *["full_attention"] * 3]}, 4),
        ("glm4_moe", {"first_k_dense_replace": 3}, 4),
        ("llama", {}, 2),
        ("t5", {"num_decoder_layers": 5}, 2),
    ],
)
def test_a_layer_of_each_kind_is_kept(case, overrides, layers, tmp_path):
    config = tiny.build(case, num_hidden_layers=6, **overrides).config
    folder = saved(config, tmp_path, tiny.FAMILIES[case].model_class.__name__)
    _, short = models.read_config(folder, DATA[case])
    assert {getattr(short, depth) for depth in DATA[case].layers.values()} == {layers}


@pytest.mark.parametrize("case", ["gemma3_vl", "llama4_vl", "qwen2_vl", "whisper", "vit"])
def test_models_of_several_parts_and_of_other_inputs(case, tmp_path):
    config = tiny.build(case).config
    folder = saved(config, tmp_path, tiny.FAMILIES[case].model_class.__name__)
    (report,) = check_family(DATA[case], folder)
    assert report.rows and report.holds, "\n".join(report.lines())


def test_a_model_that_does_not_fit(tmp_path, monkeypatch):
    folder = saved(tiny.build("llama").config, tmp_path, "LlamaForCausalLM")
    monkeypatch.setattr(models, "_memory", lambda: 1 << 20)
    (report,) = check_family(DATA["llama"], folder)
    assert "a model of 2 layers takes 0 GiB" in report.trouble
    assert "without MODEL" in report.trouble


def test_an_example_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(models, "_memory", lambda: 1 << 30)
    wrong = data("gemma3_vl")
    del wrong["example"]["vision_config"]
    (report,) = only(wrong)
    assert 'entries under "example"' in report.trouble


@pytest.mark.parametrize(
    ("case", "message"), [("qwen2", "does not declare Qwen2ForCausalLM"), (None, "cannot read its")]
)
def test_another_model(case, message, tmp_path):
    if case:
        saved(tiny.build(case).config, tmp_path, tiny.FAMILIES[case].model_class.__name__)
    (report,) = check_family(DATA["llama"], tmp_path)
    assert message in report.trouble and str(tmp_path) in report.trouble


# -- the command ----------------------------------------------------------------------------------


def run(*arguments):
    return CliRunner().invoke(main, ["check-architecture", *map(str, arguments)])


def test_the_command_says_what_holds_and_exits_with_0():
    result = run(FOLDER / "qwen2.json")
    assert result.exit_code == 0
    assert "DOES NOT HOLD" not in result.output
    assert result.output.endswith("All that was checked holds, on 1 model.\n")


def test_the_command_exits_with_1_where_something_does_not_hold(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(data("qwen3")).replace("rotary_sign", "rotary"))
    result = run(file)
    assert result.exit_code == 1
    assert "DOES NOT HOLD" in result.output and result.output.endswith("Not proven.\n")


def test_the_command_exits_with_1_where_nothing_could_be_checked():
    result = run(FOLDER / "baichuan.json")
    assert result.exit_code == 1
    assert (
        "BaichuanForCausalLM: transformers has no class of this name; not checked" in result.output
    )


def test_the_command_refuses_a_bad_file_in_one_sentence(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text("{}")
    result = run(file)
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: {file}: family: Field required; ")
    assert "\n" not in result.output.rstrip()
    assert run(tmp_path / "nowhere.json").output.startswith("Error: cannot read ")
