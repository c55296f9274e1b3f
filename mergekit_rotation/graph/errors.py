"""The error that people see."""

import click


class RotationError(click.ClickException, ValueError):
    """Something about a ``rotation_*`` merge that the user can mend.

    A `click.ClickException`, so that mergekit's commands show one sentence and exit with 1, and
    a `ValueError` for callers of the Python interface.
    """

    def __str__(self) -> str:
        return self.message
