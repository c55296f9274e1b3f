"""Letting mergekit go the way of a merge up to the point where it would begin to read weights."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from mergekit_rotation.graph.patching import swapped


class Reached(BaseException):
    """The merge would now begin to read weights; not an error, so nothing may handle it."""

    def __init__(self, executor: Any):
        self.executor = executor


@contextmanager
def stopped() -> Iterator[list[Any]]:
    """Let mergekit stop where it would execute its plan; yields the planners that it makes."""
    merge: Any = import_module("mergekit.merge")
    planner = merge.MergePlanner
    planners: list[Any] = []

    def stop(executor: Any, *_: Any, **__: Any) -> None:
        raise Reached(executor)

    def keep(self: Any, *args: Any, **kwargs: Any) -> None:
        planner.__init__(self, *args, **kwargs)
        planners.append(self)

    others = {
        name: type(name, (getattr(merge, name),), {"run": stop})
        for name in ("Executor", "MultiGPUExecutor")
    }
    with swapped(
        merge, MergePlanner=type("MergePlanner", (planner,), {"__init__": keep}), **others
    ):
        yield planners


class _Warnings(logging.Handler):
    """Keeps what is said at the level of a warning, each sentence once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.said[record.getMessage()] = None


@contextmanager
def heard() -> Iterator[_Warnings]:
    """Listen to all loggers; what was said is in ``said``."""
    handler, root = _Warnings(), logging.getLogger()
    root.addHandler(handler)
    try:
        yield handler
    finally:
        root.removeHandler(handler)
