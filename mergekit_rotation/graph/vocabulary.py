"""Which rows of two vocabularies stand for the same token, and the order of tokens in a union."""

import os
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import torch
from mergekit.tokenizer import BuildTokenizer
from mergekit.tokenizer.build import TokenizerInfo
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


# -- unions ---------------------------------------------------------------------------------------

_by_row = ContextVar("_by_row", default=False)


class BuildByRow(BuildTokenizer):
    """`BuildTokenizer` that adds the tokens of each model to a union in the order of their rows.

    mergekit takes them as they come out of a hash table, in another order each time; the order of
    rows is one of those.
    """

    def execute(self, **_kwargs: Any) -> TokenizerInfo:
        token = _by_row.set(True)
        try:
            return super().execute()
        finally:
            _by_row.reset(token)


def by_row(build: BuildTokenizer | None) -> BuildByRow | None:
    """Return the twin of mergekit's task, if there is one."""
    if build is None:
        return None
    return BuildByRow(**{name: getattr(build, name) for name in BuildTokenizer.model_fields})


class _Ordered:
    """A tokenizer whose vocabulary is listed by row."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def get_vocab(self) -> dict[str, int]:
        return dict(sorted(self._tokenizer.get_vocab().items(), key=lambda item: item[1]))


def listed(tokenizers: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the tokenizers of a union, ordered if a `BuildByRow` is at work."""
    if not _by_row.get():
        return tokenizers
    return {model: _Ordered(tokenizer) for model, tokenizer in tokenizers.items()}
