"""Merges of tiny models for the tests: folders, configurations, ways to run mergekit."""

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
import torch
import yaml
from click.testing import CliRunner, Result
from mergekit.architecture import get_architecture_info
from mergekit.config import MergeConfiguration
from mergekit.graph import Executor
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import scramble
import tiny
from mergekit_rotation import proof
from mergekit_rotation.architecture import find_family
from scramble_stream import scramble_stream

QUIET = ("--no-copy-tokenizer", "--no-write-model-card", "--quiet")
StateDict = dict[str, torch.Tensor]


def weights(folder: Path) -> StateDict:
    """Load all tensors of a folder."""
    state: StateDict = {}
    for file in sorted(folder.glob("*.safetensors")):
        state |= load_file(file)
    for file in sorted(folder.glob("*.bin")):
        state |= torch.load(file)
    return state


def changed_copy(
    source: Path, target: Path, change: Callable[[StateDict], StateDict | None]
) -> Path:
    """Copy a single-file model with other weights."""
    shutil.copytree(source, target)
    state = weights(source)
    save_file(change(state) or state, target / "model.safetensors", metadata={"format": "pt"})
    return target


def scrambled(case: str, seed: int, config: Any = None) -> Callable[[StateDict], StateDict]:
    """Return a change of coordinates, made by a routine of the tests alone."""
    family, config = tiny.FAMILIES[case].family, config or _config(case)
    return lambda state: scramble.scramble(state, config, family, seed=seed)


@cache
def _config(case: str) -> Any:
    return tiny.build(case).config


def save_tokenizer(folder: Path, tokens: Sequence[str]) -> None:
    """Give a model a tokenizer with one word per row of its embeddings."""
    words = {token: row for row, token in enumerate(tokens)}
    model = tokenizers.models.WordLevel(words, unk_token="t0")  # no password
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model)).save_pretrained(folder)


def save_adapter(model: Any, folder: Path, learnt: bool = True) -> None:
    """Write a LoRA adapter of a model with a random change, or with none yet."""
    settings = LoraConfig(
        r=2,
        target_modules=["q_proj", "down_proj"],
        task_type="CAUSAL_LM",
        init_lora_weights=not learnt,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapted = get_peft_model(copy.deepcopy(model), settings)
    adapted.peft_config["default"].base_model_name_or_path = "base"
    adapted.save_pretrained(folder, save_embedding_layers=False)


class Twins:
    """A tiny model and scrambled twins of it on disk."""

    def __init__(self, case: str, folder: Path, count: int = 1, **overrides: Any):
        self.case = case
        self.model = tiny.build(case, **overrides)
        self.inputs = tiny.inputs(case)
        self.reference = folder / "reference"
        tiny.save(self.model, self.reference)
        self.others = [self.twin(folder / f"twin-{k}", seed=k + 1) for k in range(count)]

    def twin(self, target: Path, seed: int) -> Path:
        """Write the model in other coordinates."""
        if tiny.FAMILIES[self.case].family in scramble.NAMES:
            change = scrambled(self.case, seed, self.model.config)
            return changed_copy(self.reference, target, change)
        twin = copy.deepcopy(self.model)
        family = find_family(twin.config, type(twin).__name__)
        assert family is not None
        twin.load_state_dict(proof.scrambled(twin, family, seed))
        tiny.save(twin, target)
        return target

    def turned(self, target: Path) -> Path:
        """Write the model with its residual stream rotated, and a head of its own."""
        family = tiny.FAMILIES[self.case].family

        def change(state: StateDict) -> StateDict:
            return scramble_stream(state, self.model.config, family, "orthogonal", seed=5)

        file = changed_copy(self.reference, target, change) / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": False}))
        return target

    def distance(self, merged: Path) -> float:
        """Largest difference of the merged model's outputs from the reference's."""
        loaded = type(self.model).from_pretrained(merged, attn_implementation="eager").eval()
        change = tiny.outputs(loaded, self.inputs) - tiny.outputs(self.model, self.inputs)
        return float(change.abs().max())


def protected(model: Any, target: Path, condition: float) -> Path:
    """Save a model permuted, rotated and scaled, by the same function."""
    other = copy.deepcopy(model)
    family = find_family(other.config, type(other).__name__)
    assert family is not None
    other.load_state_dict(proof.scrambled(other, family, seed=1, condition=condition))
    tiny.save(other, target)
    return target


def stored(source: Path, target: Path, pickled: bool, sharded: bool) -> Path:
    """Store a model in another format."""
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    state, ending = weights(source), "bin" if pickled else "safetensors"
    stem = "pytorch_model" if pickled else "model"
    names = sorted(state)
    parts = [names[:10], names[10:]] if sharded else [names]
    index = {}
    for number, part in enumerate(parts, 1):
        file = f"{stem}-{number:05}-of-{len(parts):05}.{ending}" if sharded else f"{stem}.{ending}"
        index |= dict.fromkeys(part, file)
        some = {name: state[name] for name in part}
        if pickled:
            torch.save(some, target / file)
        else:
            save_file(some, target / file, metadata={"format": "pt"})
    if sharded:
        text = json.dumps({"metadata": {}, "weight_map": index})
        (target / f"{stem}.{ending}.index.json").write_text(text)
    return target


def same(first: StateDict, second: StateDict) -> bool:
    """Tell whether two models have bitwise the same tensors, in the same order."""
    return list(first) == list(second) and all(
        x.dtype == second[name].dtype and torch.equal(x, second[name]) for name, x in first.items()
    )


def config(
    method: str, models: list[Path], weight: float | None = 0.5, **more: Any
) -> dict[str, Any]:
    """Return a configuration in the ``models:`` form."""
    entries = [
        {"model": str(model), **({"parameters": {"weight": weight}} if weight is not None else {})}
        for model in models
    ]
    return {"merge_method": method, "models": entries, "dtype": "float32", **more}


def write(configuration: Mapping[str, Any] | str, folder: Path) -> Path:
    """Write a configuration to a YAML file."""
    file = folder / "config.yml"
    text = configuration if isinstance(configuration, str) else yaml.safe_dump(dict(configuration))
    file.write_text(text)
    return file


def merge(configuration: Mapping[str, Any] | str, out: Path, *options: str) -> Result:
    """Run ``mergekit-yaml`` in this process."""
    from mergekit.scripts.run_yaml import main

    file = write(configuration, out.parent)
    return CliRunner().invoke(main, [str(file), str(out), *QUIET, *options])


def planned(configuration: Mapping[str, Any] | str, out: Path, *options: str) -> Result:
    """Run ``mergekit-rotation plan`` in this process."""
    from mergekit_rotation.insight.plan_command import main

    file = write(configuration, out.parent)
    return CliRunner().invoke(main, [str(file), str(out), *QUIET, *options])


def merged(configuration: Mapping[str, Any] | str, out: Path, *options: str) -> Path:
    """Run a merge that has to succeed."""
    result = merge(configuration, out, *options)
    if result.exception is not None:
        raise result.exception
    return out


def planner(raw: Mapping[str, Any], **options: Any) -> MergePlanner:
    """Return the planner of a merge, as a program would make it."""
    configuration, chosen = MergeConfiguration.model_validate(raw), MergeOptions(**options)
    info = get_architecture_info(configuration, chosen)
    LoaderCache().setup(chosen)
    donor = configuration.base_model or configuration.referenced_models()[0]
    return MergePlanner(configuration, info, chosen, donor.config())


def schedule(raw: Mapping[str, Any], out: Path, **options: Any) -> tuple[list[Any], dict[Any, int]]:
    """Return the tasks in the order in which mergekit's executor runs them, and last uses."""
    executor = Executor(planner(raw, **options).plan_to_disk(str(out)))
    last = {handle.task(): i for handle, i in executor.schedule.last_use_index.items()}
    return [handle.task() for handle in executor.schedule.tasks], last


def command(
    name: str, *arguments: str, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run an installed command as a user does."""
    path = Path(sys.executable).parent / name
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [str(path), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        cwd=cwd,
    )
