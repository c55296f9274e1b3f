"""The test support itself: tiny models are exact and reproducible, scrambling changes nothing."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergekit_rotation.architecture import find_family
from mergekit_rotation.proof import tolerance
from scramble import NAMES, PARTS, Sizes, parts_of, scramble, wrong
from tiny import FAMILIES, LAYERS, build, exact_outputs, inputs, outputs, save

EXACT = 1e-10
DIFFERENT = 1e-3

DOUBLE = torch.float64


def float64_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of a model in float64."""
    return {
        name: tensor.to(DOUBLE) if tensor.is_floating_point() else tensor
        for name, tensor in model.state_dict().items()
    }


SCRAMBLED = {name: case for name, case in FAMILIES.items() if case.family in NAMES}


@pytest.mark.parametrize(
    ("case", "biases"),
    [(case, False) for case in SCRAMBLED] + [(c, True) for c, e in SCRAMBLED.items() if e.biases],
)
def test_scramble_keeps_the_function(case: str, biases: bool) -> None:
    """All parts together and each alone leave the outputs; every mistake changes them."""
    entry = FAMILIES[case]
    model, ids = build(case, biases=biases), inputs(case)
    source = float64_state(model)
    expected = exact_outputs(model, ids)

    unchanged = scramble(source, model.config, entry.family, parts=())
    assert all(torch.equal(unchanged[name], source[name]) for name in source)

    present = parts_of(entry.family)
    absent = scramble(source, model.config, entry.family, parts=set(PARTS) - set(present))
    assert all(torch.equal(absent[name], source[name]) for name in source)

    for parts in [PARTS, *[{part} for part in present]]:
        changed = scramble(source, model.config, entry.family, seed=1, parts=parts)
        assert changed.keys() == source.keys()
        moved = [name for name in source if not torch.equal(source[name], changed[name])]
        assert moved
        difference = (exact_outputs(model, ids, changed) - expected).abs().max()
        assert difference < EXACT, parts

    for name, changed in wrong(source, model.config, entry.family, seed=1).items():
        difference = (exact_outputs(model, ids, changed) - expected).norm() / expected.norm()
        assert difference > DIFFERENT, name


def test_layers_without_a_window_may_have_rotary_embeddings() -> None:
    """Without sliding windows, exaone4 has rotary embeddings everywhere."""
    windows = {"sliding_window": None, "layer_types": ["full_attention"] * LAYERS}
    model, ids = build("exaone4", **windows), inputs("exaone4")
    changed = scramble(float64_state(model), model.config, "exaone4")
    assert (exact_outputs(model, ids, changed) - exact_outputs(model, ids)).abs().max() < EXACT
    assert [Sizes.of(model.config, "exaone4", layer).rotary for layer in range(LAYERS)] == [16, 16]


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe"])
def test_files_with_experts(case: str, tmp_path: Path) -> None:
    """Files name every expert; a changed file loads as the changed state dict."""
    model = build(case)
    save(model, tmp_path)
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() != model.state_dict().keys()
    changed = scramble(loaded, model.config, case)
    save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    read = type(model).from_pretrained(tmp_path).state_dict()
    state = scramble(model, model.config, case)
    assert all(torch.equal(read[name], state[name]) for name in state)


def test_mistakes_by_family() -> None:
    """A mistake is offered where it is one."""

    def mistakes(case: str) -> set[str]:
        model = build(case)
        return set(wrong(model, model.config, FAMILIES[case].family))

    always = {"forgotten bias or leg", "neurons without down"}
    across, grouped = {"rotation across pairs"}, {"query heads across groups"}
    rotary, norms = across | {"the other pairing"}, {"heads without their norms"}
    assert mistakes("llama") == always | rotary | grouped
    assert mistakes("gpt_neox") == always | rotary | {"forgotten value bias"}
    assert mistakes("bert") == always | {"forgotten value bias"}
    assert mistakes("olmo2") == always | rotary | grouped | norms
    centred = {"signs under a LayerNorm"}
    assert mistakes("cohere_qk_norm") == always | across | centred | grouped | norms
    assert mistakes("falcon_alibi") == always | {"forgotten value bias", "heads under ALiBi"}
    assert mistakes("mixtral") == always | rotary | grouped | {"experts without router"}


@pytest.mark.parametrize("case", FAMILIES)
def test_build_is_reproducible(case: str) -> None:
    """The seed alone decides, and the global generator is left alone."""
    before = torch.get_rng_state()
    first, again, other = build(case), build(case), build(case, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    values = [dict(model.named_parameters()) for model in (first, again, other)]
    for name, tensor in values[0].items():
        assert torch.equal(tensor, values[1][name])
        assert not torch.equal(tensor, values[2][name])
        assert tensor.numel() == 1 or tensor.std() > 0


@pytest.mark.parametrize("case", FAMILIES)
def test_save_and_load(case: str, tmp_path: Path) -> None:
    """A saved model loads with the same parameters and outputs."""
    model, ids = build(case), inputs(case)
    save(model, tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()
    family = find_family(model.config, type(model).__name__)
    assert family is not None
    expected = outputs(model, ids)
    rounding = torch.finfo(torch.float32).eps / torch.finfo(DOUBLE).eps
    atol = rounding * tolerance(family, model.config, expected)
    torch.testing.assert_close(outputs(loaded, ids), expected, rtol=0, atol=atol)


def test_float64_exact_ends_with_its_context() -> None:
    """The model keeps its dtype and casts mean float32 again afterwards."""
    model, ids = build("llama"), inputs("llama")
    before = outputs(model, ids)
    exact = exact_outputs(model, ids)
    assert (before - exact).abs().max() < 1e-4
    assert not torch.equal(before, exact)
    assert torch.equal(outputs(model, ids), before)
    assert torch.ones(1, dtype=DOUBLE).float().dtype == torch.float32
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_scramble_keeps_dtypes() -> None:
    """The result has the dtypes of the input and shares no memory with it."""
    model = build("qwen2", dtype=torch.bfloat16)
    source = model.state_dict()
    changed = scramble(model, model.config, "qwen2")
    for name, tensor in source.items():
        assert changed[name].dtype == tensor.dtype
        assert changed[name].data_ptr() != tensor.data_ptr()


def test_parts_choose_independently() -> None:
    """A part makes the same choices alone as it does after the others."""
    model = build("llama")
    config = model.config
    whole = scramble(model, config, "llama", seed=3)
    neurons = scramble(model, config, "llama", seed=3, parts={"neurons"})
    moved = [name for name in whole if not torch.equal(neurons[name], model.state_dict()[name])]
    assert moved and all(".mlp." in name for name in moved)
    assert all(torch.equal(whole[name], neurons[name]) for name in moved)


def test_sizes() -> None:
    """Sizes come from the config, whichever way it is written."""
    assert Sizes.of(build("llama").config, "llama") == Sizes(2, 2, 16, 16)
    assert Sizes.of(build("phi3").config, "phi3") == Sizes(2, 2, 12, 6)
    assert Sizes.of(build("gemma3").config, "gemma3") == Sizes(2, 2, 16, 16)
    assert Sizes.of(build("bert").config, "bert") == Sizes(4, 1, 12, 0)
    assert Sizes.of(build("glm4").config, "glm4") == Sizes(2, 2, 16, 8, interleaved=True)
    assert Sizes.of(build("falcon_new").config, "falcon_new") == Sizes(2, 2, 12, 12)
    assert Sizes.of(build("falcon_mqa").config, "falcon_mqa") == Sizes(1, 4, 12, 12)
    config = build("cohere2").config
    assert [Sizes.of(config, "cohere2", layer).rotary for layer in (0, 1)] == [16, 0]
