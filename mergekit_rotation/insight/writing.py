"""The options of mergekit's that hold for a command that writes a model.

They are listed here because the help must not take the seconds that importing mergekit takes; a
test compares them with mergekit's own.
"""

from collections.abc import Callable
from typing import Any

import click


def _size(context: click.Context, parameter: click.Parameter, value: str) -> int:
    """Read a number of parameters, as mergekit does."""
    factors = {"k": 10**3, "m": 10**6, "b": 10**9}
    digits = value[:-1] if value[-1:].lower() in factors else value
    if not (digits.isascii() and digits.isdigit() and int(digits) > 0):
        raise click.BadParameter("write a number like 500M or 5B", context, parameter)
    return int(digits) * factors.get(value[-1].lower(), 1)


#: field of mergekit's MergeOptions -> how it is given
WRITING: dict[str, dict[str, Any]] = {
    "low_cpu_memory": {"is_flag": True, "help": "Keep intermediate tensors on the GPU."},
    "read_to_gpu": {"is_flag": True, "help": "Read weights directly to the GPU."},
    "multi_gpu": {"is_flag": True, "help": "Use all GPUs."},
    "gpu_rich": {
        "is_flag": True,
        "help": "--cuda --low-cpu-memory --read-to-gpu --multi-gpu.",
    },
    "lazy_unpickle": {"is_flag": True, "help": "Read pickled weights with less memory."},
    "out_shard_size": {
        "default": "5B",
        "show_default": True,
        "callback": _size,
        "help": "Parameters per file of OUT.",
    },
    "async_write": {"is_flag": True, "help": "Write files in the background (more memory)."},
    "write_threads": {"type": int, "default": 1, "help": "How many threads do that."},
    "copy_tokenizer": {
        "switch": True,
        "default": True,
        "help": "Copy tokenizer and other files of A.  [default: yes]",
    },
    "write_model_card": {
        "switch": True,
        "default": True,
        "help": "Write a README.md on what was aligned.  [default: yes]",
    },
    "transformers_cache": {"metavar": "FOLDER", "help": "Where models of the hub are kept."},
    "lora_merge_cache": {"metavar": "FOLDER", "help": "Where MODEL+ADAPTER is merged."},
    "lora_merge_dtype": {"metavar": "DTYPE", "help": "In which it is merged."},
}


def writing_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options to a command."""
    for name, given in reversed(WRITING.items()):
        flag = name.replace("_", "-")
        given = dict(given)
        text = f"--{flag}/--no-{flag}" if given.pop("switch", False) else f"--{flag}"
        function = click.option(text, name, **given)(function)
    return function
