"""The command ``mergekit-rotation``."""

import sys
from importlib import metadata
from pathlib import Path

import click

from mergekit_rotation import startup


class _Commands(click.Group):
    """Adds mergekit's own command as ``yaml``, imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), "yaml"])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name != "yaml":
            return super().get_command(ctx, cmd_name)
        startup.install()
        from mergekit.scripts.run_yaml import main as merge

        return merge


@click.group(cls=_Commands)
@click.version_option(package_name="mergekit-rotation")
def main() -> None:
    """Align transformers by their weight-space symmetries, then merge them with mergekit.

    Use `rotation_<method>` in the YAML of a plain `mergekit-yaml`. `yaml` is the same command for
    places where start-up hooks do not run; `doctor` tells whether they do.
    """


@main.command()
def doctor() -> None:
    """Say what is installed, whether mergekit finds the methods, and what to do if not.

    Exits with 1 when the methods are not available to a plain `mergekit-yaml`.
    """
    hooked = startup.installed() is not None
    for package in ("mergekit-rotation", "mergekit", "torch", "transformers", "safetensors"):
        click.echo(f"{package:18} {_version(package)}")
    click.echo(f"{'start-up hook':18} {_hook_file() or 'not found'}")
    click.echo(f"{'hook has fired':18} {'yes' if hooked else 'no'}")

    advice = _advice(hooked)
    if advice is None:
        from mergekit_rotation.graph import methods

        click.echo(f"{'methods':18} {len(methods.names())}: {', '.join(methods.names())}")
        click.echo(f"{'device':18} {_device()}")
        return
    click.echo(f"\nThe rotation_* methods are not available: {advice}", err=True)
    sys.exit(1)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _hook_file() -> Path | None:
    """Return the ``.pth`` file in a folder on the path, if there is one."""
    for folder in map(Path, sys.path):
        if (folder / "mergekit_rotation.pth").is_file():
            return folder / "mergekit_rotation.pth"
    return None


def _advice(hooked: bool) -> str | None:
    """Return what to do, or None where all is well."""
    import os

    if os.environ.get("MERGEKIT_ROTATION_DISABLE", "0") not in ("", "0"):
        return "MERGEKIT_ROTATION_DISABLE is set; unset it."
    if _version("mergekit") == "not installed":
        return "mergekit is not installed; pip install mergekit."
    if not hooked and _hook_file() is None:
        return (
            "the start-up hook is missing; reinstall mergekit-rotation with pip, or run "
            "`mergekit-rotation yaml CONFIG OUT` in place of mergekit-yaml."
        )
    if not hooked:
        return (
            "the start-up hook did not run (python -S, or a folder that is not site-packages); "
            "run `mergekit-rotation yaml CONFIG OUT` in place of mergekit-yaml."
        )
    import mergekit.merge

    from mergekit_rotation.graph import methods

    finder = startup.installed()
    if finder is None or finder.failed or not methods.names() or mergekit.merge is None:
        return f"mergekit {_version('mergekit')} is not supported; see the message above."
    return None


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()} with --cuda, else the CPU"
    return f"CPU ({torch.get_num_threads()} threads); no GPU found"
