"""Every method of the registry has a twin that merges aligned models."""

import pytest
import torch
from mergekit.merge_methods import registry
from mergekit.merge_methods.base import TensorGroup

from mergekit_rotation.graph.errors import RotationError
from mergekit_rotation.graph.methods import AlignedMethod, names, register_twins
from merging import Twins, changed_copy, config, merged, weights

PLAIN = [m.spec.name for m in registry.registered_methods() if not isinstance(m, AlignedMethod)]

#: method -> (number of twins, whether the reference is the base, parameters of every input)
CONTRACTS = {
    "linear": (2, False, {"weight": 0.5}),
    "slerp": (1, True, {"t": 0.5}),
    "nuslerp": (2, True, {"weight": 0.5}),
    "ties": (2, True, {"weight": 0.5, "density": 1.0}),
    "dare_ties": (2, True, {"weight": 0.5, "density": 1.0}),
    "dare_linear": (2, True, {"weight": 0.5, "density": 1.0}),
    "della": (2, True, {"weight": 0.5, "density": 1.0, "epsilon": 0.0}),
    "della_linear": (2, True, {"weight": 0.5, "density": 1.0, "epsilon": 0.0}),
    "task_arithmetic": (2, True, {"weight": 0.5}),
    "breadcrumbs": (2, True, {"weight": 0.5, "density": 1.0, "gamma": 0.0}),
    "breadcrumbs_ties": (2, True, {"weight": 0.5, "density": 1.0, "gamma": 0.0}),
    "model_stock": (2, True, {}),
    "karcher": (2, False, {}),
    "multislerp": (2, False, {"weight": 0.5}),
    "sce": (2, True, {"select_topk": 1.0}),
    "nearswap": (1, True, {"t": 0.001}),
    "arcee_fusion": (1, True, {}),
    "ram": (2, True, {}),
    "ramplus_tl": (2, True, {}),
    "passthrough": (0, False, {}),
}


def recipe(method, models, base, parameters):
    """Return a configuration in which every parameter is shared by all inputs."""
    more = {"base_model": str(models[0])} if base else {}
    return config(method, models, weight=None, parameters=parameters, **more)


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    return Twins("llama", tmp_path_factory.mktemp("llama"), count=2)


def test_every_plain_method_has_a_contract_here():
    assert set(PLAIN) == set(CONTRACTS)


@pytest.mark.parametrize("name", PLAIN)
def test_twin_carries_the_specification_of_the_original(name):
    plain, twin = registry.get(name).spec, registry.get("rotation_" + name).spec
    assert twin.parameters == plain.parameters
    assert twin.contract == plain.contract
    assert twin.optional_tensor_policy == plain.optional_tensor_policy
    assert twin.uses_accelerator == plain.uses_accelerator
    assert twin.reference_url == plain.reference_url


def test_registering_twice_changes_nothing():
    before = registry.registered_methods()
    register_twins()
    assert registry.registered_methods() == before
    assert len(names()) == len(PLAIN) + 1


@pytest.mark.parametrize("name", sorted(CONTRACTS))
def test_merge_of_twins_stays_at_the_reference(name, twins, tmp_path):
    count, base, parameters = CONTRACTS[name]
    models = [twins.reference, *twins.others[:count]]
    out = merged(recipe("rotation_" + name, models, base, parameters), tmp_path / "out")
    assert twins.distance(out) < 1e-3


@pytest.mark.parametrize("name", sorted(CONTRACTS))
def test_copies_of_the_reference_merge_exactly_as_without_the_prefix(name, twins, tmp_path):
    count, base, parameters = CONTRACTS[name]
    models = [twins.reference]
    for k in range(count):
        models.append(changed_copy(twins.reference, tmp_path / f"copy-{k}", lambda state: state))
    seed = ("--random-seed", "7")
    ours = merged(recipe("rotation_" + name, models, base, parameters), tmp_path / "ours", *seed)
    plain = merged(recipe(name, models, base, parameters), tmp_path / "plain", *seed)
    ours, plain = weights(ours), weights(plain)
    assert list(ours) == list(plain)
    assert all(ours[k].dtype == plain[k].dtype for k in plain)
    assert all(torch.equal(ours[k], plain[k]) for k in plain)


def test_a_twin_refuses_to_merge_tensors_without_an_architecture():
    group = TensorGroup.from_tensors([torch.ones(2, 2), torch.ones(2, 2)])
    with pytest.raises(RotationError, match="use linear here"):
        registry.get("rotation_linear")([group], parameters={"weight": [0.5, 0.5]})


def test_rotation_align_moves_one_model_and_keeps_its_config(twins, tmp_path):
    other = changed_copy(twins.others[0], tmp_path / "other", lambda state: state)
    settings = (
        (other / "config.json").read_text().replace('"rope_theta": 10000', '"rope_theta": 5000')
    )
    (other / "config.json").write_text(settings)
    out = merged(
        config(
            "rotation_align",
            [other],
            weight=None,
            parameters={"align_reference": str(twins.reference)},
        ),
        tmp_path / "out",
    )
    assert '"rope_theta": 5000' in (out / "config.json").read_text()
    moved, reference = weights(out), weights(twins.reference)
    for name, tensor in reference.items():
        # Rows of width n are multiplied by matrices that are orthogonal to rounding.
        bound = 64 * tensor.shape[-1] * torch.finfo(torch.float32).eps
        assert float((moved[name] - tensor).norm()) <= bound * float(tensor.norm()), name
