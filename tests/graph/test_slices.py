"""Slices: which layers meet, and what passes through."""

import pytest
import torch

from merging import Twins, changed_copy, merge, merged, same, weights

KINDS = ["none", "permutation", "orthogonal"]
LAYERS = 3
CLONE = "--clone-tensors"


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    return Twins("llama", tmp_path_factory.mktemp("llama"), count=2, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def copy(twins, tmp_path_factory):
    return changed_copy(twins.reference, tmp_path_factory.mktemp("copy") / "copy", dict)


def source(model, start, end, **parameters):
    return {"model": str(model), "layer_range": [start, end], "parameters": parameters}


def sliced(method, *slices, **more):
    """Return a configuration; a slice is a list of sources, or a mapping with more entries."""
    listed = [entry if isinstance(entry, dict) else {"sources": entry} for entry in slices]
    return {"merge_method": method, "slices": listed, "dtype": "float32", **more}


def layer(state, index):
    stem = f"model.layers.{index}."
    return {name.removeprefix(stem): x for name, x in state.items() if name.startswith(stem)}


def close(found, expected):
    """Tell whether tensors are equal up to the rounding of rows that were multiplied."""
    eps = torch.finfo(torch.float32).eps
    return list(found) == list(expected) and all(
        float((found[n] - x).norm()) <= 64 * x.shape[-1] * eps * float(x.norm())
        for n, x in expected.items()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_repeated_layers_are_aligned_each_time(kind, twins, copy, tmp_path):
    """The output has layers 0, 1, 1, 2, 1 of both models: those of the reference."""

    def raw(method, *models, **parameters):
        both = [
            [source(model, *ends, weight=0.5) for model in models]
            for ends in ((0, 2), (1, 3), (1, 2))
        ]
        return sliced(method, *both, parameters=parameters)

    expected = weights(merged(raw("linear", twins.reference, copy), tmp_path / "plain", CLONE))
    for other, told in ((copy, same), (twins.others[0], close)):
        given = raw("rotation_linear", twins.reference, other, align_residual=kind)
        out = tmp_path / other.name
        assert told(weights(merged(given, out, CLONE)), expected)
    assert len({name.split(".")[2] for name in expected if ".layers." in name}) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_paired_as_the_slices_say(kind, twins, tmp_path):
    """The other model holds the reference's layers in another order, each in other coordinates."""
    order = [2, 0, 1]

    def reordered(state):
        moved = {}
        for place, own in enumerate(order):
            for name, x in layer(state, own).items():
                moved[f"model.layers.{place}.{name}"] = x
        return {**state, **moved}

    other = changed_copy(twins.others[0], tmp_path / "other", reordered)
    slices = [
        [
            source(twins.reference, own, own + 1, weight=0.5),
            source(other, place, place + 1, weight=0.5),
        ]
        for own, place in sorted(zip(order, range(LAYERS), strict=True))
    ]
    raw = sliced("rotation_linear", *slices, parameters={"align_residual": kind})
    assert close(weights(merged(raw, tmp_path / "out")), weights(twins.reference))


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_alone_passes_through_exactly(kind, twins, tmp_path):
    a, b = twins.reference, twins.others[0]
    raw = sliced(
        "rotation_linear",
        [source(a, 0, 1, weight=0.5), source(b, 0, 1, weight=0.5)],
        [source(a, 1, 3, weight=1.0)],
        parameters={"align_residual": kind},
    )
    out = merged(raw, tmp_path / "out")
    found, reference = weights(out), weights(a)
    for index in (1, 2):
        assert same(layer(found, index), layer(reference, index))
    assert not same(layer(found, 0), layer(reference, 0))
    assert twins.distance(out) < 1e-3


def test_any_single_source_passes_through_without_a_map_of_the_stream(twins, tmp_path):
    a, b = twins.reference, twins.others[0]
    raw = sliced(
        "rotation_linear",
        [source(a, 0, 1, weight=0.5), source(b, 0, 1, weight=0.5)],
        [source(b, 1, 3, weight=1.0)],
    )
    out = merged(raw, tmp_path / "out")
    found, other = weights(out), weights(b)
    for index in (1, 2):
        assert same(layer(found, index), layer(other, index))
    assert twins.distance(out) < 1e-3


def test_every_slice_may_have_a_base_and_a_reference_of_its_own(twins, tmp_path):
    a, b, c = twins.reference, *twins.others
    raw = sliced(
        "rotation_slerp",
        {"sources": [source(a, 0, 1), source(b, 0, 1)], "base_model": str(b)},
        {"sources": [source(a, 1, 2), source(c, 1, 2)], "base_model": str(a)},
        {
            "sources": [source(b, 2, 3), source(c, 2, 3)],
            "base_model": str(b),
            "parameters": {"align_reference": str(c)},
        },
        parameters={"t": 0.5},
    )
    out = merged(raw, tmp_path / "out")
    found = weights(out)
    for index, model in enumerate((b, a, c)):
        assert close(layer(found, index), layer(weights(model), index))
    assert twins.distance(out) < 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_reference_that_is_no_input_lends_the_layers_of_the_first_source(kind, twins, tmp_path):
    a, b, c = twins.reference, *twins.others
    raw = sliced(
        "rotation_linear",
        [source(model, 1, 3, weight=0.5) for model in (b, c)],
        parameters={"align_reference": str(a), "align_residual": kind},
    )
    found = weights(merged(raw, tmp_path / "out"))
    for index in (1, 2):
        assert close(layer(found, index - 1), layer(weights(a), index))


def test_slices_of_unequal_length_get_mergekits_message(twins, tmp_path):
    a, b = twins.reference, twins.others[0]
    for kind in KINDS:
        raw = sliced(
            "rotation_linear",
            [source(a, 0, 2, weight=0.5), source(b, 0, 3, weight=0.5)],
            parameters={"align_residual": kind},
        )
        result = merge(raw, tmp_path / "out")
        assert result.exit_code == 1
        told = f"{result.output}{result.exception}"
        assert "All inputs to a slice must contain the same number of layers" in told


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_a_model_does_not_have_are_named(kind, twins, tmp_path):
    a, b = twins.reference, twins.others[0]
    raw = sliced(
        "rotation_linear",
        [source(a, 0, 2, weight=0.5), source(b, 2, 4, weight=0.5)],
        parameters={"align_residual": kind},
    )
    result = merge(raw, tmp_path / "out")
    assert result.exit_code == 1
    assert f"{b}: layer_range asks for layer 3, but the model has 3 layers" in result.output
    assert not (tmp_path / "out").exists()
