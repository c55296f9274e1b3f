"""Every declared symmetry of every family leaves the function of a model unchanged.

The families are found by listing the data files. Random elements act on a tiny random model in
float64; each leg that is forgotten, and each group that is too large, has to change the outputs.
"""

import re
from dataclasses import replace

import pytest
import torch

import tiny
from mergekit_rotation.architecture import Family, LayoutError, all_families, find_family
from mergekit_rotation.architecture.sizes import evaluate
from mergekit_rotation.proof import PARTS, Subject, element
from mergekit_rotation.proof.elements import scaling, shifted
from mergekit_rotation.symmetry import (
    AttentionLayout,
    ExpertLayout,
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
#: whose code is not part of transformers, see test_remote
REMOTE = {"baichuan", "chatglm", "exaone", "internlm2", "jais", "phi3small", "qwen", "solar"}


def attention(blocks):
    return [block for block in blocks if isinstance(block.layout, AttentionLayout)]


def build(case):
    model = tiny.build(case, biases=True)
    family = find_family(model.config, type(model).__name__)
    assert family is not None
    return Subject(model, tiny.inputs(case), family)


@pytest.fixture(scope="module", params=CASES)
def model(request):
    return build(request.param)


def test_every_data_file_is_proven():
    assert {case.family for case in tiny.FAMILIES.values()} == set(DATA) - REMOTE


def test_families_are_marked_by_how_they_were_checked():
    assert {family.family for family in all_families() if family.checked == "read"} == REMOTE


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
    same_code = {name for name in expected - built if name.startswith(("XLMRoberta", "Camembert"))}
    assert expected - built - same_code == alias_or_bare


def test_every_tensor_is_declared_where_the_stream_stays(model):
    if model.family.stream.maps or not model.family.stream.tensors:
        return  # `test_stream` looks at the others
    assert set(model.state) <= model.declared


@pytest.mark.parametrize("parts", [*((part,) for part in PARTS), PARTS])
def test_random_elements_leave_the_function_unchanged(model, parts):
    state = model.moved(lambda block, index: element(block, index, parts))
    assert model.difference(state) <= model.tolerance()


def test_random_scalings_leave_the_function_unchanged(model):
    """Numbers are multiplied by up to 2 and then by as little as 1/2, in up to three factors."""
    assert model.difference(model.moved(scaling)) <= 8 * model.tolerance()


def test_each_forgotten_scaled_leg_changes_the_function(model):
    legs = {}
    for index in range(tiny.LAYERS):
        for block in model.blocks(index):
            for template, (_, pattern) in model.legs(block, index).items():
                if moves(scaling(block, index), pattern):
                    legs.setdefault(template, []).append(block)
    for template, blocks in legs.items():
        change = model.difference(model.moved(scaling, forget=template))
        if all(is_key_bias_without_rotary(block, template) for block in blocks):
            assert change <= 8 * model.tolerance(), "softmax does not see a shift of all keys"
        else:
            assert change > 1e6 * model.tolerance(), template


def test_scalings_that_are_not_declared_change_the_function(model):
    """A map per dimension of rotary heads, and a factor of neurons that have none."""
    for index in range(tiny.LAYERS):
        for block in model.blocks(index):
            if scaling(block, index, ("qk",)):
                group = block.layout.query_key
                if isinstance(group, Orthogonal):
                    continue
                state = model.moved(
                    lambda b, k, i=index: (
                        scaling(b, k, ("qk",), Orthogonal(b.layout.sizes["qk"])) if k == i else ()
                    )
                )
                assert model.difference(state) > 1e6 * model.tolerance()
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
                assert model.difference(state) > 1e6 * model.tolerance()


def test_each_forgotten_leg_changes_the_function(model):
    threshold = 1e6 * model.tolerance()
    legs = {}
    for index in range(tiny.LAYERS):
        for block in model.blocks(index):
            for template in model.legs(block, index):
                legs.setdefault(template, []).append(block)
    for template, blocks in legs.items():
        change = model.difference(model.moved(element, forget=template))
        if all(is_key_bias_without_rotary(block, template) for block in blocks):
            assert change <= model.tolerance(), "softmax does not see a shift of all keys"
        else:
            assert change > threshold, template


def test_free_biases_leave_the_function_unchanged(model):
    assert model.difference(shifted(model.state, model.config, model.family, 1)) <= (
        8 * model.tolerance()
    )


def test_biases_that_are_not_free_change_the_function(model):
    """Those of keys that position turns or norms see, and of values without making up for them."""
    for wrong in ({"compensated": False}, {"free": False}):
        state = shifted(model.state, model.config, model.family, 1, **wrong)
        if wrong == {"compensated": False} and not any(
            block.output_biases.keys() & {*model.legs(block, k)}
            for k in range(tiny.LAYERS)
            for block in model.blocks(k)
        ):
            continue
        if any(not torch.equal(state[name], x) for name, x in model.state.items()):
            assert model.difference(state) > 1e6 * model.tolerance(), wrong


def is_key_bias_without_rotary(block, template):
    return (
        isinstance(block.layout, AttentionLayout)
        and isinstance(block.layout.query_key, Orthogonal)
        and template.endswith(
            ("key.bias", "k_lin.bias", "k_proj.bias", ".k.bias", "pos_key_proj.bias")
        )
    )


def test_larger_groups_change_the_function(model):
    for index in range(tiny.LAYERS):
        for block in attention(model.blocks(index)):
            wrong = [("qk", group) for group in too_large(block.layout.query_key)]
            wrong += [("vo", group) for group in too_large(block.layout.value_output)]
            for part, group in wrong:
                state = model.moved(
                    lambda b, k, p=part, g=group, i=index: element(b, k, (p,), g) if k == i else ()
                )
                assert model.difference(state) > 1e6 * model.tolerance(), (part, group)


def too_large(group):
    """Groups that contain more than the given one; rotary positions see the difference."""
    n, generator = group.n, torch.Generator().manual_seed(5)
    candidates = [Orthogonal(n)]
    candidates += [PlaneRotations(n, rotary_pairs(n, p)) for p in ("half", "interleaved")]
    if isinstance(group, PlaneSigns):
        candidates.append(PlaneRotations(n, group.pairs))
    return [g for g in candidates if not group.contains(g.sample(1, generator), 1e-6)]


def test_query_heads_do_not_leave_their_group(model):
    sizes, blocks = model.sizes, attention(model.blocks(0))
    if not blocks or not blocks[0].heads or sizes["kv"] == 1 or sizes.get("g", 1) == 1:
        return
    block = blocks[0]
    swapped = {
        name: pattern.text.replace("kv g", "h") for name, pattern in block.layout.patterns.items()
    }
    state = dict(model.state)
    order = torch.arange(sizes["heads"]).roll(1)
    for template, (name, pattern) in model.legs(block, 0).items():
        if " g " not in pattern.text:
            continue
        loose = pattern.parse(swapped[template])
        all_sizes = {**sizes, "h": sizes["heads"]}
        state[name] = act((Permute("h", order),), state[name], loose, all_sizes)
    assert model.difference(state) > 1e6 * model.tolerance()


def test_experts_do_not_leave_their_group(model):
    def across(block, index):
        layout = block.layout
        if not isinstance(layout, ExpertLayout) or layout.groups == 1:
            return ()
        return (Permute("x", torch.arange(layout.sizes["x"]).roll(1)),)

    blocks = [block for index in range(tiny.LAYERS) for block in model.blocks(index)]
    if any(across(block, 0) for block in blocks):
        assert model.difference(model.moved(across)) > 1e6 * model.tolerance()


def test_heads_that_have_to_stay_do(model):
    for kind in {block.kind for block in attention(model.blocks(0)) if not block.heads}:
        state = model.moved(
            lambda block, k, kind=kind: (
                element(replace(block, heads=True), k, ("heads",)) if block.kind == kind else ()
            )
        )
        assert model.difference(state) > 1e6 * model.tolerance(), kind


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
    assert evaluate("2 * a // 5", config, {}) == 4
    assert evaluate("a // 5 ^ 8", config, {}) == evaluate("8 ^ a // 3 * 2", config, {}) == 8
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


def test_configurations_that_a_file_excludes_have_no_family():
    case = tiny.build("granitemoehybrid")
    assert find_family(case.config, type(case).__name__) is DATA["granitemoehybrid"]
    case.config.num_local_experts = 0
    assert find_family(case.config, type(case).__name__) is None


def test_unknown_classes_have_no_family():
    assert find_family(llama(model_type="llama"), "LlamaForQuestionAnswering") is None
    assert find_family(llama(model_type="unknown"), "LlamaForCausalLM") is None
