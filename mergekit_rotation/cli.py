"""The command ``mergekit-rotation``."""

import importlib
import sys
from importlib import metadata
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from mergekit_rotation import startup
from mergekit_rotation.insight.commands import (
    MISSING,
    align,
    barrier,
    compare,
    mergekit_with_methods,
    verify,
)


def _merge() -> click.Command:
    """Return mergekit's own command, with our methods in it."""
    with mergekit_with_methods():
        from mergekit.scripts.run_yaml import main as merge
    return merge


class _Yaml(click.Command):
    """Stands for ``yaml`` in lists, which are not to wait seconds for mergekit."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete options by mergekit's command, and all else by names of files."""
        if incomplete.startswith("-"):
            return _merge().shell_complete(ctx, incomplete)
        return super().shell_complete(ctx, incomplete)


_YAML = _Yaml(
    "yaml",
    params=[click.Argument([name], type=click.Path()) for name in ("config", "out")],
    short_help="mergekit-yaml, where start-up hooks do not run.",
)


class _Commands(click.Group):
    """Adds mergekit's own command as ``yaml``, imported when it is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), "yaml"])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name != "yaml":
            return super().get_command(ctx, cmd_name)
        return _YAML if ctx.resilient_parsing else _merge()  # resilient: of the shell's completion

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing mergekit."""
        commands = {**self.commands, "yaml": _YAML}
        rows = [(name, command.get_short_help_str(56)) for name, command in commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(sorted(rows))


@click.group(cls=_Commands)
@click.version_option(package_name="mergekit-rotation")
def main() -> None:
    """Align transformers by their weight-space symmetries, then merge them with mergekit.

    Use `rotation_<method>` in the YAML of a plain `mergekit-yaml`. `yaml` is the same command for
    places where start-up hooks do not run; `doctor` tells whether they do.
    """


main.add_command(align)
main.add_command(barrier)
main.add_command(compare)
main.add_command(verify)


@main.command(short_help="Say what is installed, and what to do if it fails.")
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


@main.command("check-architecture")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("model", required=False, type=click.Path(path_type=Path, exists=True))
def check_architecture(file: Path, model: Path | None) -> None:
    """Prove a declaration of an architecture on random models.

    FILE declares a family, in the format of the package's own files (see the README). A small
    random model of every class that it names is built by transformers, or one with the
    configuration of MODEL, a folder with a config.json; its weights are not read, and it gets as
    few layers as hold one of each kind.

    In float64, random elements of each declared symmetry, and of the maps that align_scale adds,
    must leave the outputs unchanged, up to rounding. Then every tensor is left out once, which must
    show. Tensors of the model that FILE does not mention are named.

    Exits with 0 if all of this holds, and with 1 if not or if no model could be built. What a
    model does not have is listed and not counted: name a MODEL that has it.
    """
    from mergekit_rotation.architecture import DeclarationError, read_family

    try:
        family = read_family(file)
    except DeclarationError as problem:
        raise click.ClickException(str(problem)) from problem
    from transformers.utils import logging

    from mergekit_rotation.proof import check_family

    logging.set_verbosity_error()
    reports = []
    for report in check_family(family, model):
        click.echo("\n".join([*report.lines(), ""]))
        reports.append(report)
    checked = [report for report in reports if report.rows]
    if not checked or not all(report.holds for report in reports):
        click.echo("Not proven.")
        sys.exit(1)
    click.echo(f"All that was checked holds, on {len(checked)} model{'s' * (len(checked) > 1)}.")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _hook_file() -> Path | None:
    """Return the ``.pth`` file that was installed with the package, if it is there."""
    try:
        installed = metadata.distribution("mergekit-rotation")
    except metadata.PackageNotFoundError:
        return None
    file = Path(str(installed.locate_file("mergekit_rotation.pth")))
    return file if file.is_file() else None


def _advice(hooked: bool) -> str | None:
    """Return what to do, or None where all is well."""
    import os

    if os.environ.get("MERGEKIT_ROTATION_DISABLE", "0") not in ("", "0"):
        return "MERGEKIT_ROTATION_DISABLE is set; unset it."
    if _version("mergekit") == "not installed":
        return MISSING
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
    try:
        importlib.import_module("mergekit.merge")
    except Exception as problem:
        return f"mergekit {_version('mergekit')} cannot be imported: {problem}"
    finder = startup.installed()
    if finder is None or finder.failed:
        return f"mergekit {_version('mergekit')} is not supported; see the message above."
    return None


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()} with --cuda, else the CPU"
    return f"CPU ({torch.get_num_threads()} threads); no GPU found"
