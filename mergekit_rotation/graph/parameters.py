"""The ``align_*`` parameters: strict reading of the YAML, and their values while planning.

They live under ``parameters:`` beside those of the merge method, with mergekit's filters and
gradients, but never enter a method's own parameters.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from mergekit.common import ModelReference, dtype_from_name
from mergekit.config import ConfigReader, MergeConfiguration
from mergekit.merge_methods.base import ParameterScope, ParameterSpec
from mergekit.parameter_resolver import resolve_parameter
from pydantic import StrictBool

from mergekit_rotation.graph.errors import RotationError

SWITCHES = (
    "align_query_key",
    "align_value_output",
    "align_heads",
    "align_neurons",
    "align_experts",
    "align_scale",
)
#: switches that are off unless they are asked for
OFF = ("align_scale",)
CHOICES: dict[str, tuple[str, ...]] = {"align_unsupported": ("error", "skip")}
REFERENCE = "align_reference"
RESIDUAL = ("none", "permutation", "orthogonal")
#: written once, at the top level
WHOLE = (
    "align_residual",
    "align_residual_rounds",
    "align_save",
    "align_load",
    "align_load_unchecked",
    "align_architecture",
    "align_report",
)
#: written under an input
PER_INPUT = ("align_as", "align_task_base")
KNOWN = (*SWITCHES, *CHOICES, REFERENCE, *WHOLE, *PER_INPUT)

_SPECS = {
    **{
        name: ParameterSpec(name, StrictBool, ParameterScope.INPUT, name not in OFF)
        for name in SWITCHES
    },
    **{
        name: ParameterSpec(name, str, ParameterScope.INPUT, values[0])
        for name, values in CHOICES.items()
    },
    REFERENCE: ParameterSpec(REFERENCE, str | None, ParameterScope.SHARED, None),
}


@dataclass(frozen=True)
class WholeModel:
    """The parameters that concern whole models.

    Attributes
    ----------
    residual : {"none", "permutation", "orthogonal"}
    rounds : int
    save, load : str, optional
        Files of transformations.
    unchecked : bool
        Accept a loaded transformation that was solved for other weights.
    """

    residual: str = "none"
    rounds: int = 1
    save: str | None = None
    load: str | None = None
    unchecked: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, Any] | None) -> "WholeModel":
        """Read the top-level ``parameters:``."""
        given = settings or {}
        return cls(
            residual=given.get("align_residual", "none"),
            rounds=int(given.get("align_residual_rounds", 1)),
            save=given.get("align_save"),
            load=given.get("align_load"),
            unchecked=bool(given.get("align_load_unchecked", False)),
        )

    def used(self) -> bool:
        """Tell whether any of them asks for more than alignment block by block."""
        return self.residual != "none" or self.save is not None or self.load is not None


def check_mapping(config: Mapping[str, Any]) -> None:
    """Check every ``align_*`` key of a raw configuration before mergekit parses it.

    Raises
    ------
    RotationError
        For a misspelt or misplaced key or a value of the wrong type, with the nearest name and
        place.
    """
    for entry in ("dtype", "out_dtype"):
        _check_dtype(entry, config.get(entry))
    for place, mapping, is_parameters in _walk(config, ""):
        for key in mapping:
            name = _meant(key)
            if name is None:
                continue
            where = f"{place}{key}" if place else str(key)
            if name != key:
                raise RotationError(f"unknown parameter {where}; did you mean {name!r}?")
            if not is_parameters:
                raise RotationError(
                    f"{where} stands where mergekit drops it; write it under "
                    f"{place}parameters: instead"
                )
            _check_value(where, name, mapping[key])


def with_paths(node: Any) -> Any:
    """Return a configuration in which the models that our parameters name are paths again."""
    if isinstance(node, list):
        return [with_paths(item) for item in node]
    if not isinstance(node, Mapping):
        return node
    return {
        key: str(ModelReference.model_validate(value))
        if key in (REFERENCE, *PER_INPUT) and _is_model(value)
        else with_paths(value)
        for key, value in node.items()
    }


def _is_model(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value) == set(ModelReference.model_fields)


def _walk(node: Any, place: str) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Yield (place, mapping, whether it is a ``parameters:`` mapping) for the whole tree."""
    if isinstance(node, Mapping):
        in_parameters = place.endswith("parameters.")
        yield place, node, in_parameters
        for key, value in node.items():
            if not in_parameters and key != "tokens":  # whose keys are a user's tokens
                yield from _walk(value, f"{place}{key}.")
    elif isinstance(node, list):
        for position, value in enumerate(node):
            yield from _walk(value, f"{place.removesuffix('.')}[{position}].")


def _meant(key: Any) -> str | None:
    """Return the parameter of ours that a key is, or is a misspelling of."""
    if not isinstance(key, str):
        return None
    if key in KNOWN:
        return key
    near = get_close_matches(key, KNOWN, n=1, cutoff=0.0 if key.startswith("align") else 0.8)
    return near[0] if near else None


def _check_value(where: str, name: str, value: Any) -> None:
    if name == REFERENCE:
        if not isinstance(value, str) or not value:
            raise RotationError(f"{where}: write the path of one model, not {value!r}")
        if ".parameters." in "." + where and not _is_shared(where):
            raise RotationError(
                f"{where}: the reference belongs to the whole merge or to a slice; write it "
                "under the top-level parameters:"
            )
        return
    if name in WHOLE or name in PER_INPUT:
        _check_single(where, name, value)
        return
    for scalar in scalars(where, value):
        if name in CHOICES and scalar not in CHOICES[name]:
            options = " or ".join(CHOICES[name])
            raise RotationError(f"{where}: write {options}, not {scalar!r}")
        if name in SWITCHES and not isinstance(scalar, bool):
            raise RotationError(f"{where}: write true or false, not {scalar!r}")


def _check_single(where: str, name: str, value: Any) -> None:
    """Check a parameter that takes neither filters nor gradients."""
    if name in WHOLE and where != f"parameters.{name}":
        raise RotationError(
            f"{where}: {name} belongs to the whole merge; write it under the top-level parameters:"
        )
    if name in PER_INPUT and _is_shared(where):
        raise RotationError(
            f"{where}: {name} belongs to one input; write it under the parameters: of a model"
        )
    if name == "align_residual":
        if value not in RESIDUAL:
            raise RotationError(f"{where}: write {' or '.join(RESIDUAL)}, not {value!r}")
    elif name == "align_residual_rounds":
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RotationError(f"{where}: write a whole number from 1 on, not {value!r}")
    elif name in ("align_load_unchecked", "align_report"):
        if not isinstance(value, bool):
            raise RotationError(f"{where}: write true or false, not {value!r}")
    elif not isinstance(value, str) or not value:
        raise RotationError(f"{where}: write one path, not {value!r}")


def _is_shared(where: str) -> bool:
    owner = where.rsplit("parameters.", 1)[0]
    return "sources[" not in owner and "models[" not in owner


def _check_dtype(name: str, value: Any) -> None:
    """Refuse what mergekit would not know only once it reads tensors."""
    try:
        dtype = dtype_from_name(value)
    except (RuntimeError, AttributeError):
        dtype = None
    if value is not None and (dtype is None or not dtype.is_floating_point):
        raise RotationError(f"{name}: write bfloat16, float16, float32 or float64, not {value!r}")


def scalars(where: str, value: Any) -> Iterator[Any]:
    """Yield the scalars of a setting with filters and gradients."""
    if isinstance(value, list):
        if not value:
            raise RotationError(f"{where}: the list is empty")
        for item in value:
            yield from scalars(where, item)
    elif isinstance(value, Mapping):
        if set(value) - {"value", "filter"} or "value" not in value:
            raise RotationError(f"{where}: a condition has the keys filter and value")
        yield from scalars(where, value["value"])
    else:
        yield value


def resolve_switch(
    name: str, reader: ConfigReader, model: ModelReference, tensors: Iterable[str]
) -> bool:
    """Return one boolean parameter for all tensors of a symmetry.

    Raises
    ------
    RotationError
        If a filter gives different answers for tensors that only move together.
    """
    sources = tuple(reader.parameter_sources(model))
    answers = {
        tensor: resolve_parameter(
            _SPECS[name], sources, tensor_name=tensor, t=reader.t, model=model
        )
        for tensor in tensors
    }
    if len(set(answers.values())) > 1:
        on = next(tensor for tensor, answer in answers.items() if answer)
        off = next(tensor for tensor, answer in answers.items() if not answer)
        raise RotationError(
            f"{name}: the filter is true for {on} and false for {off} of {model}, which only "
            "move together; choose a filter that covers both"
        )
    return all(answers.values())


def resolve_choice(name: str, reader: ConfigReader, model: ModelReference, tensor: str) -> str:
    """Return one parameter of fixed choices for a model and layer."""
    sources = tuple(reader.parameter_sources(model))
    value = resolve_parameter(_SPECS[name], sources, tensor_name=tensor, t=reader.t, model=model)
    return str(value)


def named_model(name: str, settings: Sequence[Mapping[str, Any] | None]) -> ModelReference | None:
    """Return the model that ``align_as`` or ``align_task_base`` of one input names."""
    value = next((s[name] for s in settings if s and s.get(name)), None)
    return ModelReference.parse(str(value)) if value else None


def named_models(config: MergeConfiguration) -> list[ModelReference]:
    """Return all models that ``align_as`` or ``align_task_base`` name anywhere."""
    outputs = [config, *(config.modules or {}).values()]
    slices = [s for output in outputs for s in output.slices or []]
    inputs = [source for s in slices for source in s.sources]
    inputs += [entry for output in outputs for entry in output.models or []]
    found = [named_model(name, [i.parameters]) for i in inputs for name in PER_INPUT]
    return list(dict.fromkeys(model for model in found if model is not None))


def architecture(settings: Mapping[str, Any] | None) -> str | None:
    """Return ``align_architecture`` from the top-level ``parameters:``."""
    path = (settings or {}).get("align_architecture")
    return str(path) if path else None


def report(settings: Mapping[str, Any] | None) -> bool:
    """Return ``align_report`` from the top-level ``parameters:``."""
    return bool((settings or {}).get("align_report", True))


def explicit_reference(settings: Sequence[Mapping[str, Any] | None]) -> ModelReference | None:
    """Return ``align_reference`` from the innermost ``parameters:`` that has it."""
    value = resolve_parameter(_SPECS[REFERENCE], settings, tensor_name="")
    return ModelReference.parse(value) if value else None
