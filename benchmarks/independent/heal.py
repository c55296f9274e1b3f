"""Healing: a merged model is distilled from its parents on text that they sample themselves."""

from dataclasses import dataclass

import evaluate
import torch
import train
from torch import nn
from torch.nn.functional import kl_div
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

NAME = "llama"
PAIRS = ((0, 1), (0, 2), (3, 4))
VARIANTS = ("unaligned", "orthogonal")
STEPS = (0, 50, 100, 200)
RANK, RATE, BATCH = 8, 3e-3, 8
SEQUENCES, LENGTH = 256, 128
NEWLINE = 10


@dataclass(frozen=True)
class Healed:
    """Mean loss of the parents, and the losses of each variant at STEPS."""

    parents: float
    losses: dict[str, tuple[float, ...]]


class LowRank(nn.Module):
    """A weight plus a product of two thin matrices, at first zero."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        rows, columns = weight.shape
        self.down = nn.Parameter(torch.randn(RANK, columns) / columns**0.5)
        self.up = nn.Parameter(torch.zeros(rows, RANK))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.up @ self.down


def add_low_rank(model: PreTrainedModel) -> list[nn.Parameter]:
    """Freeze a model, and give every linear layer a low-rank correction."""
    model.requires_grad_(False)
    corrections: list[nn.Parameter] = []
    for layer in [module for module in model.modules() if isinstance(module, nn.Linear)]:
        correction = LowRank(layer.weight)
        parametrize.register_parametrization(layer, "weight", correction)
        corrections += correction.parameters()
    return corrections


@torch.inference_mode()
def sample(model: PreTrainedModel, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences that a model writes after a newline, and its log-probabilities on them."""
    start = torch.full((count, 1), NEWLINE)
    ids = model.generate(
        input_ids=start,
        attention_mask=torch.ones_like(start),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=LENGTH - 1,
    )
    return ids, model(input_ids=ids, use_cache=False).logits.log_softmax(-1)


def distil(
    model: PreTrainedModel, ids: torch.Tensor, targets: torch.Tensor, seed: int
) -> tuple[float, ...]:
    """Train low-rank corrections by the KL divergence from the parents; losses at STEPS."""
    torch.manual_seed(seed)
    optimizer = torch.optim.Adam(add_low_rank(model), lr=RATE)
    losses = [evaluate.code_loss(model)]
    order = torch.cat([torch.randperm(len(ids)) for _ in range(-(-STEPS[-1] * BATCH // len(ids)))])
    for step, rows in enumerate(order.split(BATCH)[: STEPS[-1]], start=1):
        logits = model(input_ids=ids[rows], use_cache=False).logits
        loss = kl_div(
            logits.log_softmax(-1).flatten(0, 1),
            targets[rows].flatten(0, 1),
            log_target=True,
            reduction="batchmean",
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in STEPS:
            losses.append(evaluate.code_loss(model))
    return tuple(losses)


def heal(pair: tuple[int, int]) -> Healed:
    """Heal the averages of one pair."""
    torch.manual_seed(0)
    parents = [evaluate.load(train.member(NAME, seed)) for seed in pair]
    samples = [sample(parent, SEQUENCES // 2) for parent in parents]
    ids, targets = (torch.cat(parts) for parts in zip(*samples, strict=True))
    losses = {
        variant: distil(evaluate.load(evaluate.midpoint(NAME, pair, variant)), ids, targets, seed=1)
        for variant in VARIANTS
    }
    return Healed(sum(map(evaluate.code_loss, parents)) / 2, losses)
