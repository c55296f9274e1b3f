"""Whatever numbers a configuration holds, reading it gives a layout that fits, or a LayoutError."""

import copy
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from mergekit_rotation.architecture import LayoutError, find_family
from mergekit_rotation.architecture.sizes import evaluate, lookup

LAW = settings(max_examples=25, deadline=None, derandomize=True, database=None)
ODD = st.one_of(
    st.integers(-4, 200),
    st.floats(-4, 200),
    st.sampled_from([math.inf, -math.inf, math.nan, None, True, "8", [], [8, 0], {}, {"a": 1}]),
)
NAMES = ("a", "b", "c.d", "e[layer]")


@LAW
@given(
    values=st.lists(ODD, min_size=2, max_size=2),
    sign=st.sampled_from(["*", "/", "//", "^"]),
)
def test_a_size_is_a_positive_number_or_an_error(values, sign):
    config = dict(zip("ab", values, strict=True))
    try:
        size = evaluate(f"a {sign} b", config, {})
    except LayoutError:
        return
    if size is None:
        assert None in values
        return
    assert isinstance(size, int)
    assert size >= 1


@LAW
@given(a=st.integers(1, 10**6), b=st.integers(1, 10**4))
def test_whole_numbers_are_exact(a, b):
    config = {"a": a, "b": b}
    assert evaluate("a * b", config, {}) == a * b
    assert evaluate("a * b / b", config, {}) == a
    up = evaluate("a ^ b", config, {})
    assert up % b == 0 and a <= up < a + b
    if a % b:
        with pytest.raises(LayoutError, match="not a multiple"):
            evaluate("a / b", config, {})


@LAW
@given(value=ODD, layer=st.integers(0, 3))
def test_paths_that_lead_nowhere_are_absent(value, layer):
    found = lookup({"a": value}, "a[layer]", layer)
    assert found is None or found == value[layer]
    if not isinstance(value, dict):
        assert lookup({"a": value}, "a.b.c") is None


#: numbers of a configuration that sizes are read from, under their usual names
NUMBERS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "num_experts",
    "num_local_experts",
    "moe_intermediate_size",
)


@pytest.mark.parametrize("case", ["llama", "gpt2", "qwen3_moe", "falcon_new", "bert"])
@LAW
@given(data=st.data())
def test_layouts_fit_or_say_that_they_do_not(case, data):
    """Contradictory numbers give one error; all others a layout whose shapes are positive."""
    model = _small(case)
    config = copy.deepcopy(model.config)
    family = find_family(config, type(model).__name__)
    present = [name for name in NUMBERS if isinstance(getattr(config, name, None), int)]
    for name in data.draw(st.sets(st.sampled_from(present), max_size=3)):
        config.__dict__[name] = data.draw(ODD)
    try:
        layer = family.layer(config, 0)
    except LayoutError:
        return
    assert layer.blocks
    for block in layer.blocks:
        for pattern in block.layout.patterns.values():
            shape = pattern.shape(block.layout.sizes)
            assert all(isinstance(size, int) and size >= 1 for size in shape)


def _small(case):
    if case not in _BUILT:
        _BUILT[case] = tiny.build(case)
    return _BUILT[case]


_BUILT = {}
