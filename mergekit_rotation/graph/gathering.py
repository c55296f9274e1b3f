"""Merges on several accelerators that do not lose results.

mergekit 0.1.5 lets a thread collect the results of its workers, and that thread stops as soon as
the last worker is done: what still waits in the queue is lost, and tasks that were done run again.
Now and then one of them misses what was dropped since, and a merge that was complete ends with
"No value for required tensor"; without that, tensors are merged and written twice.
"""

import threading
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

from mergekit_rotation.graph.patching import differs, swapped


class Done(threading.Event):
    """An event that is set only once a queue is empty.

    Parameters
    ----------
    results : queue.Queue
    """

    def __init__(self, results: Any):
        super().__init__()
        self._results = results

    def is_set(self) -> bool:
        """Tell whether the event was set and nothing waits."""
        return super().is_set() and bool(self._results.empty())


def gathering(executor: Any) -> type:
    """Return a class of executors like ``MultiGPUExecutor`` that loses no result."""

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        executor.__init__(self, *args, **kwargs)
        if not isinstance(getattr(self, "done_event", None), threading.Event):
            raise differs("MultiGPUExecutor.done_event", "it is no event")
        if not hasattr(self, "task_completion_queue"):
            raise differs("MultiGPUExecutor.task_completion_queue", "there is no such queue")
        self.done_event = Done(self.task_completion_queue)

    return type(executor.__name__, (executor,), {"__init__": made})


def gathered() -> AbstractContextManager[None]:
    """Let merges that run in here lose no result of several accelerators."""
    merge: Any = import_module("mergekit.merge")
    return swapped(merge, MultiGPUExecutor=gathering(merge.MultiGPUExecutor))
