"""Evaluating the models between two others: as these are, and with one of them aligned."""

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import psutil
import torch
from mergekit.common import dtype_from_name
from mergekit.options import MergeOptions
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from mergekit_rotation.graph import run as runs
from mergekit_rotation.graph.errors import RotationError
from mergekit_rotation.insight.ends import Ends, StateDict, tokenizer_of
from mergekit_rotation.insight.lines import Barrier, Line
from mergekit_rotation.insight.running import (
    SAFETY,
    TEXT_LENGTH,
    built,
    coarsest,
    first_line,
    progress,
    read_rows,
    round_weights,
    rounding,
    row_length,
    stored_dtype,
)
from mergekit_rotation.insight.solved import checkpoint_of
from mergekit_rotation.proof.exact import run

#: logits that are held at a time, at most (of one row at least)
_LOGITS = 2**25
_LOSS = torch.float32


def measure(
    file: Path,
    text: Path,
    options: MergeOptions,
    points: int = 11,
    tokens: int = 4096,
    say: Callable[[str], None] = lambda words: None,
) -> Barrier:
    """Evaluate the models on two straight lines: plain, and with the other model aligned.

    Parameters
    ----------
    file : Path
        A configuration of a ``rotation_*`` merge of two models.
    text : Path
    options : MergeOptions
    points : int
        Of each line, the ends included; at least 3.
    tokens : int
        How many of the text are read, at most.
    say : callable
        Takes sentences on what will be done and what it will cost.

    Raises
    ------
    RotationError
        If the configuration is of no such merge, the models predict no next token, or the text is
        too short.
    """
    start = time.perf_counter()
    ends = Ends.of(file, options)
    _check_causal(ends)
    rows = _rows(ends, text, tokens)
    notes = _notes(ends)
    for words in (*notes, *_memory(ends, rows)):
        say(words)
    ends.plan()
    at = [k / (points - 1) for k in range(points)]
    walk = _Walk(ends, rows, say, evaluations=2 * points + 1)
    with progress(False):
        aligned = walk.line(*ends.tensors(True), at, "aligned")
        for words in runs.current().summary():
            say(f"aligned {words}")
        notes += _left_out()
        stored = walk.dtype
        plain = walk.line(*ends.tensors(False), at, "plain")
        rounded = walk.rounded(coarsest({stored, walk.dtype}), _condition())
    return Barrier(
        models=(str(ends.reference), str(ends.other)),
        text=str(text),
        tokens=rows[:, 1:].numel(),
        plain=Line(at, [float(loss.mean()) for loss in plain]),
        aligned=Line(at, [float(loss.mean()) for loss in aligned]),
        apart=max(_rms(aligned[end] - plain[end]) for end in (0, -1)),
        bound=SAFETY * _rms(rounded - plain[-1]),
        seconds=time.perf_counter() - start,
        notes=notes,
    )


class _Walk:
    """Evaluates models between two ends, one at a time."""

    def __init__(
        self, ends: Ends, rows: torch.Tensor, say: Callable[[str], None], evaluations: int
    ):
        self.ends, self.rows, self.say = ends, rows, say
        self.config = ends.planner.out_model_config
        self.batch = max(1, _LOGITS // (_vocabulary(ends) * rows.shape[1]))
        #: of the tensors of the last line
        self.dtype = torch.float32
        #: how many there will be, until that was said
        self._evaluations = evaluations
        self._last: PreTrainedModel | None = None

    def line(
        self, first: StateDict, second: StateDict, points: Sequence[float], words: str
    ) -> list[torch.Tensor]:
        """Return the losses of all tokens, in float64, at each point of a line."""
        self.dtype = coarsest({x.dtype for x in second.values() if x.is_floating_point()})
        losses = []
        total, quiet = len(points) * len(self.rows), self.ends.options.quiet
        with tqdm(total=total, desc=f"Evaluating {words}", unit="row", disable=quiet) as bar:
            for t in points:
                self._last = None  # before the next one is built
                self._last = self._model(between(first, second, t))
                if self._evaluations:
                    self._estimate(self._last)
                losses.append(self._losses(self._last, self.rows, f"{words}, t = {t:.3g}", bar))
        return losses

    def rounded(self, stored: torch.dtype, condition: float) -> torch.Tensor:
        """Return the losses of the last model with every weight rounded at random.

        Parameters
        ----------
        stored : torch.dtype
            Of the tensors.
        condition : float
            By how much maps that are not orthogonal amplify rounding.
        """
        assert self._last is not None
        width = self.config.get_text_config().hidden_size
        round_weights(self._last, condition * rounding(width, stored, _LOSS))
        return self._losses(self._last, self.rows, "rounded at random")

    def _estimate(self, model: PreTrainedModel) -> None:
        """Say how long all evaluations will take, by the time of a first few rows."""
        rows, count = self.rows[: self.batch], self._evaluations * len(self.rows)
        self._losses(model, rows[:1], "a first row")  # what is done but once is not timed
        start = time.perf_counter()
        self._losses(model, rows, "first rows")
        seconds = (time.perf_counter() - start) / len(rows)
        self.say(
            f"{self._evaluations} evaluations of {self.rows.numel()} tokens will take about "
            f"{_duration(count * seconds)}"
        )
        self._evaluations = 0

    def _model(self, state: StateDict) -> PreTrainedModel:
        return built(
            "the models between",
            self.ends.checkpoint.model_class,
            self.ends.options,
            None,
            config=deepcopy(self.config),
            state_dict=state,
            dtype=_LOSS,
            trust_remote_code=self.ends.options.trust_remote_code,
        )

    def _losses(
        self, model: PreTrainedModel, rows: torch.Tensor, where: str, bar: Any = None
    ) -> torch.Tensor:
        """Return the loss of every token but the first of each row, each row read on its own."""
        parts = []
        for batch in rows.split(self.batch):
            ids = batch.to(model.device)
            try:
                logits = run(model, {"input_ids": ids}).logits[:, :-1]
            except Exception as problem:
                raise RotationError(
                    f"{self.ends.other}: cannot be run ({first_line(problem)})"
                ) from problem
            loss = cross_entropy(
                logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
            )
            parts.append(loss.double().cpu())
            if bar is not None:
                bar.update(len(batch))
        losses = torch.cat(parts)
        if not losses.isfinite().all():
            raise RotationError(f"{where}: the loss is NaN or Inf; try dtype: float32")
        return losses


def between(first: StateDict, second: StateDict, t: float) -> StateDict:
    """Return (1 - t) first + t second in float32; both ends are exact.

    Parameters
    ----------
    first, second : mapping of name to Tensor
        Of the same shapes; what is not floating point is the same in both.
    t : float

    Returns
    -------
    dict of name to Tensor
    """
    return {
        name: torch.lerp(x.to(_LOSS), second[name].to(_LOSS), t) if x.is_floating_point() else x
        for name, x in first.items()
    }


# -- before anything is run -----------------------------------------------------------------------


def _check_causal(ends: Ends) -> None:
    """Refuse models that do not predict the next token of a text."""
    checkpoint = ends.checkpoint
    config, name = checkpoint.config, checkpoint.model_class
    known = {
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
        *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values(),
    }
    own = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM", "")
    if getattr(config, "is_encoder_decoder", False) or not (
        name in known or str(own).rpartition(".")[2] == name
    ):
        raise RotationError(
            f"{checkpoint.model}: {name} does not predict the next token of a text, whose loss is "
            "what is measured here; evaluate merges with the metric of your task"
        )


def _rows(ends: Ends, text: Path, tokens: int) -> torch.Tensor:
    """Return the tokens that are read, in rows."""
    tokenizer = ends.tokenizer()
    length = row_length(ends.checkpoint.config, TEXT_LENGTH)
    if length < 2:
        raise RotationError(f"{ends.other}: reads no more than one token, so it predicts none")
    try:
        return read_rows(text, tokenizer, length, max(1, tokens // length))
    except (OSError, UnicodeDecodeError) as problem:
        raise RotationError(f"{text}: cannot be read ({first_line(problem)})") from problem


def _notes(ends: Ends) -> list[str]:
    """Say what the reader of the losses has to know."""
    config = ends.planner.config
    if config.tokenizer is not None or config.tokenizer_source is not None:
        return []
    try:
        vocabularies = [
            tokenizer_of(checkpoint_of(str(model), ends.options), ends.options).get_vocab()
            for model in (ends.reference, ends.other)
        ]
    except RotationError:
        return []  # one of them has no tokenizer; the merge takes that of its reference
    if vocabularies[0] == vocabularies[1]:
        return []
    return [
        f"{ends.other}: its tokens differ from those of {ends.reference}, and the text is read "
        "with the tokenizer that the merge would have; tokenizer: brings vocabularies together"
    ]


def _memory(ends: Ends, rows: torch.Tensor) -> list[str]:
    """Say how much memory it takes where that is more than there is."""
    numbers = ends.size()
    dtype = dtype_from_name(ends.planner.config.dtype) or stored_dtype(ends.checkpoint)
    model = numbers * _LOSS.itemsize
    logits = 3 * _LOSS.itemsize * max(_LOGITS, rows.shape[1] * _vocabulary(ends))
    device = torch.device(ends.options.device or "cpu")
    host = 2 * numbers * dtype.itemsize + model + (logits if device.type == "cpu" else 0)
    free = {"memory": (host, psutil.virtual_memory().available)}
    if device.type == "cuda":
        free[str(device)] = (model + logits, torch.cuda.mem_get_info(device)[0])
    return [
        f"about {_gibibytes(need)} GiB of {place} are needed, and {_gibibytes(found)} are free"
        for place, (need, found) in free.items()
        if need > found
    ]


def _vocabulary(ends: Ends) -> int:
    return int(ends.planner.out_model_config.get_text_config().vocab_size)


def _gibibytes(size: int) -> str:
    return f"{size / 2**30:.3g}"


def _left_out() -> list[str]:
    """Say which layers and blocks were not aligned, and why."""
    this = runs.current()
    found = [(entry.model, entry.place, entry.reason) for entry in this.unsolved]
    found += [(model, *entry) for model, entries in this.left.items() for entry in entries]
    words = [f"{model}: {place} not aligned: {why}" for model, place, why in found]
    shown = list(dict.fromkeys(words))
    return [*shown[:3], *([f"and {len(shown) - 3} more"] if len(shown) > 3 else [])]


def _condition() -> float:
    """Return the largest condition number of what the alignment applied."""
    return max((record.condition for record in runs.current().records), default=1.0)


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())
