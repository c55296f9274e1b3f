"""Replacing functions of mergekit's, and what is said of a mergekit that nobody tried."""

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

from mergekit_rotation.graph.errors import RotationError, one_line

LOG = logging.getLogger(__name__)

TESTED = "0.1.5"
_REMEDY = f"install mergekit=={TESTED} or a newer mergekit-rotation"


class SeamError(RuntimeError):
    """mergekit is not as this version of the package knows it."""


def found_version() -> str:
    """Return the version of mergekit that is installed."""
    try:
        return version("mergekit")
    except PackageNotFoundError:
        return "of unknown version"


def differs(place: str, how: str) -> SeamError:
    """Return the error that says where mergekit is not what was expected."""
    return SeamError(
        f"mergekit {found_version()} differs from {TESTED} at {place} ({how}); {_REMEDY}"
    )


@functools.cache
def warn_of_version() -> None:
    """Say once that mergekit is one that nobody tried, though every seam is in its place."""
    if found_version() != TESTED:
        LOG.warning(
            "mergekit %s is not the tested %s; check the merged model, or %s",
            found_version(),
            TESTED,
            _REMEDY,
        )


def fault_of_version(problem: BaseException) -> RotationError | None:
    """Return what to say of a fault of ours under a mergekit that nobody tried."""
    unexpected = isinstance(problem, Exception) and not isinstance(problem, click.ClickException)
    if not unexpected or found_version() == TESTED:
        return None
    kind = type(problem).__name__
    return RotationError(str(differs("a rotation_* merge", f"{kind}: {one_line(problem)}")))


def class_of(module: str, name: str) -> Any:
    """Return a class of mergekit's."""
    found = getattr(sys.modules.get(module), name, None)
    if not isinstance(found, type):
        raise differs(f"{module}.{name}", "there is no such class")
    return found


def expect(owner: Any, name: str, parameters: tuple[str, ...]) -> Any:
    """Return a callable of mergekit's if it takes the parameters that we rely on."""
    function = getattr(owner, name, None)
    found = tuple(inspect.signature(function).parameters) if callable(function) else None
    if found is None or found[: len(parameters)] != parameters:
        place = f"{getattr(owner, '__name__', owner)}.{name}"
        raise differs(place, f"{found} instead of {parameters}")
    return function


def is_stock(function: Any) -> bool:
    """Tell whether a function of mergekit's has not been wrapped by us yet."""
    return not getattr(inspect.unwrap(function, stop=_is_ours), "_mergekit_rotation", False)


def _is_ours(function: Any) -> bool:
    return bool(getattr(function, "_mergekit_rotation", False))


def wrap(owner: Any, name: str, parameters: tuple[str, ...], wrapper: Callable[..., Any]) -> None:
    """Replace a function of mergekit's by ``wrapper(original, *args, **kwargs)``."""
    original = expect(owner, name, parameters)
    if not is_stock(original):
        return

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    replacement._mergekit_rotation = True  # type: ignore[attr-defined]
    setattr(owner, name, replacement)


@contextmanager
def swapped(owner: Any, **others: Any) -> Iterator[None]:
    """Let attributes of something of mergekit's be others for a while."""
    before = {name: getattr(owner, name) for name in others}
    for name, other in others.items():
        setattr(owner, name, other)
    try:
        yield
    finally:
        for name, stock in before.items():
            setattr(owner, name, stock)
