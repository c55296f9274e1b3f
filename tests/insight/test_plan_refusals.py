"""Whatever is done to a configuration: the plan refuses it if and only if the merge does."""

import copy
import shutil
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiny
from merging import Twins, config, merge, planned, save_tokenizer

pytestmark = pytest.mark.usefixtures("at_a_pace")
EXAMPLES = 50
#: how many plans ended with which exit code
SEEN = Counter()


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """Paths of models by the names that the configurations have for them."""
    folder = tmp_path_factory.mktemp("zoo")
    twins = Twins("llama", folder, count=2)
    for model in (twins.reference, *twins.others):
        save_tokenizer(model, [f"t{k}" for k in range(tiny.VOCABULARY)])
    tiny.save(tiny.build("llama", num_hidden_layers=3), folder / "deep")
    return {"A": twins.reference, "B": twins.others[0], "C": twins.others[1], "D": folder / "deep"}


def entry(name, **parameters):
    return {"model": name, "parameters": parameters}


def source(name, first, last, **parameters):
    return {"model": name, "layer_range": [first, last], "parameters": parameters}


VALID = (
    config("rotation_linear", ["A", "B"]),
    config("rotation_linear", ["A", "B", "C"], parameters={"align_heads": False}),
    {
        "merge_method": "rotation_linear",
        "slices": [
            {"sources": [source("A", 0, 1, weight=0.5), source("B", 1, 2, weight=0.5)]},
            {"sources": [source("A", 1, 2, weight=[0.2, 0.8]), source("B", 0, 1, weight=0.5)]},
        ],
        "dtype": "float32",
    },
    {
        "merge_method": "rotation_ties",
        "base_model": "A",
        "models": [entry("B", weight=0.5, density=0.5), entry("C", weight=0.5, density=0.6)],
        "parameters": {"normalize": True},
        "dtype": "bfloat16",
    },
    {
        "merge_method": "rotation_slerp",
        "base_model": "A",
        "models": [{"model": "A"}, {"model": "B"}],
        "parameters": {"t": [{"filter": "self_attn", "value": [0, 0.5, 1]}, {"value": 0.5}]},
    },
    config("rotation_linear", ["A", "B"], parameters={"align_residual": "orthogonal"}),
    {
        "merge_method": "rotation_task_arithmetic",
        "base_model": "A",
        "models": [entry("B", weight=1.0, align_task_base="C")],
        "parameters": {"align_residual": "permutation", "align_residual_rounds": 2},
    },
    {
        "merge_method": "rotation_align",
        "models": [{"model": "B"}],
        "parameters": {"align_reference": "A"},
    },
    config("rotation_linear", ["A", "B"], tokenizer={"source": "union"}, chat_template="chatml"),
    {
        "merge_method": "rotation_passthrough",
        "slices": [{"sources": [source("A", 0, 2)]}, {"sources": [source("B", 1, 2)]}],
        "parameters": {"align_residual": "permutation"},
    },
    {
        "merge_method": "rotation_della",
        "base_model": "A",
        "models": [entry("B", weight=0.5, density=0.5, epsilon=0.1)],
    },
)
VALUES = st.sampled_from(
    [
        *(None, True, 0, 1, 2, -1, 7, 0.3, 1e9, "", "A", "D", "union", "base", "none", "x/y@z"),
        *("orthogonal", "float16", "int8", "rotation_linear", "rotation_ties", "rotation_align"),
        *("rotation_model_stock", "rotation_passthrough", "./none", [], [0, 1], [0, 3], [1, 0], {}),
        *(["self"], {"value": 1}, {"filter": "mlp"}, [{"filter": "q_proj", "value": 0}, 1]),
    ]
)
KEYS = ("base_model", "align_as", "align_reference", "density", "dtype", "t", "tokenizer_source")


def places(node):
    """Yield every (container, key) of a configuration."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in list(items):
        yield node, key
        if isinstance(value, dict | list):
            yield from places(value)


@st.composite
def mutated(draw):
    """A valid configuration with one or two things done to it."""
    raw = copy.deepcopy(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(1, 2))):
        found = list(places(raw))
        if not found:
            break
        container, key = draw(st.sampled_from(found))
        change = draw(st.sampled_from(("drop", "misspell", "swap", "replace", "repeat", "add")))
        if change == "drop":
            del container[key]
        elif change == "misspell" and isinstance(key, str):
            position = draw(st.integers(0, len(key) - 1))
            container[key[:position] + key[position + 1 :]] = container.pop(key)
        elif change == "swap":
            other, second = draw(st.sampled_from(found))
            if other is not container[key] and container is not other[second]:
                pair = copy.deepcopy((container[key], other[second]))
                other[second], container[key] = pair
        elif change == "replace":
            container[key] = copy.deepcopy(draw(VALUES))
        elif change == "repeat" and isinstance(container, list):
            container.append(copy.deepcopy(container[key]))
        elif isinstance(container, dict):
            container[draw(st.sampled_from(KEYS))] = copy.deepcopy(draw(VALUES))
    return raw


def with_paths(node, zoo):
    """Put the paths of models for their names."""
    if isinstance(node, dict):
        return {key: with_paths(value, zoo) for key, value in node.items()}
    if isinstance(node, list):
        return [with_paths(value, zoo) for value in node]
    return str(zoo[node]) if isinstance(node, str) and node in zoo else node


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(raw=mutated())
def test_a_plan_refuses_what_the_merge_refuses_and_nothing_else(raw, zoo, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "out"
    raw = with_paths(raw, zoo)
    foreseen = planned(raw, out, "--allow-crimes")
    assert not out.exists()
    said = merge(raw, out, "--allow-crimes")
    shutil.rmtree(out.parent)
    assert (foreseen.exit_code == 0) == (said.exit_code == 0), (foreseen.output, said.output)
    SEEN[foreseen.exit_code] += 1
    if foreseen.exit_code == 1:
        errors = [line for line in foreseen.output.splitlines() if line.startswith("Error: ")]
        assert len(errors) == 1
        assert errors[0] in said.output or "Error: " not in said.output  # as of plain methods


def test_configurations_of_both_kinds_were_tried():
    assert min(SEEN[0], SEEN[1]) > EXAMPLES / 8, SEEN


@pytest.mark.parametrize("number", range(len(VALID)))
def test_the_configurations_are_valid_as_they_are(number, zoo, tmp_path):
    assert planned(with_paths(VALID[number], zoo), tmp_path / "out").exit_code == 0
