"""The error that people see."""

import errno
import traceback
from collections.abc import Iterator

import click

_LENGTH = 240
_FULL = "No space left on device", "Disk quota exceeded"


class RotationError(click.ClickException, ValueError):
    """Something about a ``rotation_*`` merge that the user can mend.

    A `click.ClickException`, so that mergekit's commands show one sentence and exit with 1, and
    a `ValueError` for callers of the Python interface.
    """

    def __str__(self) -> str:
        return self.message


def one_line(problem: BaseException) -> str:
    """Return the message of an error in one line of bounded length."""
    text = " ".join(str(problem).split())
    if isinstance(problem, KeyError) or not text:
        text = f"{type(problem).__name__} {text}".strip()
    return text if len(text) <= _LENGTH else text[: _LENGTH - 3] + "..."


def in_one_sentence(problem: BaseException, out_path: str) -> RotationError | None:
    """Return what a user should read instead of a traceback of mergekit or its libraries.

    Parameters
    ----------
    problem : BaseException
        What ended a ``rotation_*`` merge.
    out_path : str

    Returns
    -------
    RotationError, optional
        None for what is a sentence already, for interruptions, and for faults of this package,
        whose traceback has to be seen.
    """
    if isinstance(problem, click.ClickException) or not isinstance(problem, Exception):
        return None
    if any(_is_disk_full(cause) for cause in _causes(problem)):
        return RotationError(
            f"{out_path}: disk full while the merged model was written, and what was written is "
            "removed; free space or choose another output folder"
        )
    if is_out_of_memory(problem):
        return RotationError(
            f"out of memory ({one_line(problem)}); merge without --cuda, --read-to-gpu and "
            "--low-cpu-memory, or where more is free"
        )
    if isinstance(problem, OSError) and problem.strerror is not None:
        place = problem.filename if problem.filename is not None else out_path
        return RotationError(
            f"{place}: {problem.strerror}; make it accessible or choose another path"
        )
    if _is_ours(problem):
        return None
    return RotationError(
        f"mergekit cannot do this merge: {one_line(problem)}; correct the configuration or the "
        "models (-vv shows where this was found)"
    )


def is_out_of_memory(problem: BaseException) -> bool:
    """Tell whether there was no memory left, on any device."""
    import torch  # not at the start: the package can say that something is not installed

    return isinstance(problem, MemoryError | torch.OutOfMemoryError)


def _is_ours(problem: Exception) -> bool:
    """Tell whether an error comes from this package rather than from mergekit, or from below."""
    frames = [frame for frame, _ in traceback.walk_tb(problem.__traceback__)]
    packages = (str(f.f_globals.get("__name__")).partition(".")[0] for f in reversed(frames))
    known = (package for package in packages if package in ("mergekit", __package__.split(".")[0]))
    return next(known, "mergekit") != "mergekit"


def _causes(problem: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it was raised from, or while handling."""
    cause: BaseException | None = problem
    while cause is not None:
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _is_disk_full(problem: BaseException) -> bool:
    if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return any(text in str(problem) for text in _FULL)  # safetensors and torch give no number
