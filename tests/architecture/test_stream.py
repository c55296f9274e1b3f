"""Every declared map of the residual stream leaves the function of a model unchanged.

As in `test_families`: random elements on tiny random models in float64, with the norms of another
model as the target; each tensor that is forgotten and each map that is too large has to show.
"""

import copy

import pytest
import torch

import tiny
from mergekit_rotation.architecture import all_families, find_family
from mergekit_rotation.proof import Subject
from mergekit_rotation.symmetry import Orthogonal, SignedPermutation
from merging import config, merged

TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}
MOVED = {family.family for family in all_families() if family.stream.maps}
#: whose output is the stream itself
BARE = {"bert", "deberta", "deberta_v2", "mpnet", "vit"}
CASES = [
    (case, ties)
    for case in sorted(set(tiny.FAMILIES) - BARE)
    if tiny.FAMILIES[case].family in MOVED
    for ties in ((TIED, UNTIED) if case.endswith(("llama", "gemma", "gpt2")) else ({},))
]


def change(model, *args, **kwargs):
    return model.difference(model.moved_stream(*args, **kwargs))


def identifier(value):
    return (
        value
        if isinstance(value, str)
        else {None: "", True: "tied", False: "untied"}[value.get("tie_word_embeddings")]
    )


@pytest.fixture(scope="module", params=CASES, ids=lambda p: "-".join(map(identifier, p)))
def model(request):
    case, ties = request.param
    model = tiny.build(case, biases=True, **ties)
    family = find_family(model.config, type(model).__name__)
    return Subject(model, tiny.inputs(case), family)


def test_random_maps_leave_the_function_unchanged(model):
    for kind in model.exact_maps():
        assert change(model, model.draw(kind)) <= model.stream_tolerance(), kind
        assert change(model, model.draw(kind), fold=False) <= model.stream_tolerance(), kind


def test_each_forgotten_tensor_changes_the_function(model):
    threshold = 1e3 * model.stream_tolerance()
    kind = model.exact_maps()[-1]
    for template in model.stream.layout.patterns:
        here = [i for i in (0, None) if template in model.tensors(model.state, i)]
        if here:
            assert change(model, model.draw(kind), forget=template) > threshold, template


def test_larger_maps_change_the_function(model):
    threshold = 1e3 * model.stream_tolerance()
    if model.stream.layout.layer_norm and "orthogonal" in model.exact_maps():
        assert change(model, model.draw("orthogonal", Orthogonal)) > threshold
    if "orthogonal" in model.stream.maps and "orthogonal" not in model.exact_maps():
        assert change(model, model.draw("orthogonal")) > threshold, "tied embeddings kept tied"
    if model.stream.layout.layer_norm:
        one = model.draw("permutation")
        sign = torch.ones_like(one.sign)
        sign[0] = -1
        assert change(model, SignedPermutation(one.index, sign)) > threshold, "one sign"


def test_every_tensor_of_a_model_is_declared(model):
    assert set(model.state) <= model.declared


def test_families_with_norms_after_a_branch_do_not_rotate():
    rigid = {family.family for family in all_families() if family.stream.maps == ("permutation",)}
    assert rigid == {
        "baichuan", "bert", "deberta", "deberta_v2", "distilbert", "exaone4", "gemma2", "gemma3",
        "glm4", "mpnet", "olmo2", "roberta", "vit",
    }  # fmt: skip


@pytest.mark.parametrize(
    "case", ["mixtral", "deepseek_v3-all-experts", "gpt_oss", "granitemoehybrid"]
)
def test_twin_returns_though_its_file_holds_tensors_apart(case, tmp_path):
    model, inputs = tiny.build(case), tiny.inputs(case)
    subject = Subject(model, inputs, find_family(model.config, type(model).__name__))
    kind = subject.exact_maps()[-1]
    reference, twin, out = (tmp_path / name for name in ("reference", "twin", "out"))
    state = subject.moved_stream(subject.draw(kind))
    other = copy.deepcopy(model)
    other.load_state_dict({name: state[declared] for declared, name in subject.names.items()})
    tiny.save(model, reference)
    tiny.save(other, twin)
    parameters = {"align_residual": kind}
    merged(config("rotation_linear", [reference, twin], parameters=parameters), out)
    loaded = type(model).from_pretrained(out, attn_implementation="eager").eval()
    change = tiny.outputs(loaded, inputs) - tiny.outputs(model, inputs)
    assert change.abs().max() < 1e-3
