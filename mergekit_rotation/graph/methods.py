"""Twins ``rotation_<name>`` of mergekit's merge methods."""

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from mergekit.merge_methods import registry
from mergekit.merge_methods.base import InputContract, MergeMethod, MergeMethodSpec, TensorGroup
from mergekit.merge_methods.passthrough import passthrough_merge_method

from mergekit_rotation.graph.errors import RotationError

PREFIX = "rotation_"
ALIGN = PREFIX + "align"


class AlignedMethod(MergeMethod):
    """A registered name whose work is done by another method on aligned tensors.

    It carries the parameters, input contract and optional-tensor policy of ``plain``. The planner
    replaces it by ``plain`` once the inputs are aligned, so its own kernel must never run.

    Parameters
    ----------
    plain : MergeMethod
        The method that merges the aligned tensors.
    spec : MergeMethodSpec
    """

    def __init__(self, plain: MergeMethod, spec: MergeMethodSpec):
        self.plain = plain
        self.spec = spec

    def _execute(self, groups: Sequence[TensorGroup], *args: Any, **kwargs: Any) -> Any:
        raise RotationError(
            f"{self.spec.name} aligns whole models and needs to know their architecture; "
            f"use it through mergekit-yaml, or use {self.plain.spec.name} here"
        )

    def unused_parameters(self) -> dict[str, Any]:
        """Defaults of parameters that ``plain`` takes per input and the twin does not offer."""
        offered = {parameter.name for parameter in self.spec.parameters}
        return {p.name: p.default for p in self.plain.spec.parameters if p.name not in offered}


def twin(plain: MergeMethod) -> AlignedMethod:
    """Return the ``rotation_`` twin of a method."""
    title = plain.spec.pretty_name or plain.spec.name
    spec = replace(plain.spec, name=PREFIX + plain.spec.name, pretty_name=f"{title} (rotation)")
    return AlignedMethod(plain, spec)


def align_only() -> AlignedMethod:
    """Return ``rotation_align``, which moves one model to the reference and merges nothing."""
    spec = MergeMethodSpec(
        name=ALIGN,
        contract=InputContract(min_inputs=1, max_inputs=1),
        pretty_name="Rotation alignment",
        reference_url="https://arxiv.org/abs/2502.00264",
        uses_accelerator=False,
    )
    return AlignedMethod(passthrough_merge_method, spec)


def register_twins() -> None:
    """Register a twin for every method of the registry, and ``rotation_align``; idempotent."""
    known = {method.spec.name for method in registry.registered_methods()}
    plain = [m for m in registry.registered_methods() if not isinstance(m, AlignedMethod)]
    for method in [*(twin(m) for m in plain), align_only()]:
        if method.spec.name not in known:
            registry.register(method)


def withdraw_twins() -> None:
    """Take ours out of the registry again, for which it has no public way."""
    for name in names():
        getattr(registry, "_METHODS", {}).pop(name, None)


def names() -> list[str]:
    """All registered ``rotation_*`` names."""
    return [m.spec.name for m in registry.registered_methods() if isinstance(m, AlignedMethod)]


def is_rotation(name: object) -> bool:
    """Tell whether a ``merge_method`` value is meant for this package."""
    return isinstance(name, str) and name.startswith("rotation")


def check_name(name: str) -> None:
    """Refuse an unknown ``rotation...`` name, proposing the nearest known one.

    Raises
    ------
    RotationError
    """
    if name in names():
        return
    if not names():
        raise RotationError(f"{name} is not available; run `mergekit-rotation doctor`")
    near = get_close_matches(name.replace("-", "_"), names(), n=1, cutoff=0.0)
    raise RotationError(f"unknown merge method {name!r}; did you mean {near[0]!r}?")


def aligned_method(name: str) -> AlignedMethod | None:
    """Return the twin of this name, or None for a plain method."""
    method = registry.get(name)
    return method if isinstance(method, AlignedMethod) else None
