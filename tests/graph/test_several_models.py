"""Three and more models: each is aligned to the reference as if the others were not there."""

import pytest
import torch

from merging import Twins, changed_copy, config, merged, same, weights

KINDS = ["none", "permutation", "orthogonal"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model, and fine-tunes of it in coordinates of their own."""
    folder = tmp_path_factory.mktemp("llama")
    twins = Twins("llama", folder, count=3)

    def tuned(seed):
        generator = torch.Generator().manual_seed(seed)
        return lambda state: {
            name: x + 0.05 * x.std() * torch.randn(x.shape, generator=generator)
            for name, x in state.items()
        }

    others = [
        changed_copy(twin, folder / f"tuned-{k}", tuned(k)) for k, twin in enumerate(twins.others)
    ]
    return [twins.reference, *others]


def linear(shares, kind, **more):
    """Return a merge of models with weights of their own, in the order of the mapping."""
    raw = config("rotation_linear", list(shares), parameters={"align_residual": kind, **more})
    for entry, weight in zip(raw["models"], shares.values(), strict=True):
        entry["parameters"]["weight"] = weight
    return raw


@pytest.mark.parametrize("kind", KINDS)
def test_no_model_changes_what_happens_to_another(kind, models, tmp_path):
    """Models of weight zero, wherever they stand in the list, change no bit of the others."""
    a, b, c, d = models
    pair = weights(merged(linear({a: 0.5, b: 0.5}, kind), tmp_path / "pair"))
    assert not same(pair, weights(a))
    for order in ((b, c, d), (d, b, c), (c, d, b)):
        shares = {a: 0.5} | {model: 0.5 if model == b else 0.0 for model in order}
        out = tmp_path / "-".join(model.name for model in order)
        assert same(weights(merged(linear(shares, kind), out)), pair)


@pytest.mark.parametrize("kind", KINDS)
def test_an_explicit_reference_makes_the_order_meaningless(kind, models, tmp_path):
    """Sums of two numbers are the same in any order."""
    a, b, c, _ = models
    more = {"align_reference": str(a)}
    first = weights(merged(linear({b: 0.5, c: 0.5}, kind, **more), tmp_path / "first"))
    second = weights(merged(linear({c: 0.5, b: 0.5}, kind, **more), tmp_path / "second"))
    assert same(first, second)


TASK_VECTORS = {
    "task_arithmetic": {"weight": 0.5},
    "ties": {"weight": 0.5, "density": 0.5},
    "dare_ties": {"weight": 0.5, "density": 0.5},
    "della": {"weight": 0.5, "density": 0.5, "epsilon": 0.1},
    "breadcrumbs": {"weight": 0.5, "density": 0.9, "gamma": 0.01},
    "model_stock": {},
    "sce": {"select_topk": 0.5},
    "ram": {},
}


@pytest.mark.parametrize(
    ("method", "kind"), [*((method, "none") for method in TASK_VECTORS), ("ties", "orthogonal")]
)
def test_the_base_may_be_listed_or_not(method, kind, models, tmp_path):
    """It is the reference, stays what it is, and the changes of the others are the same."""
    base, *others = models
    found = []
    for listed in ([base, *others], [*others, base], others):
        raw = config(
            f"rotation_{method}",
            listed,
            weight=None,
            base_model=str(base),
            parameters={"align_residual": kind, **TASK_VECTORS[method]},
        )
        out = tmp_path / str(len(found))
        found.append(weights(merged(raw, out, "--random-seed", "3")))
    assert same(found[0], found[1]) and same(found[0], found[2])
    changes = [
        float((found[0][name] - x).norm() / x.norm())
        for name, x in weights(base).items()
        if x.dim() > 1
    ]
    assert 0 < max(changes) < 0.5  # three changes of 5 %, which some methods add and enlarge
