"""What the commands share: options, how errors are shown, checks before hours are spent."""

import functools
import importlib.util
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from mergekit_rotation import startup
from mergekit_rotation.graph.patching import TESTED
from mergekit_rotation.insight.writing import WRITING

MISSING = f"mergekit is not installed; pip install mergekit=={TESTED}."


@contextmanager
def mergekit_with_methods() -> Iterator[None]:
    """Import what is mergekit's, with our methods in it; say so if it is not installed."""
    startup.install()
    try:
        yield
    except ModuleNotFoundError as problem:
        if problem.name != "mergekit":
            raise
        raise click.ClickException(MISSING) from None


def common_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options of every command here, and show errors as one sentence."""

    @click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
    @click.option("--cuda", is_flag=True, help="The same as --device cuda.")
    @click.option("--trust-remote-code", is_flag=True, help="Run code that comes with a model.")
    @click.option("--verbose", is_flag=True, help="Show warnings, and where an error comes from.")
    @click.option("--quiet", is_flag=True, help="No progress bars.")
    @functools.wraps(function)
    def command(
        device: str, cuda: bool, trust_remote_code: bool, verbose: bool, quiet: bool, **given: Any
    ) -> None:
        try:
            writing = {name: given.pop(name) for name in WRITING if name in given}
            options = _prepared(
                "cuda" if cuda else device, trust_remote_code, verbose, quiet, **writing
            )
            with _adapters_merged(options) as options:
                function(options=options, **given)
        except (click.ClickException, click.exceptions.Exit):
            if verbose:
                logging.getLogger(__name__).info("", exc_info=True)
            raise
        except Exception as problem:
            if verbose:
                raise
            lines = str(problem).strip().splitlines() or [type(problem).__name__]
            raise click.ClickException(f"{lines[0]} (--verbose shows where)") from problem

    return command


def _prepared(
    device: str, trust_remote_code: bool, verbose: bool, quiet: bool, **writing: Any
) -> Any:
    """Import mergekit with our methods in it, and return its options.

    What a command that writes a model warns of is shown, as mergekit-yaml does.
    """
    with mergekit_with_methods():
        from mergekit.options import MergeOptions
    import torch
    import transformers

    level = logging.INFO if verbose else logging.ERROR
    transformers.logging.set_verbosity(level)
    level = min(level, logging.WARNING) if writing else level
    logging.basicConfig(level=level)
    for name in ("mergekit", "mergekit_rotation"):
        logging.getLogger(name).setLevel(level)
    if device == "cpu" and writing.get("gpu_rich"):
        device = "cuda"
    try:
        torch.empty(0, device=device)
    except Exception:
        raise click.ClickException(f"the device {device} cannot be used; try cpu") from None
    given = {"copy_tokenizer": True, **writing}
    return MergeOptions(device=device, trust_remote_code=trust_remote_code, quiet=quiet, **given)


@contextmanager
def _adapters_merged(options: Any) -> Iterator[Any]:
    """Give mergekit a folder to merge ``model+adapter`` in, unless it has one; it goes again."""
    from mergekit.io.tasks import LoaderCache

    if options.lora_merge_cache:
        yield options
        return
    with tempfile.TemporaryDirectory(prefix="mergekit-rotation-") as folder:
        try:
            yield options.model_copy(update={"lora_merge_cache": folder})
        finally:
            loaders = LoaderCache.loaders
            for model in [model for model in loaders if model.lora]:
                del loaders[model]


class Failed(click.ClickException):
    """An error of a command whose exit code 1 is an answer."""

    exit_code = 2


class No(click.ClickException):
    """The answer no."""

    exit_code = 1


def errors_exit_with_2(function: Callable[..., None]) -> Callable[..., None]:
    """Let a command, whose exit code 1 is the answer no, end with 2 after an error."""

    @functools.wraps(function)
    def command(**given: Any) -> None:
        try:
            function(**given)
        except (click.UsageError, No):
            raise
        except click.ClickException as problem:
            raise Failed(problem.message) from problem

    return command


def write_json(path: Path | None, data: Any) -> None:
    """Write JSON for machines, if a file for it is named."""
    if path is not None:
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


class _Model(click.Path):
    """A model: shells complete folders; names on the hub, and ``model+adapter``, need not exist."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | Path:
        if Path(value).is_file():
            self.fail(f"{value} is a file; name the folder that it lies in", param, ctx)
        return super().convert(value, param, ctx)  # type: ignore[return-value]


MODEL = _Model(file_okay=False)


def _writable(context: click.Context, parameter: click.Parameter, file: Path | None) -> Path | None:
    """Refuse a file that cannot be written before hours were spent on what it holds."""
    if file is None:
        return None
    folder = file.absolute().parent
    if not folder.is_dir():
        raise click.BadParameter(f"there is no folder {file.parent}", context, parameter)
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise click.BadParameter(f"{file} cannot be written", context, parameter)
    return file


JSON = click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=_writable,
    help="Write the result to this file, for machines.",
)


TEXT = click.option(
    "--text",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Read the first tokens of this file, in place of random ones.",
)


def _plottable(
    context: click.Context, parameter: click.Parameter, file: Path | None
) -> Path | None:
    """Refuse a picture that cannot be drawn before hours were spent on what it shows."""
    if file is None:
        return None
    if file.suffix.lower() not in (".png", ".svg"):
        raise click.BadParameter("name a file that ends in .png or .svg", context, parameter)
    if importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException(
            "--plot needs matplotlib; pip install 'mergekit-rotation[plot]' (or pip install "
            "matplotlib)."
        )
    return _writable(context, parameter, file)


PLOT = click.option(
    "--plot",
    "plot_file",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=_plottable,
    metavar="FILE.png|.svg",
    help="Draw the result; needs matplotlib (the extra `plot`).",
)
