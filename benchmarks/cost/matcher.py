"""Matching one layer of BERT-base shapes: ours, and the paper's public matcher rewritten.

The latter as arXiv 2502.00264 has it, section 3: a linear assignment over a cost of three terms
(input weights, input biases, output weights), a dense permutation matrix that the weights are
multiplied by, and for every head in a loop two SVDs and products with the factors. It knows no
certificate and no order of heads.
"""

import time

import torch
from scipy.optimize import linear_sum_assignment
from transformers import BertConfig, PretrainedConfig

from mergekit_rotation.architecture import find_family
from mergekit_rotation.symmetry import (
    AttentionLayout,
    Permute,
    act,
    full_precision,
    solve_attention,
    solve_neurons,
)

State = dict[str, torch.Tensor]
#: blocks, and the tensors of the reference and of the other
Layer = tuple[list, State, State]

SELF = "encoder.layer.${layer_index}.attention.self."
OUT = "encoder.layer.${layer_index}.attention.output.dense.weight"
UP = "encoder.layer.${layer_index}.intermediate.dense."
DOWN = "encoder.layer.${layer_index}.output.dense.weight"


def paper_neurons(a: State, b: State) -> State:
    x, y, n = a[UP + "weight"], b[UP + "weight"], len(a[UP + "weight"])
    cost = x @ y.T
    cost = cost + a[UP + "bias"][:, None] @ b[UP + "bias"][None, :]
    cost = cost + a[DOWN].T @ b[DOWN]
    rows, columns = linear_sum_assignment(cost.numpy(), maximize=True)
    p = torch.zeros(n, n)
    p[torch.as_tensor(rows), torch.as_tensor(columns)] = 1
    return {UP + "weight": p @ y, UP + "bias": p @ b[UP + "bias"], DOWN: b[DOWN] @ p.T}


def paper_attention(a: State, b: State, heads: int) -> State:
    size = len(a[SELF + "query.weight"]) // heads
    moved = {name: x.clone() for name, x in b.items() if name.startswith(SELF) or name == OUT}

    def columns(state: State, name: str, rows: slice) -> torch.Tensor:
        return torch.cat([state[f"{name}.weight"][rows], state[f"{name}.bias"][rows, None]], 1)

    for head in range(heads):
        rows = slice(head * size, (head + 1) * size)
        gram = sum(
            columns(a, SELF + k, rows) @ columns(b, SELF + k, rows).T for k in ("query", "key")
        )
        u, _, vh = torch.linalg.svd(gram)
        for k in ("query", "key"):
            moved[SELF + k + ".weight"][rows] = u @ vh @ b[SELF + k + ".weight"][rows]
            moved[SELF + k + ".bias"][rows] = u @ vh @ b[SELF + k + ".bias"][rows]
        gram = columns(a, SELF + "value", rows) @ columns(b, SELF + "value", rows).T
        gram = gram + a[OUT][:, rows].T @ b[OUT][:, rows]
        u, _, vh = torch.linalg.svd(gram)
        moved[SELF + "value.weight"][rows] = u @ vh @ b[SELF + "value.weight"][rows]
        moved[SELF + "value.bias"][rows] = u @ vh @ b[SELF + "value.bias"][rows]
        moved[OUT][:, rows] = b[OUT][:, rows] @ (u @ vh).T
    return moved


def drawn(config: PretrainedConfig, architecture: str, dtype: torch.dtype) -> dict[str, Layer]:
    """Draw a layer of a model, and others to match with it, by name."""
    family = find_family(config, architecture)
    assert family is not None
    blocks = list(family.layer(config).blocks)
    generator = torch.Generator().manual_seed(0)

    def layer() -> State:
        return {
            name: 0.02 * torch.randn(pattern.shape(block.layout.sizes), generator=generator)
            for block in blocks
            for name, pattern in block.layout.patterns.items()
        }

    a, other = layer(), layer()
    near = {
        name: x * (1 + 0.02 * torch.randn(x.shape, generator=generator)) for name, x in a.items()
    }
    order = torch.randperm(config.intermediate_size, generator=generator)
    for block in blocks:
        for name, pattern in block.layout.patterns.items():
            near[name] = act((Permute("f", order),), near[name], pattern, block.layout.sizes)
    a, near, other = ({n: x.to(dtype) for n, x in side.items()} for side in (a, near, other))
    return {"near": (blocks, a, near), "independent": (blocks, a, other)}


def ours(block, a: State, b: State) -> State:
    solve = solve_attention if isinstance(block.layout, AttentionLayout) else solve_neurons
    found = solve(a, b, block.layout)
    patterns = block.layout.patterns
    return {n: act(found, b[n], p, block.layout.sizes) for n, p in patterns.items()}


def measure(repeats: int) -> dict[str, dict[str, float]]:
    """Return seconds by pair and part: the smallest of several, run in turn."""
    config = BertConfig()
    heads = config.num_attention_heads
    result = {}
    for name, (blocks, a, b) in drawn(config, "BertModel", torch.float32).items():
        best: dict[str, float] = {}
        distance = {}
        for _ in range(repeats):
            for who in ("ours", "paper"):
                for block in blocks:
                    is_heads = isinstance(block.layout, AttentionLayout)
                    part = f"{who} {'attention' if is_heads else 'neurons'}"
                    start = time.perf_counter()
                    with torch.no_grad(), full_precision():
                        if who == "ours":
                            moved = ours(block, a, b)
                        else:
                            moved = (
                                paper_attention(a, b, heads) if is_heads else paper_neurons(a, b)
                            )
                    spent = time.perf_counter() - start
                    best[part] = min(best.get(part, spent), spent)
                    distance[part] = sum(float((a[n] - moved[n]).square().sum()) for n in moved)
        for who in ("ours", "paper"):
            best[who] = best[f"{who} neurons"] + best[f"{who} attention"]
            parts = (distance[f"{who} neurons"], distance[f"{who} attention"])
            best[f"{who} distance"] = sum(parts) ** 0.5
        result[name] = best
    return result
