"""Where a factorisation or an assignment fails: a second driver, then nothing, in words."""

import pytest
import scipy.linalg
import torch
from mergekit.graph import Executor

from mergekit_rotation.symmetry import assignment, factorisation
from merging import Twins, changed_copy, config, merged, planner, same, weights
from scramble_stream import scramble_stream

FAST, SLOW = ("svd", "eigh", "eigvals"), ("svd", "eigh", "schur")


def refuse(*args, **kwargs):
    raise torch.linalg.LinAlgError("did not converge")


def give_nan(x, *args, **kwargs):
    return tuple(torch.full_like(x, float("nan")) for _ in range(3))


def no_number(*args, **kwargs):
    raise ValueError("array must not contain infs or NaNs")


def fast_drivers_fail(monkeypatch):
    for name in FAST:
        monkeypatch.setattr(torch.linalg, name, refuse)


def all_drivers_fail(monkeypatch):
    fast_drivers_fail(monkeypatch)
    for name in SLOW:
        monkeypatch.setattr(scipy.linalg, name, no_number)


@pytest.mark.parametrize("failure", [refuse, give_nan, no_number])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_second_driver_gives_the_same_factors(failure, dtype, monkeypatch):
    """Also of a driver that returns NaN instead of an error, as some do on a GPU."""
    x = torch.randn(2, 3, 5, 5, dtype=dtype, generator=torch.Generator().manual_seed(0))
    s = x + x.mT
    true = torch.linalg.svdvals(x), torch.linalg.eigvalsh(s)
    for name in FAST:
        monkeypatch.setattr(torch.linalg, name, failure)
    bound = 16 * 5 * torch.finfo(dtype).eps * float(x.norm())
    u, values, vh = factorisation.svd(x)
    assert {u.dtype, values.dtype, vh.dtype} == {dtype}
    assert float((u * values[..., None, :] @ vh - x).abs().max()) <= bound
    assert float((values - true[0]).abs().max()) <= bound
    values, vectors = factorisation.eigh(s)
    assert float((vectors * values[..., None, :] @ vectors.mT - s).abs().max()) <= 2 * bound
    assert float((values - true[1]).abs().max()) <= 2 * bound
    if failure is not give_nan:
        found = factorisation.eigenvalues(s).sort(-1).values
        assert float((found - true[1]).abs().max()) <= 2 * bound


def test_without_any_driver_there_is_one_error(monkeypatch):
    all_drivers_fail(monkeypatch)
    for factorise in (factorisation.svd, factorisation.eigh, factorisation.eigenvalues):
        with pytest.raises(torch.linalg.LinAlgError, match="no driver"):
            factorise(torch.eye(2))


def test_an_assignment_without_numbers_is_such_an_error_too():
    with pytest.raises(torch.linalg.LinAlgError):
        assignment.linear_assignment(torch.full((2, 2), float("nan")))


def models_of(folder, parameters):
    """Write a model and a twin, whose stream is in another order where that is to be solved."""
    twins = Twins("llama", folder)
    if "align_residual" in parameters:
        arguments = (twins.model.config, "llama", "permutation", 5)
        twins.others[0] = changed_copy(
            twins.others[0], folder / "stream", lambda x: scramble_stream(x, *arguments)
        )
    return twins, [twins.reference, *twins.others]


SETTINGS = {
    "heads and neurons": {},
    "scale": {"align_scale": True},
    "orthogonal": {"align_residual": "orthogonal", "align_residual_rounds": 2},
}


@pytest.mark.parametrize("parameters", SETTINGS.values(), ids=SETTINGS)
def test_a_twin_returns_by_the_second_driver(parameters, tmp_path, monkeypatch, caplog):
    twins, models = models_of(tmp_path, parameters)
    fast_drivers_fail(monkeypatch)
    out = merged(config("rotation_linear", models, parameters=parameters), tmp_path / "out")
    assert "failed" not in caplog.text
    monkeypatch.undo()
    assert twins.distance(out) < 1e-3


@pytest.mark.parametrize("parameters", SETTINGS.values(), ids=SETTINGS)
def test_heads_stay_where_no_driver_factorises(parameters, tmp_path, monkeypatch, caplog):
    """As a whole, reordered neither, while neurons are moved; one warning names all layers."""
    twins, models = models_of(tmp_path, parameters)
    raw = config("rotation_linear", models, parameters=parameters)
    only = {"align_neurons": not parameters.get("align_scale"), "align_heads": False}
    only |= {"align_query_key": False, "align_value_output": False}
    expected = merged({**raw, "parameters": only}, tmp_path / "expected")
    all_drivers_fail(monkeypatch)
    out = merged(raw, tmp_path / "out")
    assert same(weights(out), weights(expected))
    (warning,) = [r.getMessage() for r in caplog.records if "failed" in r.getMessage()]
    assert warning.startswith(f"{twins.others[0]}: left as they are")
    for layer in range(twins.model.config.num_hidden_layers):
        assert f"attention of default.{layer}" in warning
    assert ("the residual stream" in warning) == ("align_residual" in parameters)


@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral"])
def test_without_assignments_a_merge_is_the_plain_one(case, tmp_path, monkeypatch, caplog):
    twins = Twins(case, tmp_path)
    models = [twins.reference, *twins.others]
    plain = merged(config("linear", models), tmp_path / "plain")

    all_drivers_fail(monkeypatch)
    monkeypatch.setattr(assignment, "linear_sum_assignment", no_number)
    monkeypatch.setattr(torch, "unique", lambda x: x[:0])  # no short cut either
    out = merged(config("rotation_linear", models), tmp_path / "out")
    monkeypatch.undo()
    assert same(weights(out), weights(plain))
    assert caplog.text.count("failed numerically") == 1


def test_a_merge_in_memory_warns_at_once(tmp_path, monkeypatch, caplog):
    twins = Twins("llama", tmp_path)
    plan = planner(config("rotation_linear", [twins.reference, *twins.others]))
    tasks = plan.plan_in_memory()
    all_drivers_fail(monkeypatch)
    assert list(Executor(tasks).run())
    assert caplog.text.count("failed numerically") == twins.model.config.num_hidden_layers
