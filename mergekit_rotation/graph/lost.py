"""Tensors that do not come through a merge: not listed by mergekit, or not there in every input."""

from collections.abc import Iterable, Mapping

import torch
from mergekit.architecture import WeightInfo
from mergekit.common import ModelReference
from mergekit.io.tasks import LoaderCache, LoadTensor

from mergekit_rotation.architecture import grouped
from mergekit_rotation.graph import run
from mergekit_rotation.graph.checkpoints import Checkpoint
from mergekit_rotation.graph.context import Context

#: ends of the names of tensors that old checkpoints store and that models compute by themselves
_COMPUTED = (".inv_freq", ".masked_bias", ".position_ids", ".attn.bias", ".attention.bias")


def warn_of_lost(
    context: Context, models: Iterable[ModelReference], outputs: Iterable[str]
) -> None:
    """Name the tensors that are lost, with or without alignment, in one warning per model.

    Parameters
    ----------
    context : Context
    models : iterable of ModelReference
        Inputs of the merge.
    outputs : iterable of str
        Names of all planned output tensors.
    """
    planned = set(outputs)
    for model in models:
        lost = lost_tensors(context.checkpoint(model), planned | _listed(context, model))
        if lost:
            context.warn_once(
                f"{model}: mergekit's definition of this architecture does not list "
                f"{', '.join(grouped(lost))}; these tensors will be lost in the output, with or "
                "without alignment; those of the reference fit the merge"
            )


def warn_of_partial(
    context: Context, gathered: Iterable[Mapping[ModelReference, WeightInfo]]
) -> None:
    """Name the optional tensors, such as biases, that only some inputs have.

    Parameters
    ----------
    context : Context
    gathered : iterable of mapping
        For every planned tensor, what it is in each input.
    """
    lacking: dict[tuple[ModelReference, ModelReference], list[str]] = {}
    for inputs in gathered:
        if not any(weight.optional for weight in inputs.values()):
            continue
        has = {model: context.checkpoint(model).has(_load(model, w)) for model, w in inputs.items()}
        owner = next((model for model, there in has.items() if there), None)
        for model, there in has.items():
            if owner is not None and not there:
                lacking.setdefault((model, owner), []).append(inputs[model].name)
    for (model, owner), names in lacking.items():
        context.warn_once(
            f"{model}: has no {', '.join(grouped(names))}, but {owner} has; as in a plain merge "
            "the output gets what the models that have them give, if its config allows for it"
        )


def _load(model: ModelReference, weight: WeightInfo) -> LoadTensor:
    return LoadTensor(
        model=model, tensor=weight.name, aliases=weight.aliases, tied_names=weight.tied_names
    )


def lost_tensors(checkpoint: Checkpoint, known: set[str]) -> list[str]:
    """Return the stored tensors that are none of the known ones, in the order of the files.

    Left out are tensors that a model computes by itself, and a second copy of tied embeddings.
    """
    return [
        name
        for name in checkpoint.index.tensor_paths
        if name not in known
        and not name.endswith(_COMPUTED)
        and known.isdisjoint(checkpoint.converted(name))
        and not _is_tied_copy(checkpoint, name)
    ]


def _listed(context: Context, model: ModelReference) -> set[str]:
    """Return all names that mergekit's definition has for the tensors of a model."""
    weights = context.planner._model_arch(model).all_weights()
    return {n for w in weights for n in (w.name, *(w.aliases or ()), *(w.tied_names or ()))}


def _is_tied_copy(checkpoint: Checkpoint, name: str) -> bool:
    """Tell whether a tensor is an output head that equals the embeddings it is tied to."""
    family, stored = checkpoint.family, checkpoint.index.tensor_paths
    if family is None:
        return False
    for prefix in family.prefixes:
        embedding = family.stream.tied.get(name.removeprefix(prefix))
        if embedding is not None and prefix + embedding in stored:
            if run.current().dry:  # values are not read
                return checkpoint.header(name) == checkpoint.header(prefix + embedding)
            loader = LoaderCache().get(checkpoint.model)
            return torch.equal(loader.get_tensor(name), loader.get_tensor(prefix + embedding))
    return False
