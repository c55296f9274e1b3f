"""The command ``mergekit-rotation plan``; it takes the options of mergekit's own command."""

import logging
from pathlib import Path

import click
from mergekit.options import MergeOptions, PrettyPrintHelp, add_merge_options
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mergekit_rotation.graph.errors import RotationError, one_line
from mergekit_rotation.insight.headers import NotHere
from mergekit_rotation.insight.options import JSON, write_json
from mergekit_rotation.insight.plan import Plan, plan, refused
from mergekit_rotation.insight.tables import terminal


class _Untold(click.ClickException):
    """What cannot be planned, though the merge might work."""

    exit_code = 2


@click.command("plan", cls=PrettyPrintHelp)
@click.argument("config", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.argument("out", required=False)
@JSON
@add_merge_options
def main(
    config: Path, out: str | None, json_file: Path | None, merge_options: MergeOptions
) -> None:
    """Tell what a merge would do, and what it takes, without doing it.

    CONFIG and the options are those of `mergekit-yaml`; OUT, if given, is checked as well. Of
    weights only the headers of files are read (of pickled files, what they say of shapes), and
    nothing is written. The merge is planned by the code that plans it, and its schedule is run on
    tensors without values, so errors are those of the merge. Plain methods are planned, too; what
    mergekit alone finds wrong with their models shows as far as shapes tell.

    Exits with 0 if the merge would begin to write, with 1 if it would fail, with 2 if that
    cannot be told. What only values of tensors tell (NaN, damaged data) is not known.

    \b
    The estimates:
      memory  of the process: tensors at the worst moment, temporaries, and
              mapped files, which the system drops where memory is short; more
              where models have no neurons in common
      disk    weights that are written
      time    rough, from rates that are measured for half a second

    The JSON has schema, version, accepted, error (the sentence, or null) and, if accepted: method,
    reference, models (model, class, bytes), output (class, dtype, vocabulary, tensors, weights),
    layers (model, reference, layers, block, aligned_by, reason), memory (process, peak,
    mapped_files, peak_with_assignments, device), disk (output, files, adapters, free), seconds
    (least, with_assignments), read, warnings. Sizes are in bytes.
    """  # noqa: D301
    options = merge_options
    if options.num_threads is not None:
        options.apply_global_options()
    if options.verbosity:
        logging.basicConfig(level=logging.DEBUG if options.verbosity > 1 else logging.INFO)
    try:
        found = plan(config.read_text(encoding="utf-8"), out, options)
    except NotHere as problem:
        raise _Untold(str(problem)) from None
    except Exception as problem:
        write_json(json_file, refused(problem))
        if options.verbosity:
            logging.getLogger(__name__).info("", exc_info=True)
        if isinstance(problem, RotationError):
            raise
        raise click.ClickException(f"{one_line(problem)} (-v shows where)") from problem
    write_json(json_file, found.data())
    show(found, options)


def show(found: Plan, options: MergeOptions, console: Console | None = None) -> None:
    """Print a plan for people."""
    console = console or terminal()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    say(f"method     {found.method}")
    if found.reference is not None:
        say(f"reference  {found.reference}")
    for number, (name, kind, size) in enumerate(found.models):
        say(f"{'' if number else 'models':10} {name} ({kind}, {amount(size)})")
    output = found.output
    say(
        f"output     {output['class']}, {' and '.join(output['dtype'])}, vocabulary "
        f"{output['vocabulary']}, {output['weights'] / 1e6:.1f} M weights in "
        f"{output['tensors']} tensors"
    )
    if found.rows:
        console.print(_table(found))
    elif found.method.startswith("rotation_"):
        say("\nnothing is aligned: no two models meet in a layer\n")
    else:
        say(f"\nnothing is aligned: {found.method} is a method of mergekit's own\n")
    for warning in found.warnings:
        say(f"warning: {warning}")
    for name, size in found.adapters.items():
        say(f"note: {name} is merged first, which takes {amount(size)} of memory and disk")
    for line in estimates(found, options):
        say(line)


def _table(found: Plan) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0))
    for name in ("model", "layers", "block", "aligned by"):
        table.add_column(name, overflow="fold")
    before = ""
    for row in found.rows:
        what = ", ".join(row.symmetries) or f"not aligned: {row.reason}"
        table.add_row("" if row.model == before else row.model, row.layers, row.block, what)
        before = row.model
    return table


def estimates(found: Plan, options: MergeOptions) -> list[str]:
    """Return what the merge takes, in lines."""
    more = ""
    if found.most > 1.05 * found.peak:
        more = f"; {amount(found.most)} if models have no neurons in common"
    lines = [
        f"memory     about {amount(found.peak)} (the process itself {amount(found.base)}, mapped "
        f"files {amount(found.droppable)}){more}"
    ]
    if found.usage.device:
        lines.append(f"{options.device:10} about {amount(found.usage.device)} of tensors")
    usage = found.usage
    files = f"{usage.shards} file{'s' if usage.shards != 1 else ''}"
    free = "" if found.free is None else f", {amount(found.free)} free"
    lines.append(f"disk       {amount(usage.written)} in {files}{free}")
    least, most = (duration(seconds) for seconds in found.seconds)
    on = "" if options.device == "cpu" else f" on the CPU, less with {options.device}"
    span = least if least == most else f"{least}, up to {most} if neurons have to be assigned"
    lines.append(f"time       roughly {span}{on}")
    return lines


def amount(size: float) -> str:
    """Return a number of bytes in words."""
    for unit in ("bytes", "KB", "MB"):
        if size < 999.5:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def duration(seconds: float) -> str:
    """Return a time with one or two figures."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
