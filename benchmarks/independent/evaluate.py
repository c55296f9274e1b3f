"""What is measured: interpolation curves, forks, and a fine-tune carried to other models.

Every merge is made by `mergekit-yaml` in a process of its own. Losses are in nats per byte of
held-out text, as in the quickstart.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import train  # first: it puts the folder of the quickstart, with loss.py, on the path
import yaml
from loss import TEXTS, windows
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

State = dict[str, torch.Tensor]

PAIRS = ((0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (3, 4))
POINTS = tuple(step / 10 for step in range(11))
MIDDLE = POINTS.index(0.5)
BATCH = 16
HEADERS_BYTES = 1 << 14
#: What `rotation_linear` is told beside the models; None is plain `linear`.
VARIANTS: dict[str, dict[str, Any] | None] = {
    "unaligned": None,
    "local only": {},
    "permutation": {"align_residual": "permutation"},
    "orthogonal": {"align_residual": "orthogonal"},
    "orthogonal, 3 rounds": {"align_residual": "orthogonal", "align_residual_rounds": 3},
}
#: Largest difference between the loss of a merge and that of the same point of a curve.
TOLERANCE = 1e-4

FINE_TUNED, TARGETS = 1, (0, 2, 3, 4)


@dataclass(frozen=True)
class Curve:
    """Losses at POINTS between a model and another."""

    losses: tuple[float, ...]

    @property
    def heights(self) -> list[float]:
        """The losses above the chord, the straight line between the two ends."""
        first, last = self.losses[0], self.losses[-1]
        chord = [first + t * (last - first) for t in POINTS]
        return [loss - straight for loss, straight in zip(self.losses, chord, strict=True)]

    @property
    def barrier(self) -> float:
        return max(self.heights)

    @property
    def middle(self) -> float:
        return self.losses[MIDDLE]

    @property
    def middle_barrier(self) -> float:
        return self.heights[MIDDLE]


def prepare() -> None:
    """One thread per worker process, and only results on the screen."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()


def merge(out: str, method: str, models: list[dict[str, Any]], **more: Any) -> Path:
    """Run `mergekit-yaml`, unless this run of the benchmark has made the same merge already."""
    folder = train.CACHE / "merged" / out.replace(", ", "-").replace(" ", "-")
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(exist_ok=True)
    file = folder.with_suffix(".yml")
    config = {"merge_method": method, "models": models, "dtype": "float32", **more}
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    command = [str(Path(sys.executable).parent / "mergekit-yaml"), str(file), str(folder)]
    done = subprocess.run(
        [*command, "--no-copy-tokenizer", "--no-write-model-card", "--quiet"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode != 0:
        why = "\n".join(done.stderr.strip().splitlines()[-3:])
        raise RuntimeError(f"mergekit-yaml failed on\n{file.read_text()}{why}")
    return folder


def average(out: str, a: Path, b: Path, variant: str) -> Path:
    """Merge two models half and half."""
    models = [{"model": str(model), "parameters": {"weight": 0.5}} for model in (a, b)]
    parameters = VARIANTS[variant]
    if parameters is None:
        return merge(f"{out}-{variant}", "linear", models)
    return merge(f"{out}-{variant}", "rotation_linear", models, parameters=parameters)


def midpoint(name: str, pair: tuple[int, int], variant: str) -> Path:
    """Merge two seeds half and half."""
    a, b = (train.member(name, seed) for seed in pair)
    return average(f"middle-{name}-{pair[0]}-{pair[1]}", a, b, variant)


def load(folder: Path) -> PreTrainedModel:
    """Read a checkpoint, and make sure that nothing of it is missing."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"], f"{folder.name} lacks {info['missing_keys']}"
    result: PreTrainedModel = model.eval()
    return result


def state(folder: Path) -> State:
    """All tensors of a checkpoint; a head that is tied to the embedding stands on its own."""
    return {name: tensor.clone() for name, tensor in load(folder).state_dict().items()}


def untied(folder: Path) -> PreTrainedModel:
    """A model of the same configuration whose head is not tied, to be filled with tensors."""
    config = AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = False
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.eval()


@torch.inference_mode()
def text_loss(model: PreTrainedModel, text: bytes) -> float:
    """Mean loss per byte, every window read on its own."""
    total, count = 0.0, 0
    for ids in windows(text).split(BATCH):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        total += cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").item()
        count += ids[:, 1:].numel()
    return total / count


def code_loss(model: PreTrainedModel) -> float:
    return text_loss(model, TEXTS["code"].read_bytes())


def held_out_headers() -> bytes:
    """The start of the C headers that the fine-tune has not seen."""
    return train.split(train.headers_text())[1][:HEADERS_BYTES]


def aligned(name: str, pair: tuple[int, int], variant: str) -> Path:
    """The second model of a pair in the coordinates of the first."""
    a, b = (train.member(name, seed) for seed in pair)
    parameters = VARIANTS[variant]
    if parameters is None:
        return b
    return merge(
        f"aligned-{name}-{pair[0]}-{pair[1]}-{variant}",
        "rotation_align",
        [{"model": str(b)}],
        parameters={"align_reference": str(a), **parameters},
    )


def curves(name: str, pair: tuple[int, int]) -> dict[str, Curve]:
    """Losses between two seeds, by variant; those of the first pair are checked by merges."""
    first = train.member(name, pair[0])
    start, model, result = state(first), untied(first), {}
    model.load_state_dict(start)
    start_loss = code_loss(model)
    for variant in VARIANTS:
        end = state(aligned(name, pair, variant))
        losses = [start_loss]
        for t in POINTS[1:]:
            model.load_state_dict({key: start[key].lerp(end[key], t) for key in start})
            losses.append(code_loss(model))
        result[variant] = Curve(tuple(losses))
        if pair == PAIRS[0]:
            difference = code_loss(load(midpoint(name, pair, variant))) - losses[MIDDLE]
            assert abs(difference) < TOLERANCE, (
                f"{name}, {variant}: the loss of the merge differs by {difference:.1e} from that "
                "of the middle of the curve"
            )
    return result


def forks() -> dict[str, dict[str, float]]:
    """Losses of two forks of one model and of their averages, on both texts."""
    a, b = train.CACHE / "fork-code", train.CACHE / "fork-docs"
    rows = {"origin": train.member("llama", 0), "fork on code": a, "fork on documentation": b}
    for variant in ("unaligned", "local only", "orthogonal"):
        rows[f"average, {variant}"] = average("forks", a, b, variant)
    return {
        row: {name: text_loss(load(folder), file.read_bytes()) for name, file in TEXTS.items()}
        for row, folder in rows.items()
    }


def transport(target: int) -> dict[str, dict[str, float]]:
    """Losses of a model that is given what the fine-tune of another one has learned."""
    origin, goal = train.member("llama", FINE_TUNED), train.member("llama", target)
    tuned = train.CACHE / "finetune"
    before, after = state(origin), state(tuned)
    naive = untied(goal)
    naive.load_state_dict({k: v + after[k] - before[k] for k, v in state(goal).items()})
    rows = {"target": load(goal), "fine-tune": load(tuned), "naive": naive}
    for variant in ("local only", "orthogonal"):
        rows[variant] = load(
            merge(
                f"carried-{target}-{variant}",
                "rotation_task_arithmetic",
                [
                    {
                        "model": str(tuned),
                        "parameters": {"weight": 1.0, "align_task_base": str(origin)},
                    }
                ],
                base_model=str(goal),
                parameters=VARIANTS[variant],
            )
        )
    headers = held_out_headers()
    return {
        row: {"headers": text_loss(model, headers), "code": code_loss(model)}
        for row, model in rows.items()
    }
