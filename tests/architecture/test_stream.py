"""Every declared map of the residual stream leaves the function of a model unchanged.

As in `test_families`: random elements on tiny random models in float64, with the norms of another
model as the target; each tensor that is forgotten and each map that is too large has to show.
"""

from dataclasses import replace

import pytest
import torch

import tiny
from mergekit_rotation.architecture import all_families, find_family
from mergekit_rotation.symmetry import (
    Orthogonal,
    OrthogonalFixingOnes,
    OrthogonalMap,
    SignedPermutation,
    bias_of,
    into_stream,
    out_of_stream,
    target_norm,
)

LAYER = "${layer_index}"
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


class Model:
    """A tiny model in exact float64, its stream as declared, and the norms of another model."""

    def __init__(self, case, ties):
        build = {"biases": True, **ties}
        self.model = tiny.build(case, seed=3, **build)
        self.inputs = tiny.inputs(case)
        self.state = {k: v.double() for k, v in tiny.state_in_files(self.model).items()}
        other = tiny.build(case, 4, **build)
        self.other = {k: v.double() for k, v in tiny.state_in_files(other).items()}
        config, name = self.model.config, type(self.model).__name__
        self.family = find_family(config, name)
        self.sizes = self.family.layer(config).sizes
        self.stream = self.family.stream_of(name)
        self.tied = bool(getattr(config, "tie_word_embeddings", False))
        self.base = tiny.exact_outputs(self.model, self.inputs, self.state)

    def name(self, template, index):
        local = template.replace(LAYER, str(index))
        names = [p + local for p in self.family.prefixes if p + local in self.state]
        return names[0] if names else None

    def tensors(self, state, index):
        """Tensors by template, of one layer or (index None) of the rest; without tied heads."""
        found = {}
        for template in self.stream.known:
            if (LAYER in template) != (index is not None):
                continue
            name = self.name(template, index)
            if name is not None and not (self.tied and template in self.stream.tied):
                found[template] = state[name]
        return found

    def layout(self, tensors):
        """The layout with the norms carried that some reader has no bias for."""
        layout = self.stream.layout
        carried = {
            norm
            for norm, readers in layout.readers.items()
            if any(r in tensors and bias_of(r) not in tensors for r in readers)
        }
        return replace(layout, carried=frozenset(carried))

    def moved(self, stream, forget=None, fold=True):
        """Return the state in new coordinates, with the norms of the other model."""
        state = dict(self.state)
        for index in (*range(tiny.LAYERS), None):
            tensors = self.tensors(self.state, index)
            layout = self.layout(tensors)
            targets = {}
            for norm, readers in layout.readers.items():
                if norm not in tensors:
                    continue
                own = layout.norm(norm, tensors)
                reference = layout.norm(norm, self.tensors(self.other, index))
                if not fold or not any(reader in tensors for reader in readers):
                    reference = None
                targets[norm] = target_norm(own, reference, stream)
            moved = into_stream(tensors, tensors, layout, stream)
            for template, x in out_of_stream(
                moved, tensors, tensors, layout, stream, targets
            ).items():
                if template != forget:
                    state[self.name(template, index)] = x
        for head, embedding in self.stream.tied.items():
            if self.tied and self.name(head, None):
                state[self.name(head, None)] = state[self.name(embedding, None)]
        return state

    def change(self, *args, **kwargs):
        state = self.moved(*args, **kwargs)
        return float((tiny.exact_outputs(self.model, self.inputs, state) - self.base).abs().max())

    def tolerance(self):
        """c n eps, with the products that the map adds to every tensor and the norms' condition."""
        sizes = self.sizes
        width = sizes.get("f", 0) + sizes.get("x", 0) * sizes.get("xf", 0) + sizes.get("sf", 0)
        n = tiny.LAYERS * (3 * sizes["e"] + width + sizes["heads"] * sizes["qk"])
        weights = [
            (w.double() + self.stream.layout.offset).abs()
            for state in (self.state, self.other)
            for index in (*range(tiny.LAYERS), None)
            for norm, w in self.tensors(state, index).items()
            if norm in self.stream.layout.readers
        ]
        ratio = max((float(w.max() / w.min()) for w in weights), default=1.0)
        return 8 * n * torch.finfo(torch.float64).eps * ratio * float(self.base.abs().max())


def draw(model, kind, group=None):
    generator = torch.Generator().manual_seed(7)
    size = model.sizes["e"]
    if kind == "orthogonal":
        group = group or (OrthogonalFixingOnes if model.stream.layout.layer_norm else Orthogonal)
        return OrthogonalMap(group(size).sample(1, generator)[0])
    sign = 2.0 * torch.randint(2, (size,), generator=generator).double() - 1
    if model.stream.layout.layer_norm:
        sign = -torch.ones(size, dtype=torch.float64)
    return SignedPermutation(torch.randperm(size, generator=generator), sign)


def identifier(value):
    return (
        value
        if isinstance(value, str)
        else {None: "", True: "tied", False: "untied"}[value.get("tie_word_embeddings")]
    )


@pytest.fixture(scope="module", params=CASES, ids=lambda p: "-".join(map(identifier, p)))
def model(request):
    return Model(*request.param)


def exact_maps(model):
    """The declared maps that this model allows as it is: a tied head needs its embeddings."""
    has_tied_head = model.tied and any(model.name(head, None) for head in model.stream.tied)
    return [kind for kind in model.stream.maps if kind == "permutation" or not has_tied_head]


def test_random_maps_leave_the_function_unchanged(model):
    for kind in exact_maps(model):
        assert model.change(draw(model, kind)) <= model.tolerance(), kind
        assert model.change(draw(model, kind), fold=False) <= model.tolerance(), kind


def test_each_forgotten_tensor_changes_the_function(model):
    threshold = 1e3 * model.tolerance()
    kind = exact_maps(model)[-1]
    for template in model.stream.layout.patterns:
        here = [i for i in (0, None) if template in model.tensors(model.state, i)]
        if here:
            assert model.change(draw(model, kind), forget=template) > threshold, template


def test_larger_maps_change_the_function(model):
    threshold = 1e3 * model.tolerance()
    if model.stream.layout.layer_norm and "orthogonal" in exact_maps(model):
        assert model.change(draw(model, "orthogonal", Orthogonal)) > threshold
    if "orthogonal" in model.stream.maps and "orthogonal" not in exact_maps(model):
        assert model.change(draw(model, "orthogonal")) > threshold, "tied embeddings kept tied"
    if model.stream.layout.layer_norm:
        one = draw(model, "permutation")
        sign = torch.ones_like(one.sign)
        sign[0] = -1
        assert model.change(SignedPermutation(one.index, sign)) > threshold, "one sign"


def test_every_tensor_of_a_model_is_declared(model):
    declared = {
        model.name(template, index)
        for template in model.stream.known
        for index in range(tiny.LAYERS)
    }
    assert set(model.state) <= declared


def test_families_with_norms_after_a_branch_do_not_rotate():
    rigid = {family.family for family in all_families() if family.stream.maps == ("permutation",)}
    assert rigid == {
        "baichuan", "bert", "deberta", "deberta_v2", "distilbert", "exaone4", "gemma2", "gemma3",
        "glm4", "mpnet", "olmo2", "roberta", "vit",
    }  # fmt: skip
