"""Every declared symmetry of every family leaves the function of a model unchanged.

The families are found by listing the data files. Random elements act on a tiny random model in
float64; each leg that is forgotten, and each group that is too large, has to change the outputs.
"""

import re

import pytest
import torch

import declared
import tiny
from declared import PARTS, element, scaling
from mergekit_rotation.architecture import Family, LayoutError, all_families, find_family
from mergekit_rotation.architecture.sizes import evaluate
from mergekit_rotation.symmetry import (
    Orthogonal,
    Permute,
    PlaneRotations,
    PlaneSigns,
    Scale,
    act,
    moves,
    rotary_pairs,
)

CASES = sorted(tiny.FAMILIES)
DATA = {family.family: family for family in all_families()}
#: whose code is not part of transformers
REMOTE = {"baichuan", "exaone", "internlm2", "solar"}


class Model:
    """A tiny model in exact float64, its layers as declared, and its outputs."""

    def __init__(self, case: str):
        self.model = tiny.build(case, seed=3, biases=True)
        self.inputs = tiny.inputs(case)
        self.state = {k: v.double() for k, v in self.model.state_dict().items()}
        self.config = self.model.config
        self.family = find_family(self.config, type(self.model).__name__)
        assert self.family is not None
        self.sizes = self.family.layer(self.config).sizes
        self.base = self.outputs(self.state)

    def outputs(self, state):
        return tiny.exact_outputs(self.model, self.inputs, state)

    def blocks(self, index):
        """Return the blocks that a layer has."""
        return declared.present(self.family, self.config, index, self.state)

    def legs(self, block, index):
        return declared.legs(self.family, block, index, self.state)

    def tolerance(self):
        """c n eps: n products are summed between input and output, c of rounding each."""
        sizes = self.sizes
        width = sizes.get("f", 0) + sizes.get("x", 0) * sizes.get("xf", 0) + sizes.get("sf", 0)
        n = tiny.LAYERS * (sizes["e"] + width + sizes["heads"] * sizes["qk"])
        return 8 * n * torch.finfo(torch.float64).eps * float(self.base.abs().max())

    def change(self, element_of, forget=None):
        """Return the largest change of the outputs under ``element_of(block, layer)``."""
        state = declared.moved(self.state, self.config, self.family, element_of, forget)
        return float((self.outputs(state) - self.base).abs().max())


@pytest.fixture(scope="module", params=CASES)
def model(request):
    return Model(request.param)


def test_every_data_file_is_proven():
    assert {case.family for case in tiny.FAMILIES.values()} == set(DATA) - REMOTE


def test_every_class_of_a_family_that_mergekit_merges_is_built():
    built = {type_.__name__ for type_ in (c.model_class for c in tiny.FAMILIES.values())}
    expected = {
        name
        for family in DATA.values()
        if family.family not in REMOTE
        for names in family.models.values()
        for name in names
    }
    alias_or_bare = {"LLaMaForCausalLM", "RobertaModel", "DistilBertModel"}
    assert expected - built == alias_or_bare


@pytest.mark.parametrize("parts", [*((part,) for part in PARTS), PARTS])
def test_random_elements_leave_the_function_unchanged(model, parts):
    change = model.change(lambda block, index: element(block, index, parts))
    assert change <= model.tolerance()


def test_random_scalings_leave_the_function_unchanged(model):
    """Numbers are multiplied by up to 2 and then by as little as 1/2, in up to three factors."""
    assert model.change(scaling) <= 8 * model.tolerance()


def test_each_forgotten_scaled_leg_changes_the_function(model):
    legs = {
        template: (block, name)
        for index in range(tiny.LAYERS)
        for block in model.blocks(index)
        for template, (name, pattern) in model.legs(block, index).items()
        if moves(scaling(block, index), pattern)
    }
    for template, (block, name) in legs.items():
        change = model.change(scaling, forget=template)
        if is_key_bias_without_rotary(model, block, name):
            assert change <= 8 * model.tolerance(), "softmax does not see a shift of all keys"
        else:
            assert change > 1e6 * model.tolerance(), template


def test_scalings_that_are_not_declared_change_the_function(model):
    """A map per dimension of rotary heads, and a factor of neurons that have none."""
    for index in range(tiny.LAYERS):
        for block in model.blocks(index):
            if block.kind == "attention" and block.layout.query_key.cells:
                group = block.layout.query_key
                if isinstance(group, Orthogonal):
                    continue
                change = model.change(
                    lambda b, k, i=index: (
                        scaling(b, k, ("qk",), Orthogonal(b.layout.sizes["qk"])) if k == i else ()
                    )
                )
                assert change > 1e6 * model.tolerance()
            if block.kind == "neurons" and not scaling(block, index):
                one = block.layout.patterns
                up = next(iter(one))
                factor = torch.linspace(0.5, 2, block.layout.sizes["f"], dtype=torch.float64)
                state = dict(model.state)
                for template, (name, pattern) in model.legs(block, index).items():
                    down = not template.endswith("bias") and template != up
                    marked = re.sub(r"\bf\b", "f^-1" if down else "f^1", pattern.text)
                    state[name] = act(
                        (Scale("f", factor),),
                        state[name],
                        pattern.parse(marked),
                        block.layout.sizes,
                    )
                change = float((model.outputs(state) - model.base).abs().max())
                assert change > 1e6 * model.tolerance()


def test_each_forgotten_leg_changes_the_function(model):
    threshold = 1e6 * model.tolerance()
    legs = {
        template: (block, name)
        for index in range(tiny.LAYERS)
        for block in model.blocks(index)
        for template, (name, _) in model.legs(block, index).items()
    }
    for template, (block, name) in legs.items():
        change = model.change(element, forget=template)
        if is_key_bias_without_rotary(model, block, name):
            assert change <= model.tolerance(), "softmax does not see a shift of all keys"
        else:
            assert change > threshold, template


def is_key_bias_without_rotary(model, block, name):
    return (
        block.kind == "attention"
        and isinstance(block.layout.query_key, Orthogonal)
        and name.endswith(("key.bias", "k_lin.bias"))
    )


def test_larger_groups_change_the_function(model):
    for index in range(tiny.LAYERS):
        for wrong in too_large(model.blocks(index)[0].layout.query_key):
            change = model.change(
                lambda block, k, g=wrong, i=index: element(block, k, ("qk",), g) if k == i else ()
            )
            assert change > 1e6 * model.tolerance(), wrong


def too_large(group):
    """Groups that contain more than the given one; rotary positions see the difference."""
    n, generator = group.n, torch.Generator().manual_seed(5)
    candidates = [Orthogonal(n)]
    candidates += [PlaneRotations(n, rotary_pairs(n, p)) for p in ("half", "interleaved")]
    if isinstance(group, PlaneSigns):
        candidates.append(PlaneRotations(n, group.pairs))
    return [g for g in candidates if not group.contains(g.sample(1, generator), 1e-6)]


def test_query_heads_do_not_leave_their_group(model):
    sizes, attention = model.sizes, model.blocks(0)[0]
    if not attention.heads or sizes["kv"] == 1 or sizes.get("g", 1) == 1:
        return
    swapped = {
        name: pattern.text.replace("kv g", "h")
        for name, pattern in attention.layout.patterns.items()
    }
    state = dict(model.state)
    order = torch.arange(sizes["heads"]).roll(1)
    for template, (name, pattern) in model.legs(attention, 0).items():
        if " g " not in pattern.text:
            continue
        loose = pattern.parse(swapped[template])
        all_sizes = {**sizes, "h": sizes["heads"]}
        state[name] = act((Permute("h", order),), state[name], loose, all_sizes)
    change = float((model.outputs(state) - model.base).abs().max())
    assert change > 1e6 * model.tolerance()


# -- reading a configuration ------------------------------------------------------------------


class Config(dict):
    def __getattr__(self, name):
        if name in self:
            return self[name]
        raise AttributeError(name)


def llama(**changes):
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    return Config({**sizes, **changes})


def test_head_dim_comes_first_and_may_be_null():
    family = DATA["llama"]
    assert family.layer(llama()).sizes["qk"] == 16
    assert family.layer(llama(head_dim=None)).sizes["qk"] == 12


def test_missing_key_value_heads_are_the_query_heads():
    sizes = DATA["llama"].layer(llama(num_key_value_heads=None)).sizes
    assert (sizes["kv"], sizes["g"]) == (4, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "heads / kv: 4 is not a multiple of 3"),
        ({"hidden_size": None}, "size of axis 'e'"),
        ({"intermediate_size": -1}, "not a positive number"),
        ({"intermediate_size": True}, "not a positive number"),
        ({"head_dim": 15}, "15 rotary dimensions"),
    ],
)
def test_bad_sizes_are_named(changes, message):
    with pytest.raises(LayoutError, match=message):
        DATA["llama"].layer(llama(**changes))


def test_size_expressions():
    config = {"a": 12, "r": {"f": 0.25}}
    assert evaluate("a / 4", config, {}) == 3
    assert evaluate("q * r.f", config, {"q": 96}) == 24
    assert evaluate("a / b", config, {}) is None
    with pytest.raises(LayoutError, match="cannot read"):
        evaluate("a + 1", config, {})


def test_query_key_is_left_alone_under_an_unproven_switch():
    case = tiny.build("phi", qk_layernorm=True)
    layout = DATA["phi"].layer(case.config).blocks[0].layout
    assert layout.query_key.freedom == 0
    assert layout.query_key.sample(1, torch.Generator()).equal(
        torch.eye(layout.query_key.n, dtype=torch.float64)[None]
    )


def test_a_misspelt_entry_of_a_data_file_is_refused():
    data = DATA["llama"].model_dump()
    with pytest.raises(ValueError, match="attension"):
        Family.model_validate({**data, "attension": {}})
    with pytest.raises(ValueError, match="sizes of axes"):
        Family.model_validate({**data, "sizes": {"e": ["hidden_size"]}})


def test_unknown_classes_have_no_family():
    assert find_family(llama(model_type="llama"), "LlamaForQuestionAnswering") is None
    assert find_family(llama(model_type="unknown"), "LlamaForCausalLM") is None
