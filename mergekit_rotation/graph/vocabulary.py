"""Which rows of two vocabularies stand for the same token."""

import os

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mergekit_rotation.graph.checkpoints import Checkpoint
from mergekit_rotation.graph.context import Context

Rows = tuple[torch.Tensor, torch.Tensor]
_OTHER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def matching_rows(
    context: Context, reference: Checkpoint, other: Checkpoint, sizes: tuple[int, int]
) -> Rows:
    """Return the rows of the reference and of the other model that hold the same tokens.

    By token where both models come with a tokenizer, by index otherwise (with a warning if the
    vocabularies differ in length). Rows of one model only are left out.

    Parameters
    ----------
    context : Context
    reference, other : Checkpoint
    sizes : (int, int)
        Rows of their embeddings.

    Returns
    -------
    (Tensor, Tensor) of int64
    """
    common = torch.arange(min(sizes))
    files = [_tokenizer_file(checkpoint) for checkpoint in (reference, other)]
    if all(files) and _same_content(*files):  # type: ignore[arg-type]  # both are strings here
        return common, common
    tokens = [_vocabulary(checkpoint) for checkpoint in (reference, other)]
    if tokens[0] is None or tokens[1] is None:
        if sizes[0] != sizes[1]:
            context.warn_once(
                f"{other.model}: {sizes[1]} rows of embeddings, {sizes[0]} in the reference "
                f"{reference.model}, and no tokenizers to compare; the residual stream is matched "
                f"on the first {min(sizes)} rows by index"
            )
        return common, common
    pairs = sorted(
        (row, tokens[1][token])
        for token, row in tokens[0].items()
        if token in tokens[1] and row < sizes[0] and tokens[1][token] < sizes[1]
    )
    left, right = zip(*pairs, strict=True) if pairs else ((), ())
    return torch.tensor(left, dtype=torch.int64), torch.tensor(right, dtype=torch.int64)


def _tokenizer_file(checkpoint: Checkpoint) -> str | None:
    path = os.path.join(checkpoint.index.base_path, "tokenizer.json")
    return path if os.path.exists(path) else None


def _same_content(first: str, second: str) -> bool:
    with open(first, "rb") as a, open(second, "rb") as b:
        return a.read() == b.read()


def _vocabulary(checkpoint: Checkpoint) -> dict[str, int] | None:
    file = _tokenizer_file(checkpoint)
    if file is not None:
        return dict(PreTrainedTokenizerFast(tokenizer_file=file).get_vocab())
    folder = checkpoint.index.base_path
    if not any(os.path.exists(os.path.join(folder, name)) for name in _OTHER_FILES):
        return None
    return dict(AutoTokenizer.from_pretrained(folder).get_vocab())
