"""Letting mergekit go the way of a merge up to the point where it would begin to read weights."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


class Reached(BaseException):
    """The merge would now begin to read weights; not an error, so nothing may handle it."""

    def __init__(self, executor: Any):
        self.executor = executor


@contextmanager
def stopped() -> Iterator[list[Any]]:
    """Let mergekit stop where it would execute its plan; yields the planners that it makes."""
    merge = import_module("mergekit.merge")
    names = ("Executor", "MultiGPUExecutor", "MergePlanner")
    before = {name: getattr(merge, name) for name in names}
    planners: list[Any] = []

    def stop(executor: Any, *_: Any, **__: Any) -> None:
        raise Reached(executor)

    def keep(planner: Any, *args: Any, **kwargs: Any) -> None:
        before["MergePlanner"].__init__(planner, *args, **kwargs)
        planners.append(planner)

    for name, kind in before.items():
        change = {"__init__": keep} if name == "MergePlanner" else {"run": stop}
        setattr(merge, name, type(name, (kind,), change))
    try:
        yield planners
    finally:
        for name, kind in before.items():
            setattr(merge, name, kind)


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
