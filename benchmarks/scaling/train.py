"""Small encoders and vision transformers, trained from different seeds on the CPU and cached.

The encoder reads the bytes of Python's standard library, 15 % of them masked. The vision
transformer tells letters and digits apart, drawn from the fonts of matplotlib with random place,
size, turn, and noise. Initial weights and the order of the data both differ between seeds.
"""

import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from transformers import (
    BertConfig,
    BertForMaskedLM,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
    get_cosine_schedule_with_warmup,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes" / "quickstart"))

import make

CACHE = Path(__file__).resolve().parent / "cache"
SEEDS = range(3)
BATCH = 32
LENGTH, MASK, MASKED = 64, 256, 0.15
SIDE, SYMBOLS = 24, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
FONTS = ("DejaVuSans.ttf", "DejaVuSerif.ttf", "DejaVuSansMono.ttf", "DejaVuSans-Oblique.ttf")

Batch = dict[str, torch.Tensor]

_SMALL = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


@cache
def _text() -> torch.Tensor:
    return torch.frombuffer(bytearray(make.code_text()), dtype=torch.uint8).long()


def masked_bytes(generator: torch.Generator, held_out: bool) -> Batch:
    """Windows of the text with some bytes masked; the last 64 KiB are held out."""
    text = _text()[-(1 << 16) :] if held_out else _text()[: -(1 << 16)]
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
    ids = text[starts + torch.arange(LENGTH)]
    masked = torch.rand(ids.shape, generator=generator) < MASKED
    return {
        "input_ids": ids.masked_fill(masked, MASK),
        "labels": ids.masked_fill(~masked, -100),
    }


@cache
def _fonts() -> list[ImageFont.FreeTypeFont]:
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return [ImageFont.truetype(str(folder / f), n) for f, n in product(FONTS, range(13, 19))]


def symbols(generator: torch.Generator, held_out: bool) -> Batch:
    """Drawn symbols, 1 x SIDE x SIDE; the last of the fonts is held out."""

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    sizes = len(_fonts()) // len(FONTS)
    cut = len(_fonts()) - sizes
    pixels, labels = [], []
    for _ in range(BATCH):
        label = draw(0, len(SYMBOLS))
        font = _fonts()[draw(cut, len(_fonts())) if held_out else draw(0, cut)]
        image = Image.new("L", (SIDE, SIDE))
        centre = (SIDE // 2 + draw(-2, 3), SIDE // 2 + draw(-2, 3))
        ImageDraw.Draw(image).text(centre, SYMBOLS[label], fill=255, font=font, anchor="mm")
        pixels.append(np.asarray(image.rotate(draw(-10, 11)), dtype=np.float32) / 255)
        labels.append(label)
    clean = torch.from_numpy(np.stack(pixels))[:, None]
    noise = 0.1 * torch.randn(clean.shape, generator=generator)
    return {"pixel_values": clean + noise - 0.15, "labels": torch.tensor(labels)}


@dataclass(frozen=True)
class Kind:
    """How to make a model of one kind, its data, and how long and fast it is trained."""

    title: str
    make: Callable[[], PreTrainedModel]
    data: Callable[[torch.Generator, bool], Batch]
    steps: int
    rate: float


KINDS = {
    "encoder": Kind(
        "BERT (masked bytes)",
        lambda: BertForMaskedLM(
            BertConfig(vocab_size=257, max_position_embeddings=LENGTH, pad_token_id=0, **_SMALL)
        ),
        masked_bytes,
        2000,
        1e-3,
    ),
    "vision": Kind(
        "ViT (drawn symbols)",
        lambda: ViTForImageClassification(
            ViTConfig(
                image_size=SIDE, patch_size=4, num_channels=1, num_labels=len(SYMBOLS), **_SMALL
            )
        ),
        symbols,
        2500,
        2e-3,
    ),
}


def member(kind: str, seed: int) -> Path:
    """Folder of one trained model."""
    return CACHE / f"{kind}-{seed}"


def train(kind: str, seed: int) -> None:
    """Train one model, unless the cache has it."""
    target, entry = member(kind, seed), KINDS[kind]
    if (target / "config.json").exists():
        return
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = entry.make()
    generator = torch.Generator().manual_seed(1000 + seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=entry.rate, weight_decay=0.1)
    schedule = get_cosine_schedule_with_warmup(optimizer, entry.steps // 20, entry.steps)
    model.train()
    for _ in range(entry.steps):
        loss = model(**entry.data(generator, False)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    print(f"{target.name}: loss of the last batch {loss.item():.3f}", flush=True)
    model.save_pretrained(target)


def train_all(workers: int = 2) -> None:
    """Train what the cache does not hold yet, one process and one thread per model."""
    jobs = [(kind, seed) for kind in KINDS for seed in SEEDS]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(train, *job) for job in jobs]:
            future.result()


if __name__ == "__main__":
    train_all()
