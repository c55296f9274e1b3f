"""Small random models of the classes that a data file declares."""

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel

from mergekit_rotation.architecture import Conditions, Family, holds
from mergekit_rotation.architecture.sizes import first, lookup
from mergekit_rotation.proof.elements import layer_count, present
from mergekit_rotation.proof.errors import ProofError

#: sizes that differ from each other in every product that a tensor may have
_SIZES = {"e": 64, "f": 88, "heads": 4, "kv": 2, "qk": 32, "vo": 32, "x": 6, "xf": 28}
_ENTRIES = {
    "vocab_size": 67,
    "max_position_embeddings": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FIRST_ORDINARY_TOKEN = 3
#: inputs other than tokens, and their sizes behind the batch's
_FEATURES = {
    "pixel_values": ("num_channels", "image_size", "image_size"),
    "input_features": ("num_mel_bins", "2 * max_source_positions"),
}
_LAYER = "[layer]"
_EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


def model_class(name: str) -> type[PreTrainedModel]:
    """Return a model class of transformers.

    Raises
    ------
    ProofError
        If transformers has no such class, or it reads what we cannot make up.
    """
    found = getattr(transformers, name, None)
    if found is None:
        raise ProofError("transformers has no class of this name")
    if found.main_input_name not in ("input_ids", *_FEATURES):
        raise ProofError(
            f"it reads {found.main_input_name}, and only models of tokens, images and "
            "spectrograms can be checked"
        )
    result: type[PreTrainedModel] = found
    return result


def example_configs(family: Family, model_type: str) -> dict[str, PretrainedConfig]:
    """Return configurations of small models, one for each alternative that the file knows.

    Their keys say which alternative it is. The first size expression that is the name of an entry
    gives it a small value, conditions get the first value that fulfils them, and all biases are
    turned on.

    Raises
    ------
    ProofError
    """
    if model_type not in CONFIG_MAPPING:
        raise ProofError(f"transformers has no configuration for model_type {model_type!r}")
    make = CONFIG_MAPPING[model_type]
    configs: dict[str, PretrainedConfig] = {}
    for alternative, conditions in _alternatives(family).items():
        entries = _entries(family, make(), conditions)
        try:
            config = make(**_nested(entries), **_EAGER)
        except Exception as problem:
            raise ProofError(
                f"{make.__name__} does not take {entries} ({line(problem)}); write entries that "
                'fit under "example", or name a MODEL'
            ) from problem
        whole = {path: values for path, values in conditions[0].items() if _LAYER not in path}
        if not (holds(family.when, config) and holds(whole, config)):
            raise ProofError(
                f'the conditions "when" {alternative or "of the file"} do not hold in a small '
                'model; write entries that fit under "example", or name a MODEL'
            )
        configs[alternative] = config
    return configs


def _alternatives(family: Family) -> dict[str, list[Conditions]]:
    """Collect the conditions of the groups of queries and keys that one model can fulfil."""
    found: dict[str, list[Conditions]] = {}
    for group in (group for heads in family.attention for group in heads.query_key):
        whole = [f"{p}: {json.dumps(v[0])}" for p, v in group.when.items() if _LAYER not in p]
        found.setdefault(", ".join(whole), []).append(group.when)
    return found or {"": [{}]}


def _entries(
    family: Family,
    default: PretrainedConfig,
    alternatives: list[Conditions],
) -> dict[str, Any]:
    """Map paths into a configuration to the entries of a small model."""
    layers = max(2, len(alternatives))
    text = default.get_text_config()
    part = next((f"{key}." for key in default.sub_configs if getattr(default, key) is text), "")
    entries: dict[str, Any] = {part + k: v for k, v in _ENTRIES.items() if hasattr(text, k)}
    entries |= dict.fromkeys(family.layers.values(), layers)
    for number, (axis, expressions) in enumerate(family.sizes.items()):
        for path in expressions:
            if path not in family.sizes and hasattr(*_place(default, path)):
                entries.setdefault(path, _SIZES.get(axis, 20 + 4 * number))
                break
    entries |= {
        part + name: True
        for name, value in text.to_dict().items()
        if "bias" in name and isinstance(value, bool)
    }
    for when in (family.when, *alternatives):
        for path, values in when.items():
            name = path.removesuffix(_LAYER)
            if isinstance(_place(default, name)[0], Mapping):
                continue  # of a table all entries would be needed
            if name != path:
                kinds = [w[path][0] for w in alternatives if path in w]
                entries[name] = [kinds[k % len(kinds)] for k in range(layers)]
            elif lookup(default, path) not in values:
                entries[path] = values[0]
    return entries | dict(family.example)


def _place(config: PretrainedConfig, path: str) -> tuple[Any, str]:
    """Return the part of a configuration that an entry belongs to, and its name there."""
    parent, _, name = path.rpartition(".")
    return (lookup(config, parent) if parent else config), name


def _nested(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Turn dotted paths into dictionaries inside of each other."""
    result: dict[str, Any] = {}
    for path, value in entries.items():
        *parents, name = path.split(".")
        inner = result
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = copy.deepcopy(value)
    return result


def read_config(folder: Path, family: Family) -> tuple[str, PretrainedConfig]:
    """Return class and configuration of a user's model, with few layers and tokens.

    Raises
    ------
    ProofError
        If the file does not declare the model.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as problem:
        raise ProofError(f"{folder}: cannot read its config.json ({line(problem)})") from problem
    name = str(next(iter(config.architectures or ["?"])))
    if name not in family.models.get(config.model_type, ()) or not holds(family.when, config):
        raise ProofError(
            f"{folder}: the file does not declare {name} ({config.model_type}) under its config"
        )
    return name, _shortened(name, config, family)


def check_memory(name: str, config: PretrainedConfig) -> None:
    """Refuse a model that is too large for this machine.

    Raises
    ------
    ProofError
    """
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in build(name, config).parameters())
    # The model, its tensors, those of a second model and what has been moved, in float64.
    demand, memory = 4 * 8 * size, _memory()
    if memory is not None and demand > memory:
        raise ProofError(
            f"a model of {layer_count(config)} layers takes {demand / 2**30:.0f} GiB in float64, "
            f"and this machine has {memory / 2**30:.0f} GiB; check a small model, without MODEL "
            'and with entries under "example" for what is large in it'
        )


def _shortened(name: str, config: PretrainedConfig, family: Family) -> PretrainedConfig:
    """Return a configuration with few tokens, and layers until there is one of each kind."""
    layers = min(lookup(config, depth) for depth in family.layers.values())
    with torch.device("meta"):
        state = dict(build(name, config).state_dict())
    kinds = [
        [(block.kind, repr(block.layout)) for block in present(family, config, index, state)]
        for index in range(layers)
    ]
    needed = [kinds.index(one) + 1 for one in kinds]
    count = min(layers, max(2, *needed))
    short = copy.deepcopy(config)
    for part in {id(c): c for c in (short, short.get_text_config())}.values():
        for key, value in part.to_dict().items():
            if isinstance(value, list) and len(value) == layers:
                setattr(part, key, value[:count])
        for key, entry in {**_ENTRIES, "num_hidden_layers": count}.items():
            if key != "max_position_embeddings" and hasattr(part, key):
                setattr(part, key, entry)
        part._attn_implementation = part._experts_implementation = "eager"
    for depth in family.layers.values():
        setattr(*_place(short, depth), count)
    return short


def _memory() -> int | None:
    """Return the bytes of memory of the machine, if the system tells."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def variants(config: PretrainedConfig, family: Family) -> dict[str, PretrainedConfig]:
    """Return a configuration and, where tied embeddings forbid rotations, the same untied."""
    tied = getattr(config, "tie_word_embeddings", False)
    if tied and family.stream.tied and "orthogonal" in family.stream.maps:
        untied = copy.deepcopy(config)
        untied.tie_word_embeddings = False
        return {"tied embeddings": config, "untied embeddings": untied}
    return {"": config}


def build(name: str, config: PretrainedConfig) -> PreTrainedModel:
    """Return a model with parameters that are still to be drawn.

    Raises
    ------
    ProofError
    """
    try:
        with torch.random.fork_rng(devices=[]):
            return model_class(name)(copy.deepcopy(config)).eval()
    except ProofError:
        raise
    except Exception as problem:
        raise ProofError(
            f"transformers cannot build it ({line(problem)}); write entries that fit under "
            '"example", or name another MODEL'
        ) from problem


def random_inputs(
    model: PreTrainedModel, length: int = 12, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Return a batch of random tokens, or of what else a model reads."""
    choices = (3,) if type(model).__name__.endswith("MultipleChoice") else ()
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", _FIRST_ORDINARY_TOKEN + 1)
    generator = torch.Generator().manual_seed(seed)
    shape = (2, *choices, length)
    ids = torch.randint(_FIRST_ORDINARY_TOKEN, vocabulary, shape, generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.main_input_name in _FEATURES:
        sizes = [first((x,), model.config, {}, x) for x in _FEATURES[model.main_input_name]]
        inputs = {model.main_input_name: torch.randn((2, *sizes), generator=generator)}
    return inputs | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})


def line(problem: Exception) -> str:
    """Return the message of an error as one line."""
    return " ".join(str(problem).split())
