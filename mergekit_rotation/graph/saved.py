"""Transformations in files: one safetensors file for all models of a merge."""

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from mergekit.common import ModelReference
from safetensors import safe_open
from safetensors.torch import save_file

from mergekit_rotation.architecture import LAYER
from mergekit_rotation.graph import run
from mergekit_rotation.graph.errors import RotationError
from mergekit_rotation.graph.moving import Fingerprints, fingerprint
from mergekit_rotation.graph.reading import ModelTensors
from mergekit_rotation.symmetry import (
    Element,
    Linear,
    ModelTransformation,
    Norm,
    OrthogonalMap,
    Permute,
    Rotate,
    Scale,
    Sign,
    SignedPermutation,
    StreamMap,
)

FORMAT = "mergekit-rotation transformation 2"
KEY = "align_save"
"""The one entry of the metadata: safetensors writes several in another order each time."""


@dataclass(frozen=True)
class Entry:
    """One transformation of a file.

    Attributes
    ----------
    transformation : ModelTransformation
    about : mapping
        Model, reference, family, sizes and number of layers.
    own, reference : Fingerprints
        Of the tensors that it was solved from.
    """

    transformation: ModelTransformation
    about: Mapping[str, Any]
    own: Fingerprints
    reference: Fingerprints


def write(
    path: str,
    reference: ModelTensors,
    solved: Mapping[ModelReference, ModelTransformation],
    fingerprints: Mapping[ModelReference, tuple[Fingerprints, Fingerprints]],
    tensors: Mapping[ModelReference, ModelTensors],
) -> None:
    """Save the transformations of all models of a merge.

    Parameters
    ----------
    path : str
        Written at once, or not at all.
    reference : ModelTensors
    solved : mapping of model to ModelTransformation
    fingerprints : mapping of model to (Fingerprints of the model, of the reference)
    tensors : mapping of model to ModelTensors

    Raises
    ------
    RotationError
        If the file cannot be written.
    """
    data: dict[str, torch.Tensor] = {}
    about: list[dict[str, Any]] = []
    for number, (model, transformation) in enumerate(solved.items()):
        for key, x in flatten(transformation).items():
            data[f"{number}/{key}"] = x.detach().cpu().contiguous()
        own, theirs = fingerprints[model]
        about.append(
            {
                "model": str(model),
                "reference": str(reference.model),
                **_identity(tensors[model]),
                "own_fingerprints": _to_json(own),
                "reference_fingerprints": _to_json(theirs),
            }
        )
    contents = {
        "format": FORMAT,
        "mergekit_rotation": version("mergekit-rotation"),
        "mergekit": version("mergekit"),
        "torch": version("torch"),
        "models": about,
    }
    metadata = {KEY: json.dumps(contents)}
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        save_file(data, path + ".part", metadata=metadata)
        os.replace(path + ".part", path)
    except OSError as problem:
        raise RotationError(f"align_save: cannot write {path} ({problem})") from problem


def check_writable(path: str) -> None:
    """Refuse a path to which `write` could not write; nothing is left there.

    Raises
    ------
    RotationError
    """
    folder = os.path.dirname(os.path.abspath(path))
    try:
        with run.folders(folder, keep=False):
            if os.path.isdir(path):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            with open(path + ".part", "wb"):
                pass
            os.remove(path + ".part")
    except OSError as problem:
        raise RotationError(f"align_save: cannot write {path} ({problem})") from problem


def read(path: str) -> list[Entry]:
    """Read the transformations of a file.

    Raises
    ------
    RotationError
        If it cannot be read or is no file of ours.
    """
    try:
        with safe_open(path, framework="pt") as file:
            contents = json.loads((file.metadata() or {}).get(KEY, "{}"))
            data = {name: file.get_tensor(name) for name in file.keys()}
    except Exception as problem:
        raise RotationError(f"align_load: cannot read {path} ({problem})") from problem
    if contents.get("format") != FORMAT:
        raise RotationError(
            f"align_load: {path} is not a file that align_save of this version has written"
        )
    entries = []
    for number, about in enumerate(contents["models"]):
        prefix = f"{number}/"
        mine = {k.removeprefix(prefix): x for k, x in data.items() if k.startswith(prefix)}
        entries.append(
            Entry(
                unflatten(mine),
                about,
                _from_json(about["own_fingerprints"]),
                _from_json(about["reference_fingerprints"]),
            )
        )
    return entries


def choose(path: str, entries: list[Entry], tensors: ModelTensors, unchecked: bool) -> Entry:
    """Return the entry for a model, checked against it.

    Raises
    ------
    RotationError
        If the file has none, or it was solved for another family, shape or other weights.
    """
    model = str(tensors.model)
    named = [entry for entry in entries if entry.about["model"] == model]
    if not named and len(entries) == 1:
        named = entries
    if not named:
        known = ", ".join(str(entry.about["model"]) for entry in entries)
        raise RotationError(f"align_load: {path} has no transformation of {model}, only of {known}")
    entry = named[0]
    for key, value in _identity(tensors).items():
        if entry.about[key] != value:
            raise RotationError(
                f"align_load: {path} was solved for a model with {key} {entry.about[key]}, "
                f"{model} has {value}"
            )
    if not unchecked:
        for (template, index), digest in entry.own.items():
            if index in (None, 0):
                check_fingerprint(path, tensors, template, index, digest)
    return entry


def check_fingerprint(
    path: str, tensors: ModelTensors, template: str, index: int | None, digest: str
) -> None:
    """Refuse a model whose tensor is not the one that a transformation was solved from.

    Raises
    ------
    RotationError
    """
    x = tensors.read(template, index)
    if x is not None and x.is_meta:
        return
    if x is None or fingerprint(x) != digest:
        named = template.replace(LAYER, str(index))
        raise RotationError(
            f"align_load: {path} was solved for other weights than those of {tensors.model} "
            f"({named} differs); solve again, or set align_load_unchecked: true"
        )


def _identity(tensors: ModelTensors) -> dict[str, Any]:
    return {
        "family": tensors.family.family,
        "sizes": dict(tensors.layer.sizes),
        "layers": tensors.num_layers,
    }


def _to_json(fingerprints: Fingerprints) -> list[list[Any]]:
    return [[template, index, digest] for (template, index), digest in fingerprints.items()]


def _from_json(items: list[list[Any]]) -> Fingerprints:
    return {(template, index): digest for template, index, digest in items}


# -- transformations as flat mappings of tensors ---------------------------------------------------


def flatten(transformation: ModelTransformation) -> dict[str, torch.Tensor]:
    """Return a transformation as a mapping of names to tensors."""
    result: dict[str, torch.Tensor] = {}
    stream = transformation.stream
    if isinstance(stream, SignedPermutation):
        result |= {"stream/index": stream.index, "stream/sign": stream.sign}
    elif stream is not None:
        result["stream/q"] = stream.q
    for (norm, a, b), value in transformation.norms.items():
        result[f"norm/{norm}/{a}/{b}/weight"] = value.weight
        if value.bias is not None:
            result[f"norm/{norm}/{a}/{b}/bias"] = value.bias
    for (kind, a, b), elements in transformation.blocks.items():
        result[f"block/{kind}/{a}/{b}"] = torch.tensor(len(elements))
        for position, element in enumerate(elements):
            key = f"block/{kind}/{a}/{b}/{position}"
            if isinstance(element, Permute):
                result[f"{key}/permute/{element.axis}/{element.per or ''}"] = element.index
            elif isinstance(element, Rotate):
                result[f"{key}/rotate/{element.axis}/{element.per}"] = element.matrix
            elif isinstance(element, Linear):
                both = torch.stack([element.matrix, element.dual])
                result[f"{key}/linear/{element.axis}/{element.per}"] = both
            elif isinstance(element, Scale):
                result[f"{key}/scale/{element.axis}/{element.per or ''}"] = element.factor
            else:
                result[f"{key}/sign/{element.axis}/{element.per or ''}"] = element.sign
    return result


def unflatten(data: Mapping[str, torch.Tensor]) -> ModelTransformation:
    """Undo `flatten`."""
    stream: StreamMap | None = None
    if "stream/q" in data:
        stream = OrthogonalMap(data["stream/q"])
    elif "stream/index" in data:
        stream = SignedPermutation(data["stream/index"], data["stream/sign"])
    norms = {}
    blocks: dict[tuple[str, int, int], dict[int, Element]] = {}
    for key, x in data.items():
        parts = key.split("/")
        if parts[0] == "norm" and parts[4] == "weight":
            name, a, b = parts[1], int(parts[2]), int(parts[3])
            norms[name, a, b] = Norm(x, data.get(f"norm/{name}/{a}/{b}/bias"))
        elif parts[0] == "block":
            elements = blocks.setdefault((parts[1], int(parts[2]), int(parts[3])), {})
            if len(parts) > 4:
                elements[int(parts[4])] = _element(parts[5], parts[6], parts[7], x)
    ordered = {key: tuple(found[k] for k in sorted(found)) for key, found in blocks.items()}
    return ModelTransformation(stream, norms, ordered)


def _element(kind: str, axis: str, per: str, x: torch.Tensor) -> Element:
    if kind == "permute":
        return Permute(axis, x, per or None)
    if kind == "linear":
        return Linear(axis, x[0], x[1], per)
    if kind == "scale":
        return Scale(axis, x, per or None)
    return Rotate(axis, x, per) if kind == "rotate" else Sign(axis, x, per or None)
