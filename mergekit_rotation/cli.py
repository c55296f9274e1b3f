"""The command ``mergekit-rotation``."""

import importlib
import sys
from importlib import metadata
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from mergekit_rotation import startup
from mergekit_rotation.insight.commands import align, barrier, compare, verify
from mergekit_rotation.insight.options import MISSING, mergekit_with_methods


class _Late(click.Command):
    """Stands for a command with options of mergekit's, which takes seconds to import.

    Parameters
    ----------
    name, module : str
        The command is ``main`` of the module.
    text : str
        What the list of commands says of it.
    """

    def __init__(self, name: str, module: str, text: str):
        files = [click.Argument([argument], type=click.Path()) for argument in ("config", "out")]
        super().__init__(name, params=[*files], short_help=text)
        self.module = module

    def load(self) -> click.Command:
        """Import the command, with mergekit and our methods in it."""
        with mergekit_with_methods():
            importlib.import_module("mergekit.merge")  # before modules of ours that need it
            command: click.Command = importlib.import_module(self.module).main
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete options by the command itself, and all else by names of files."""
        if incomplete.startswith("-"):
            return self.load().shell_complete(ctx, incomplete)
        return super().shell_complete(ctx, incomplete)


class _Commands(click.Group):
    """Imports the commands that stand for others when these are run."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        # Resilient parsing is that of the shell's completion, which is not to wait.
        if isinstance(command, _Late) and not ctx.resilient_parsing:
            return command.load()
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing mergekit."""
        rows = [(name, command.get_short_help_str(56)) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(sorted(rows))


@click.group(cls=_Commands)
@click.version_option(package_name="mergekit-rotation")
def main() -> None:
    """Align transformers by their weight-space symmetries, then merge them with mergekit.

    Use `rotation_<method>` in the YAML of a plain `mergekit-yaml`. `yaml` is the same command for
    places where start-up hooks do not run; `doctor` tells whether they do.
    """


for _command in (
    align,
    barrier,
    compare,
    verify,
    _Late(
        "plan",
        "mergekit_rotation.insight.plan_command",
        "Tell what a merge would do, and what it takes.",
    ),
    _Late(
        "yaml",
        "mergekit.scripts.run_yaml",
        "mergekit-yaml, where start-up hooks do not run.",
    ),
):
    main.add_command(_command)


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
