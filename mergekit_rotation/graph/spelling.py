"""Keys of a configuration that mergekit drops: misspelt, at the wrong level, of another method.

mergekit ignores what it does not know. A key that is nearly one that it knows is refused; others
are named in a warning and have no effect, as in a plain merge: published recipes hold some.
"""

import logging
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from mergekit.config import (
    InputModelDefinition,
    InputSliceDefinition,
    MergeConfiguration,
    OutputModuleDefinition,
    OutputSliceDefinition,
)
from mergekit.merge_methods import registry
from mergekit.merge_methods.base import MergeMethodSpec, ParameterSpec
from mergekit.tokenizer.config import TokenizerConfig
from pydantic import BaseModel, ValidationError

from mergekit_rotation.graph.errors import RotationError
from mergekit_rotation.graph.parameters import scalars

LOG = logging.getLogger(__name__)

#: which keys hold lists or mappings of what
_PARTS: dict[type[BaseModel], dict[str, type[BaseModel]]] = {
    MergeConfiguration: {
        "models": InputModelDefinition,
        "slices": OutputSliceDefinition,
        "modules": OutputModuleDefinition,
        "tokenizer": TokenizerConfig,
    },
    OutputModuleDefinition: {"models": InputModelDefinition, "slices": OutputSliceDefinition},
    OutputSliceDefinition: {"sources": InputSliceDefinition},
}


def check_keys(
    config: Mapping[str, Any], method: MergeMethodSpec, ours: Container[str]
) -> tuple[list[str], list[str]]:
    """Check the keys of a raw configuration that are not this package's.

    Parameters
    ----------
    config : mapping
        Of a ``rotation_*`` merge.
    method : MergeMethodSpec
        Its method, whose parameters count as known.
    ours : container of str
        Parameters that are looked at elsewhere.

    Returns
    -------
    dropped, unused : list of str
        Keys that mergekit does not keep, and parameters that the method does not take.

    Raises
    ------
    RotationError
        For a key that is nearly one that mergekit or the method knows, or has a value of the wrong
        type.
    """
    own = {parameter.name for parameter in method.parameters}
    every = {p.name for m in registry.registered_methods() for p in m.spec.parameters}
    dropped, unused = [], []
    for place, mapping, kind in _walk(config, MergeConfiguration, ""):
        for key in (str(key) for key in mapping if key not in kind.model_fields):
            _check_spelling(place, key, kind.model_fields)
            remedy = f" (write it under {place}parameters:)" if key in own else ""
            dropped.append(place + key + remedy)
        given = mapping.get("parameters")
        if "parameters" in kind.model_fields and isinstance(given, Mapping):
            for key in (str(key) for key in given if key not in own and key not in ours):
                if key not in every:
                    _check_spelling(f"{place}parameters.", key, own)
                unused.append(f"{place}parameters.{key}")
            for parameter in (p for p in method.parameters if p.name in given):
                _check_value(f"{place}parameters.{parameter.name}", parameter, given)
    return dropped, unused


def warn_of_keys(method: MergeMethodSpec, keys: Sequence[str]) -> None:
    """Say which keys are without effect."""
    if keys:
        LOG.warning(
            "%s is not told of %s; without effect, as in a plain merge",
            method.name,
            ", ".join(keys),
        )


def _check_spelling(place: str, key: str, known: Iterable[str]) -> None:
    near = get_close_matches(key, list(known), n=1, cutoff=0.8)
    if near:
        raise RotationError(f"unknown key {place}{key}; did you mean {near[0]!r}?")


def _check_value(where: str, parameter: ParameterSpec, given: Mapping[str, Any]) -> None:
    """Refuse a scalar that mergekit would not take, which it finds out without saying where."""
    for scalar in scalars(where, given[parameter.name]):
        try:
            parameter.validate(scalar)
        except ValidationError as problem:
            expected = problem.errors()[0]["msg"]
            raise RotationError(f"{where}: {expected}, not {scalar!r}") from problem


def _walk(
    node: Any, kind: type[BaseModel], place: str
) -> Iterator[tuple[str, Mapping[str, Any], type[BaseModel]]]:
    """Yield (place, mapping, what mergekit reads it as), outermost first."""
    if not isinstance(node, Mapping):
        return
    yield place, node, kind
    for key, part in _PARTS.get(kind, {}).items():
        value = node.get(key)
        if isinstance(value, list):
            for position, item in enumerate(value):
                yield from _walk(item, part, f"{place}{key}[{position}].")
        elif key == "modules" and isinstance(value, Mapping):
            for name, item in value.items():
                yield from _walk(item, part, f"{place}{key}.{name}.")
        else:
            yield from _walk(value, part, f"{place}{key}.")
