"""Numbers at the ends of their formats, degenerate heads and neurons, every pair of dtypes."""

import json
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
from mergekit_rotation.graph.tasks import AlignBlock
from merging import Twins, changed_copy, config, merge, merged, same, scrambled, weights

FLOAT32 = torch.finfo(torch.float32)
HALVES = (torch.float16, torch.bfloat16)
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "dot", "mv", "linalg")


def rounding(n, *dtypes):
    """Relative error of rows of n entries, rotated in float32 twice and stored in each dtype."""
    return 8 * n**0.5 * FLOAT32.eps + 2 * sum(torch.finfo(dtype).eps for dtype in dtypes)


def distances(out):
    """Relative distances of each layer's blocks after alignment, from alignment.json."""
    report = json.loads((out / "alignment.json").read_text())
    return [part["distance_after"] for layer in report["layers"] for part in layer["blocks"]]


def said(caplog):
    """What we warned of."""
    ours = (r for r in caplog.records if r.name.startswith("mergekit_rotation"))
    return [record.getMessage() for record in ours]


def in_layers(state):
    return [name for name in state if ".layers." in name or ".h." in name]


def assert_returns(out, reference, bound, spacing=0.0):
    """Assert that what was aligned is the reference again, tensor by tensor."""
    goal, found = weights(reference), weights(out)
    for name, tensor in goal.items():
        tensor = tensor.double()
        apart = float((found[name].double() - tensor).norm())
        assert apart <= bound * float(tensor.norm()) + spacing * tensor.numel() ** 0.5, name


# -- dtypes ---------------------------------------------------------------------------------------

DTYPES = (None, "float16", "bfloat16", "float32")
STORED = {
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float16": (torch.float16, torch.float16),
    "float32": (torch.float32, torch.float32),
    "float16 to bfloat16": (torch.bfloat16, torch.float16),
    "bfloat16 to float32": (torch.float32, torch.bfloat16),
    "float32 to float16": (torch.float16, torch.float32),
    "float64": (torch.float64, torch.float64),
}


class Halves(TorchDispatchMode):
    """Collects the products and factorisations that are taken in half precision."""

    def __init__(self):
        super().__init__()
        self.found, self.seen = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__.lstrip("_")
        if name.startswith(PRODUCTS):
            self.seen += 1
            if any(isinstance(x, torch.Tensor) and x.dtype in HALVES for x in args):
                self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory):
    return Twins("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


@pytest.fixture(scope="module", params=STORED.values(), ids=STORED)
def pair(request, one_layer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    return request.param, [
        changed_copy(model, folder / str(k), partial(cast, dtype=dtype))
        for k, (model, dtype) in enumerate(
            zip([one_layer.reference, *one_layer.others], request.param, strict=True)
        )
    ]


def cast(state, dtype):
    return {name: tensor.to(dtype) for name, tensor in state.items()}


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_names_are_those_of_the_plain_method(
    pair, dtype, out_dtype, tmp_path, monkeypatch
):
    """And nothing is solved in half precision, and the twin comes back to rounding."""
    stored, models = pair
    spy, execute = Halves(), AlignBlock.execute

    def watched(task, **kwargs):
        with spy:
            return execute(task, **kwargs)

    monkeypatch.setattr(AlignBlock, "execute", watched)
    outputs = []
    for method in ("rotation_linear", "linear"):
        raw = config(method, models, out_dtype=out_dtype) | {"dtype": dtype}
        outputs.append(merged({k: v for k, v in raw.items() if v}, tmp_path / method))
    ours, plain = (weights(out) for out in outputs)
    assert spy.seen and not spy.found
    assert {n: (t.dtype, t.shape) for n, t in ours.items()} == {
        n: (t.dtype, t.shape) for n, t in plain.items()
    }
    configs = [json.loads((out / "config.json").read_text()) for out in outputs]
    assert configs[0] == configs[1]
    given = [getattr(torch, name) for name in (dtype, out_dtype) if name]
    n = tiny.INTERMEDIATE
    assert_returns(outputs[0], models[0], rounding(n, *stored, *given))


# -- scales ---------------------------------------------------------------------------------------


def times(factors):
    """Multiply the tensors whose name holds a word; by powers of two, which round nothing."""

    def change(state):
        for word, factor in factors.items():
            for name in in_layers(state):
                if word in name:
                    state[name] = state[name] * factor
        return state

    return change


SCALES = {
    "huge": {"_proj": 2.0**100},
    "tiny": {"_proj": 2.0**-100},
    "tiny values, huge outputs": {"v_proj": 2.0**-90, "o_proj": 2.0**90},
    "huge gates": {"gate_proj": 2.0**20, "up_proj": 2.0**-20, "down_proj": 2.0**-20},
}


@pytest.mark.parametrize("more", [{}, {"align_residual": "orthogonal"}], ids=["local", "stream"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("factors", SCALES.values(), ids=SCALES)
def test_a_twin_returns_at_every_scale(factors, dtype, more, one_layer, tmp_path, caplog):
    stored = getattr(torch, dtype)
    models = [
        changed_copy(model, tmp_path / str(k), lambda s: cast(times(factors)(s), stored))
        for k, model in enumerate([one_layer.reference, *one_layer.others])
    ]
    out = merged(config("rotation_linear", models, parameters=more), tmp_path / "out")
    assert_returns(out, models[0], rounding(tiny.INTERMEDIATE, stored))
    after = distances(out)
    assert after and all(x <= rounding(tiny.INTERMEDIATE, stored) for x in after)
    assert not said(caplog)


def test_denormal_numbers_return_to_their_spacing(one_layer, tmp_path):
    """2^-140: nine bits are left; each rounding errs by half the spacing, summed over a row."""
    models = [
        changed_copy(model, tmp_path / str(k), times({"_proj": 2.0**-140}))
        for k, model in enumerate([one_layer.reference, *one_layer.others])
    ]
    plain = weights(merged(config("linear", models), tmp_path / "plain"))
    out = merged(config("rotation_linear", models), tmp_path / "out")
    assert_returns(
        out, models[0], rounding(tiny.INTERMEDIATE), 2 * FLOAT32.smallest_normal * FLOAT32.eps
    )
    assert not same(weights(out), plain)


@pytest.fixture
def at_the_top(one_layer, tmp_path):
    """Write models whose values and outputs reach the largest number of float16."""

    def change(state):
        for name in in_layers(state):
            if "v_proj" in name or "o_proj" in name:
                top = torch.finfo(torch.float16).max / float(state[name].abs().max())
                state[name] = state[name] * top
        return cast(state, torch.float16)

    models = [one_layer.reference, *one_layer.others]
    return [changed_copy(model, tmp_path / str(k), change) for k, model in enumerate(models)]


def test_what_a_rotation_takes_out_of_range_stays(at_the_top, tmp_path, caplog):
    raw = config("rotation_linear", at_the_top) | {"dtype": "float16"}
    out = weights(merged(raw, tmp_path / "out"))
    plain = weights(merged({**raw, "merge_method": "linear"}, tmp_path / "plain"))
    names = [name for name in in_layers(plain) if "self_attn" in name]
    assert names and all(torch.equal(out[name], plain[name]) for name in names)
    assert all(bool(x.isfinite().all()) for x in out.values())
    (warning,) = said(caplog)
    assert warning.startswith(f"{at_the_top[1]}: left as they are") and "range" in warning
    assert "attention of default.0" in warning and "neurons" not in warning


def test_what_a_kept_transformation_takes_out_of_range_is_an_error(at_the_top, tmp_path):
    """Where tensors are moved one by one, it is too late to leave the block as it is."""
    parameters = {"align_save": str(tmp_path / "saved.safetensors")}
    raw = config("rotation_linear", at_the_top, parameters=parameters) | {"dtype": "float16"}
    result = merge(raw, tmp_path / "out")
    assert result.exit_code and str(at_the_top[1]) in result.stderr
    assert "exceeds the range of float16" in result.stderr
    assert not list((tmp_path / "out").glob("*.safetensors"))


# -- degenerate heads and neurons -----------------------------------------------------------------


def heads(state, change):
    """Change queries, keys, values and outputs, seen as (kv, g, head_dim, rest)."""
    for name in in_layers(state):
        if name.endswith("_proj.weight") and "self_attn" in name:
            x = state[name].mT if "o_proj" in name else state[name]
            kv = 2
            view = x.reshape(kv, -1, 16, x.shape[-1]).clone()
            change(name, view)
            x = view.reshape(x.shape)
            state[name] = (x.mT if "o_proj" in name else x).contiguous()
    return state


def dead(name, view):
    view[1] = 0


def repeated(name, view):
    view[1] = view[0]


def rank_one(name, view):
    view[...] = view[..., :1, :] * torch.linspace(1, 2, view.shape[2])[:, None]


def zero(name, view):
    view[...] = 0


def dead_neurons(state):
    for name in in_layers(state):
        if "mlp" in name:
            (state[name].mT if "down" in name else state[name])[::3] = 0
    return state


def equal_neurons(state):
    for name in in_layers(state):
        if "mlp" in name:
            x = state[name].mT if "down" in name else state[name]
            x[1::2] = x[::2]
    return state


DEGENERATE = {
    "dead head": partial(heads, change=dead),
    "repeated heads": partial(heads, change=repeated),
    "heads of rank one": partial(heads, change=rank_one),
    "no attention": partial(heads, change=zero),
    "dead neurons": dead_neurons,
    "equal neurons": equal_neurons,
}


@pytest.mark.parametrize("change", DEGENERATE.values(), ids=DEGENERATE)
def test_degenerate_weights(change, one_layer, tmp_path, caplog):
    """A copy stays bit by bit, a twin comes back."""
    reference = changed_copy(one_layer.reference, tmp_path / "reference", change)
    twin = changed_copy(reference, tmp_path / "twin", scrambled("llama", 1, one_layer.model.config))
    copy = changed_copy(reference, tmp_path / "copy", lambda state: state)
    out = merged(config("rotation_linear", [reference, copy]), tmp_path / "self")
    assert same(weights(out), weights(reference))
    out = merged(config("rotation_linear", [reference, twin]), tmp_path / "out")
    assert_returns(out, reference, rounding(tiny.INTERMEDIATE))
    assert not said(caplog)
