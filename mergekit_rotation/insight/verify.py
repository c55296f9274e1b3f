"""Are two models the same function? Their outputs and hidden states on the same inputs."""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from mergekit.options import MergeOptions
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils.logging import tqdm

from mergekit_rotation.graph.checkpoints import Checkpoint
from mergekit_rotation.graph.errors import RotationError
from mergekit_rotation.graph.report import SCHEMA
from mergekit_rotation.insight.running import (
    SAFETY,
    TEXT_LENGTH,
    Unrun,
    coarsest,
    first_line,
    load,
    progress,
    read_rows,
    round_weights,
    rounding,
    row_length,
    stored_dtype,
)
from mergekit_rotation.insight.solved import checkpoint_of
from mergekit_rotation.proof.exact import Float64, run
from mergekit_rotation.proof.models import random_inputs

#: random tokens in a row, and rows of a text that are read
LENGTH, TEXT_ROWS = 32, 4

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Answers:
    """What one model makes of some inputs.

    Attributes
    ----------
    outputs : mapping of name to Tensor
        All logits; the last hidden state of a model without a head.
    hidden : mapping of name to Tensor
        The stream after the embeddings, and after each layer.
    """

    outputs: Mapping[str, torch.Tensor]
    hidden: Mapping[str, torch.Tensor]

    def width(self) -> int:
        """Return the largest size of what is returned of the stream."""
        return max((x.shape[-1] for x in self.hidden.values()), default=1)


@dataclass(frozen=True)
class Difference:
    """How far two tensors are from one another.

    Attributes
    ----------
    name : str
    relative : float
        Frobenius norm of the difference, over that of the first.
    largest : float
        Of the entries of the difference.
    bound : float
        Up to which ``relative`` is what rounding explains.
    """

    name: str
    relative: float
    largest: float
    bound: float

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the difference."""
        return self.relative <= self.bound

    def data(self) -> dict[str, Any]:
        """Return the entry of the JSON."""
        return {**vars(self), "agrees": self.agrees}


@dataclass(frozen=True)
class Verified:
    """Whether two models are the same function.

    Attributes
    ----------
    models : (str, str)
    inputs : str
        What they were run on.
    dtype, stored : torch.dtype
        In which they were run, and the coarsest in which weights are stored.
    outputs, hidden : sequence of Difference
    unseen : sequence of str
        Parts that the inputs do not reach, such as the vision tower of a model that reads tokens.
    reason : str
        Why they cannot be the same, if their outputs cannot even be compared.
    """

    models: tuple[str, str]
    inputs: str = ""
    dtype: torch.dtype = torch.float32
    stored: torch.dtype = torch.float32
    outputs: Sequence[Difference] = field(default=())
    hidden: Sequence[Difference] = field(default=())
    unseen: Sequence[str] = field(default=())
    reason: str = ""

    @property
    def same(self) -> bool:
        """Whether they are the same function, as far as rounding lets one tell."""
        return not self.reason and all(entry.agrees for entry in self.outputs)

    @property
    def apart(self) -> str | None:
        """The first place where the hidden states differ, or the outputs if only they do."""
        entries = (*self.hidden, *(() if self.same else self.outputs))
        return next((entry.name for entry in entries if not entry.agrees), None)

    @property
    def stream(self) -> str | None:
        """Whether the residual streams are in the ``same`` coordinates or in ``other`` ones.

        None if that cannot be told: no hidden states, or not the same function.
        """
        if not self.same or not self.hidden:
            return None
        return "same" if self.apart is None else "other"

    def data(self) -> dict[str, Any]:
        """Return the answer as JSON has it."""
        return {
            "schema": SCHEMA,
            "version": version("mergekit-rotation"),
            "models": list(self.models),
            "same": self.same,
            "reason": self.reason or None,
            "stream": self.stream,
            "apart_from": self.apart,
            "inputs": self.inputs,
            "dtype": _name(self.dtype),
            "stored": _name(self.stored),
            "outputs": [entry.data() for entry in self.outputs],
            "hidden": [entry.data() for entry in self.hidden],
            "unseen": list(self.unseen),
        }


def verify(
    first: str,
    second: str,
    options: MergeOptions,
    dtype: torch.dtype = torch.float32,
    text: Path | None = None,
) -> Verified:
    """Run two models, one after the other, on the same inputs.

    Parameters
    ----------
    first, second : str
        As in a configuration of mergekit's.
    options : MergeOptions
    dtype : torch.dtype
        In which all is computed, float32 or float64.
    text : Path, optional
        Whose first tokens are read, by the tokenizer of the first model; random tokens (images,
        spectrograms) by default.

    Raises
    ------
    RotationError
        If one of them cannot be read or run.
    """
    checkpoints = [checkpoint_of(model, options) for model in (first, second)]
    sizes = [_vocabulary(checkpoint.config) for checkpoint in checkpoints]
    if sizes[0] != sizes[1]:
        return Verified((first, second), reason=f"vocabularies of {sizes[0]} and {sizes[1]} tokens")
    batches = None if text is None else _read(text, checkpoints[0], options)
    inputs = "random inputs" if text is None else f"the first tokens of {text}"
    stored = coarsest(set(map(stored_dtype, checkpoints)))
    runs: list[Answers] = []
    unseen: list[str] = []
    for checkpoint in checkpoints:
        with progress(not options.quiet):
            model = load(checkpoint, options, dtype)
        if batches is None:
            batches = [random_inputs(model, row_length(checkpoint.config, LENGTH))]
        inner = _Runner(model, checkpoint, batches, dtype, options)
        if not runs:
            with _watched(model) as used:
                runs.append(inner.answers())
            unseen = _unseen(model, used)
            round_weights(model, rounding(runs[0].width(), stored, dtype))
        runs.append(inner.answers())
        del model, inner
    outputs, hidden = _differences(*runs)
    reason = "" if outputs else _shapes(runs[0], runs[2])
    return Verified((first, second), inputs, dtype, stored, outputs, hidden, unseen, reason)


# -- running a model ------------------------------------------------------------------------------


class _Runner:
    """Runs one model on some inputs."""

    def __init__(
        self,
        model: PreTrainedModel,
        checkpoint: Checkpoint,
        batches: Sequence[Batch],
        dtype: torch.dtype,
        options: MergeOptions,
    ):
        self.model, self.checkpoint = model, checkpoint
        self.batches, self.dtype = batches, dtype
        self.quiet = bool(options.quiet) or len(batches) == 1

    def answers(self) -> Answers:
        """Run all batches.

        Raises
        ------
        RotationError
            If that fails, or the outputs are not finite.
        """
        outputs: dict[str, list[torch.Tensor]] = {}
        hidden: dict[str, list[torch.Tensor]] = {}
        name = str(self.checkpoint.model)
        for batch in tqdm(self.batches, desc=f"Running {name}", disable=self.quiet):
            result = self._run(batch)
            for found, parts in ((_outputs(result), outputs), (_hidden(result), hidden)):
                for key, tensor in found.items():
                    parts.setdefault(key, []).append(tensor.cpu())
        if not outputs:
            raise Unrun(name, f"{type(self.model).__name__} returns no logits")
        answers = Answers(*({k: torch.cat(p) for k, p in s.items()} for s in (outputs, hidden)))
        if not all(bool(tensor.isfinite().all()) for tensor in answers.outputs.values()):
            raise Unrun(name, "its outputs hold NaN or Inf; the model is damaged")
        return answers

    def _run(self, batch: Batch) -> Any:
        device, dtype = self.model.device, self.dtype
        given: dict[str, Any] = {
            name: x.to(device, dtype if x.is_floating_point() else x.dtype)
            for name, x in batch.items()
        }
        try:
            with Float64() if self.dtype == torch.float64 else nullcontext():
                return run(self.model, given | {"output_hidden_states": True})
        except Exception as problem:
            text = f"cannot be run ({first_line(problem)})"
            raise Unrun(str(self.checkpoint.model), text) from problem


@contextmanager
def _watched(model: PreTrainedModel) -> Iterator[set[int]]:
    """Collect the ids of the parameters whose modules are run."""
    used: set[int] = set()

    def use(module: torch.nn.Module, _: Any) -> None:
        used.update(id(parameter) for parameter in module.parameters(recurse=False))

    hooks = [module.register_forward_pre_hook(use) for module in model.modules()]
    yield used
    for hook in hooks:
        hook.remove()


def _unseen(model: PreTrainedModel, used: Container[int]) -> list[str]:
    """Return the towers of a model of which no part was run."""
    found: list[str] = []
    for name, module in model.named_modules():
        ids = [id(parameter) for parameter in module.parameters()]
        idle = bool(ids) and not any(known in used for known in ids)
        if idle and name.count(".") < 2 and not name.startswith(tuple(f"{n}." for n in found)):
            found.append(name)
    return found


def _outputs(result: Any) -> dict[str, torch.Tensor]:
    tensors = {n: x for n, x in result.items() if isinstance(x, torch.Tensor)}
    logits = {n: x for n, x in tensors.items() if "logits" in n}
    return logits or {n: x for n, x in tensors.items() if n == "last_hidden_state"}


def _hidden(result: Any) -> dict[str, torch.Tensor]:
    """Return the stream by place, that of an encoder before that of its decoder."""
    found = {}
    keys = [k for k in result if k.endswith("hidden_states") and isinstance(result[k], tuple)]
    for key in sorted(keys, key=lambda key: not key.startswith("encoder")):
        part = key.removesuffix("hidden_states").replace("_", " ")
        for depth, tensor in enumerate(result[key]):
            found[part + (f"layer {depth - 1}" if depth else "embeddings")] = tensor
    return found


# -- inputs ---------------------------------------------------------------------------------------


def _vocabulary(config: Any) -> int | None:
    return getattr(config.get_text_config(), "vocab_size", None)


def _read(text: Path, checkpoint: Checkpoint, options: MergeOptions) -> list[Batch]:
    """Return the first tokens of a text, in rows of the same length.

    Raises
    ------
    RotationError
        If the model has no tokenizer, or the text is too short.
    """
    if getattr(checkpoint.config, "is_encoder_decoder", False):
        raise RotationError(f"{checkpoint.model}: has an encoder and a decoder; leave out --text")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            checkpoint.index.base_path, trust_remote_code=options.trust_remote_code
        )
        length = row_length(checkpoint.config, TEXT_LENGTH)
        rows = read_rows(text, tokenizer, length, TEXT_ROWS)
    except RotationError:
        raise
    except Exception as problem:
        raise RotationError(
            f"{checkpoint.model}: {text} cannot be read by its tokenizer ({first_line(problem)}); "
            "leave out --text for random tokens"
        ) from problem
    return [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in rows]


# -- comparing ------------------------------------------------------------------------------------


def _differences(
    first: Answers, rounded: Answers, second: Answers
) -> tuple[list[Difference], list[Difference]]:
    """Compare two models, with what rounding the weights of the first does as the measure.

    Returns
    -------
    list, list of Difference
        Of the outputs, empty if their shapes differ; of the hidden states.
    """
    found: list[list[Difference]] = []
    for a, n, b in zip(*((x.outputs, x.hidden) for x in (first, rounded, second)), strict=True):
        names = [name for name in a if name in b and a[name].shape == b[name].shape]
        found.append(
            [
                Difference(k, *_relative(a[k], b[k]), SAFETY * _relative(a[k], n[k])[0])
                for k in names
            ]
        )
    outputs, hidden = found
    return (outputs if len(outputs) == len(first.outputs) == len(second.outputs) else []), hidden


def _shapes(first: Answers, second: Answers) -> str:
    shapes = [
        ", ".join(f"{name} {list(x.shape)}" for name, x in side.outputs.items())
        for side in (first, second)
    ]
    return f"outputs {' against '.join(shapes)}"


def _relative(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Return relative and largest difference, in float64 and a row at a time."""
    apart = size = largest = 0.0
    for a, b in zip(x, y, strict=True):
        a, b = a.double(), b.double()
        apart += float((a - b).square().sum())
        size += float(a.square().sum())
        largest = max(largest, float((a - b).abs().max()))
    return (apart / size) ** 0.5 if size else float(apart > 0), largest


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
