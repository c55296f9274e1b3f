"""Make ``rotation_*`` methods known to mergekit, if and when mergekit is imported.

``install`` is called once by every Python process of an environment that has this package
(``mergekit_rotation.pth`` and, from Python 3.15 on, ``mergekit_rotation.start``). It imports
nothing but ``sys`` and only puts a finder on `sys.meta_path`, which waits for five mergekit
modules and hands each, when it has been executed, to `mergekit_rotation.graph.seams`. Set
``MERGEKIT_ROTATION_DISABLE=1`` to turn it off.
"""

import sys

#: mergekit modules that are completed after their import
SEAMS = (
    "mergekit.merge_methods",
    "mergekit.config",
    "mergekit.plan",
    "mergekit.merge",
    "mergekit.evo.genome",
)


class _Finder:
    """Meta-path finder that lets the others find, and adds a step after execution."""

    def __init__(self):
        self.looking = set()
        self.failed = False

    def find_spec(self, name, path=None, target=None):
        if name not in SEAMS or name in self.looking:
            return None
        self.looking.add(name)
        try:
            import importlib.util

            spec = importlib.util.find_spec(name)
        finally:
            self.looking.discard(name)
        if spec is None or not hasattr(spec.loader, "exec_module"):
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            if module.__name__ == name:  # modules of a zip file share one loader
                self.complete(name)

        spec.loader.exec_module = exec_module
        return spec

    def complete(self, name):
        """Hand one executed module over; a failure is told once and never raised."""
        import os

        if self.failed or os.environ.get("MERGEKIT_ROTATION_DISABLE", "0") not in ("", "0"):
            return
        try:
            from mergekit_rotation.graph import seams

            seams.complete(name)
        except Exception as problem:
            self.failed = True
            if sys.stderr is not None:
                print(f"mergekit-rotation is not available: {problem}", file=sys.stderr)


def installed():
    """Return the finder if it is on `sys.meta_path`, else None."""
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            return finder
    return None


def install():
    """Wait for mergekit; modules that are imported already are completed at once."""
    if installed() is not None:
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    for name in SEAMS:
        if name in sys.modules:
            finder.complete(name)
