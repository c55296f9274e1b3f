"""The commands that compare, verify and evaluate models; they import what they need when run."""

import os
import sys
from pathlib import Path
from typing import Any

import click

from mergekit_rotation.insight.options import (
    JSON,
    MODEL,
    PLOT,
    TEXT,
    Failed,
    No,
    common_options,
    errors_exit_with_2,
    write_json,
)
from mergekit_rotation.insight.writing import writing_options


@click.command()
@click.argument("model", metavar="A", type=MODEL)
@click.argument("out", metavar="OUT", type=MODEL)
@click.option(
    "--to", "reference", required=True, metavar="REF", type=MODEL, help="The model that stays."
)
@click.option(
    "--residual",
    type=click.Choice(["none", "permutation", "orthogonal"]),
    default="none",
    show_default=True,
    help="Bring the residual stream together, too, as align_residual does.",
)
@click.option("--scale", is_flag=True, help="Also undo scalings, as align_scale does.")
@click.option(
    "--architecture",
    type=click.Path(exists=True),
    help="A declaration of your own of an architecture.",
)
@click.option("--verify/--no-verify", "verified", default=True, help="Verify OUT.  [default: yes]")
@TEXT
@JSON
@writing_options
@errors_exit_with_2
@common_options
def align(
    model: str,
    out: str,
    reference: str,
    residual: str,
    scale: bool,
    architecture: str | None,
    verified: bool,
    text: Path | None,
    json_file: Path | None,
    options: Any,
) -> None:
    """Write A in the coordinates of REF, and verify it.

    \b
      mergekit-rotation align ./protected --to ./base ./readable
      mergekit-rotation align ./a --to ./b ./a-like-b --residual orthogonal

    OUT becomes A: its config, tokenizer, other files and dtypes, the same function; but its heads,
    neurons and experts (with --residual its residual stream, too) stand where they are closest to
    those of REF, which is only read. It is what the method rotation_align writes, about one layer
    in memory at a time; a model that is in OUT is replaced.

    Then A and OUT are run and compared, as `verify` does, each as a whole and in float32. Exits
    with 0 if they are the same function (with --no-verify: if OUT is written), with 1 if not:
    weights and config.json are then removed from OUT; with 2 if A cannot be aligned, or if the
    question cannot be told, for example because transformers cannot run A: OUT then stays,
    unverified.

    The JSON has what alignment.json in OUT has (distances before and after, layers, notes), and
    out (null if removed), verified (the JSON of `verify`; null if that was not done), unverified
    (why not).
    """  # noqa: D301
    from mergekit_rotation.insight.align import align as aligned
    from mergekit_rotation.insight.tables import show_aligned

    answer = aligned(
        model,
        reference,
        out,
        options,
        residual=residual,
        scale=scale,
        architecture=architecture,
        verified=verified,
        text=text,
    )
    write_json(json_file, answer.data())
    show_aligned(answer)
    if not answer.kept:
        raise No(
            f"{out} is not the same function as {model} ({answer.reason}), so that its weights "
            "and config.json are removed; --no-verify keeps them"
        ) from answer.problem
    if answer.problem is not None:
        raise Failed(
            f"{out} is written, but whether it is the same function as {model} cannot be told: "
            f"{answer.reason}"
        ) from answer.problem


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="A B [C ...]", type=MODEL)
@JSON
@PLOT
@click.option("--scale", is_flag=True, help="Also undo scalings, as align_scale does.")
@common_options
def compare(
    models: tuple[str, ...],
    json_file: Path | None,
    plot_file: Path | None,
    scale: bool,
    options: Any,
) -> None:
    """Tell how two models, or more, are related.

    A model is a folder or a name on the hub, or either with an adapter: base+adapter. In every pair
    the second is aligned to the first: heads, neurons, experts and, where their family allows it,
    the residual stream. No model is written. The verdict is one of

    \b
      same-coordinates  merge them as they are
      same-function     (nearly) the same in other coordinates: rotation_* methods
      related           parts are shared, or an ancestor far back
      unrelated         only align_residual has a chance, and training after it

    Distances are relative Frobenius norms over all tensors that both models store, |A - B| / |A|,
    as they are and once B is aligned. The picture of a pair has them by layer and part; that of
    more models shows their kinship and verdicts, relatives beside one another.

    The JSON of a pair has at the top level: schema, reference, model, verdict, evidence (numbers
    and thresholds), reason (why shapes do not fit), distance_before, distance_after,
    cosine_before, cosine_after, stream, layers (one entry per layer, with its blocks), outside
    (embeddings, head), left_out, notes. With more models: models, matrix (by name of the number),
    pairs (a list of the above).
    """  # noqa: D301
    if len(models) < 2:
        raise click.UsageError("name at least two models")
    if len({os.path.realpath(model) for model in models}) < len(models):
        raise click.UsageError("a model is named twice")
    from mergekit_rotation.insight.compared import Comparison
    from mergekit_rotation.insight.tables import show_comparison

    comparison = Comparison.of(models, options, scale)
    write_json(json_file, comparison.data())
    if plot_file is not None:
        from mergekit_rotation.insight.plots import plot_comparison

        plot_comparison(comparison.data(), plot_file)
    show_comparison(comparison)


@click.command()
@click.argument("first", metavar="A", type=MODEL)
@click.argument("second", metavar="B", type=MODEL)
@TEXT
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float64"]),
    default="float32",
    show_default=True,
    help="In which the models are run.",
)
@JSON
@errors_exit_with_2
@common_options
def verify(
    first: str, second: str, text: Path | None, dtype: str, json_file: Path | None, options: Any
) -> None:
    """Tell whether two models are the same function.

    Both are run by transformers on the same inputs, one after the other: random tokens (images,
    spectrograms), or the first tokens of a text. Their outputs may differ by four times what a
    random rounding of all weights of A, to the dtype in which they are stored, changes in A's.

    Exits with 0 if they are the same, 1 if not, 2 if that cannot be told. If not, the first hidden
    state that differs shows where it starts. Hidden states that differ while outputs agree are in
    other coordinates.

    The JSON has schema, version, models, same, reason (of different shapes), stream (same or other
    coordinates), apart_from (the first place), inputs, dtype, stored, outputs and hidden (name,
    relative, largest, bound, agrees), unseen (parts that the inputs do not reach).
    """
    import torch

    from mergekit_rotation.insight.tables import show_verified
    from mergekit_rotation.insight.verify import verify as verified

    answer = verified(first, second, options, getattr(torch, dtype), text)
    write_json(json_file, answer.data())
    show_verified(answer)
    if not answer.same:
        raise click.exceptions.Exit(1)


@click.command()
@click.argument("config", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option(
    "--text",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    required=True,
    help="The first tokens of this file are predicted.",
)
@click.option(
    "--points",
    type=click.IntRange(min=3),
    default=11,
    show_default=True,
    help="How many models of each line are evaluated, the ends included.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="How many tokens of the text are read, at most.",
)
@JSON
@PLOT
@common_options
def barrier(
    config: Path,
    text: Path,
    points: int,
    tokens: int,
    json_file: Path | None,
    plot_file: Path | None,
    options: Any,
) -> None:
    """Evaluate the models between two others, plain and aligned.

    CONFIG is a configuration of a rotation_* merge of two models that predict next tokens. Its
    models, reference, align_* parameters, dtype and tokenizer count; the models evaluated are (1 -
    t) reference + t other, once with the other model as it is and once with it aligned. None is
    written. In memory are two models in the dtype of CONFIG and one in float32, in which all is
    computed. How long it will take is said after the first few rows.

    The loss is the mean cross-entropy of next tokens in nats, of rows of up to 128 tokens that are
    read on their own. The barrier is the largest loss above the straight line between the losses
    of the ends, 0 if no loss lies above it. Alignment must not change the losses at the ends; if it
    does so by more than four times what a random rounding of all weights does, a warning says so.

    The JSON has schema, version, reference, model, text, tokens (how many are predicted), t,
    plain and aligned (each with loss, one for each t, barrier, and top, the t of the barrier or
    null), removed (share of the barrier, null if there is none), ends (apart: root mean square over
    the tokens of the change at the ends; bound; same), seconds, notes.
    """
    from tqdm import tqdm

    from mergekit_rotation.insight.barrier import measure
    from mergekit_rotation.insight.tables import show_barrier

    def say(words: str) -> None:
        if not options.quiet:
            tqdm.write(words, file=sys.stderr)

    found = measure(config, text, options, points, tokens, say)
    write_json(json_file, found.data())
    if plot_file is not None:
        from mergekit_rotation.insight.plots import plot_barrier

        plot_barrier(found.data(), plot_file)
    show_barrier(found)
