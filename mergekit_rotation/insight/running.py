"""Models as transformers runs them, the text they read, and what rounding does to them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from mergekit.options import MergeOptions
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging

from mergekit_rotation.graph.checkpoints import FLOATING, Checkpoint
from mergekit_rotation.graph.errors import RotationError

#: tokens in a row of a text
TEXT_LENGTH = 128
#: how much more than one random rounding of all weights may lie between two models
SAFETY = 4.0


class Unrun(RotationError):
    """A model that cannot be run.

    Parameters
    ----------
    model : str
        Its name.
    text : str
        Why, and what to do.
    """

    def __init__(self, model: str, text: str):
        super().__init__(f"{model}: {text}")
        self.model = model


@contextmanager
def progress(shown: bool) -> Iterator[None]:
    """Show the progress bars of transformers, or not."""
    before = logging.is_progress_bar_enabled()
    (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
    yield
    (logging.enable_progress_bar if before else logging.disable_progress_bar)()


def load(checkpoint: Checkpoint, options: MergeOptions, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model as the class that its configuration names.

    Parameters
    ----------
    checkpoint : Checkpoint
    options : MergeOptions
    dtype : torch.dtype
        In which it will be run.

    Raises
    ------
    RotationError
        If it cannot be loaded, or a tensor is missing that transformers would draw at random.
    """
    folder, trust = checkpoint.index.base_path, options.trust_remote_code
    name = str(checkpoint.model)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    except Exception as problem:
        raise _cannot_load(name, problem) from problem
    config._attn_implementation = config._experts_implementation = "eager"
    given = {"dtype": dtype, "trust_remote_code": trust}
    return built(name, checkpoint.model_class, options, folder, config=config, **given)


def built(
    name: str, model_class: str, options: MergeOptions, folder: str | None, **given: Any
) -> PreTrainedModel:
    """Return a model of complete weights, of a folder or of a ``state_dict`` that is given.

    Parameters
    ----------
    name : str
        What errors call it.
    model_class : str
    options : MergeOptions
    folder : str, optional
    **given
        More arguments of ``from_pretrained``, ``config`` among them.

    Raises
    ------
    RotationError
        If it cannot be loaded, or a tensor is missing that transformers would draw at random.
    """
    try:
        model, found = class_of(given["config"], model_class).from_pretrained(
            folder, output_loading_info=True, **given
        )
    except RotationError:
        raise
    except Exception as problem:
        raise _cannot_load(name, problem) from problem
    if found["missing_keys"]:
        raise Unrun(
            name,
            f"{min(found['missing_keys'])} is missing, and transformers draws it at random; fetch "
            "or save the model again",
        )
    result: PreTrainedModel = model.eval().to(options.device or "cpu")
    return result


def _cannot_load(name: str, problem: Exception) -> Unrun:
    return Unrun(name, f"transformers cannot load it ({first_line(problem)})")


def class_of(config: Any, name: str) -> Any:
    """Return the class of a model, of transformers or of code that comes with the model.

    Raises
    ------
    RotationError
        If there is none.
    """
    found = getattr(transformers, name, None)
    if found is not None:
        return found
    for auto, path in (getattr(config, "auto_map", None) or {}).items():
        if str(path).rpartition(".")[2] == name and hasattr(transformers, auto):
            return getattr(transformers, auto)
    raise RotationError(f"transformers has no class {name}, and the model brings no code for it")


# -- text -----------------------------------------------------------------------------------------


def row_length(config: Any, wanted: int) -> int:
    """Return a length of rows that a model of few positions takes, too."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None) or 2 * wanted
    return max(1, min(wanted, limit // 2))


def read_rows(text: Path, tokenizer: Any, length: int, count: int) -> torch.Tensor:
    """Return the first tokens of a text.

    Parameters
    ----------
    text : Path
    tokenizer : PreTrainedTokenizerBase
    length, count : int
        Tokens in a row, and rows that are wanted at most.

    Returns
    -------
    Tensor of int64, (rows, length)

    Raises
    ------
    RotationError
        If the text does not fill one row.
    """
    content = text.read_text(encoding="utf-8")[: 32 * count * length]
    ids = torch.tensor(tokenizer(content)["input_ids"], dtype=torch.long)
    rows = ids[: len(ids) // length * length].view(-1, length)[:count]
    if not len(rows):
        raise RotationError(f"{text}: has {len(ids)} tokens, and {length} are needed")
    return rows


# -- rounding -------------------------------------------------------------------------------------


def rounding(width: int, stored: torch.dtype, dtype: torch.dtype) -> float:
    """Return by which share of itself a weight may be off.

    Rounding to the stored dtype changes it by up to eps / 2. The rounding errors of a sum over the
    width in the dtype of the computation are independent of one another and add up to eps times
    the root of the width, half of which either model stands for.
    """
    return (torch.finfo(stored).eps + torch.finfo(dtype).eps * width**0.5) / 2


def round_weights(model: PreTrainedModel, size: float) -> None:
    """Change every weight by a random share of itself, uniform up to a size."""
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            generator = torch.Generator(parameter.device).manual_seed(seed)
            noise = torch.rand(parameter.shape, generator=generator, device=parameter.device)
            parameter.mul_(1 + size * (2 * noise.to(parameter.dtype) - 1))


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Return the coarsest dtype of the stored weights; of pickled ones what the config says."""
    headers = [checkpoint.header(name) for name in checkpoint.index.tensor_paths]
    found = {FLOATING[entry[1]] for entry in headers if entry is not None and entry[1] in FLOATING}
    if not found:
        found = {getattr(checkpoint.config, "dtype", None) or torch.float32}
    return coarsest(found)


def coarsest(dtypes: set[torch.dtype]) -> torch.dtype:
    """Return the floating-point dtype of the largest rounding errors."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def first_line(problem: Exception) -> str:
    """Return the first line of an error, or its type if it says nothing."""
    return next(iter(str(problem).strip().splitlines()), type(problem).__name__)
