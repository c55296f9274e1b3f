"""What rescaling adds to rotation and permutation, on models trained from different seeds.

    python benchmarks/scaling

Trains what is not cached (about 40 minutes on one core), then compares, for every pair of seeds of
a kind: no alignment, heads and neurons aligned, the same followed by the best common factor of
every head (as in arXiv 2502.00264), rotation and factor optimised together, and `align_scale`,
which does so only where the gain is more than chance.
Distances are Euclidean, over all weights; losses are those of the average, on held-out data.
Writes results.md beside this file.
"""

import statistics
from collections.abc import Callable, Mapping
from itertools import combinations
from pathlib import Path

import torch
import train
from safetensors.torch import load_file
from transformers import PreTrainedModel

from mergekit_rotation.architecture import Block, find_family
from mergekit_rotation.proof import elements
from mergekit_rotation.symmetry import (
    AttentionLayout,
    Linear,
    Transformation,
    act,
    best_scale,
    solve_attention,
    solve_neurons,
    solve_scaled_attention,
)

State = dict[str, torch.Tensor]
Tensors = Mapping[str, torch.Tensor]
Solver = Callable[[Block, Tensors, Tensors], Transformation]

PAIRS = tuple(combinations(train.SEEDS, 2))
BATCHES = 16


def matched(block: Block, reference: Tensors, other: Tensors) -> Transformation:
    """Heads and neurons as without `align_scale`."""
    if isinstance(block.layout, AttentionLayout):
        return solve_attention(reference, other, block.layout)
    return solve_neurons(reference, other, block.layout)


def sequential(block: Block, reference: Tensors, other: Tensors) -> Transformation:
    """The rotation first, then the best factor of every head."""
    first = matched(block, reference, other)
    if not isinstance(block.layout, AttentionLayout):
        return first
    sizes, patterns = block.layout.sizes, block.layout.patterns
    moved = {name: act(first, x, patterns[name], sizes) for name, x in other.items()}
    factors = []
    for axis in ("qk", "vo"):
        sums = torch.zeros(2, 2, sizes["kv"], dtype=torch.float64)  # exponent; |x'|^2, <x, x'>
        for name, pattern in patterns.items():
            for ours, theirs in zip(
                pattern.split(reference[name], sizes),
                pattern.split(moved[name], sizes),
                strict=True,
            ):
                power, dim = theirs.powers.get(axis), theirs.dim("kv")
                if power is not None and dim is not None:
                    x, y = (z.tensor.double().movedim(dim, 0).flatten(1) for z in (ours, theirs))
                    sums[0 if power > 0 else 1] += torch.stack([(y * y).sum(1), (x * y).sum(1)])
        (p, u), (q, v) = sums
        scale = best_scale(p, u, q, v)[:, None, None] * torch.eye(sizes[axis]).double()
        factors.append(Linear(axis, scale, torch.linalg.inv(scale), "kv"))
    return (*first, *factors)


def together(
    block: Block, reference: Tensors, other: Tensors, closest: bool = True
) -> Transformation:
    """Rotation and factors optimised together; GELU has no factors."""
    if not isinstance(block.layout, AttentionLayout):
        return matched(block, reference, other)
    layout = block.layout
    return solve_scaled_attention(
        reference,
        other,
        layout,
        lambda a, b: solve_attention(a, b, layout),
        torch.float32,
        closest=closest,
    )


def as_merged(block: Block, reference: Tensors, other: Tensors) -> Transformation:
    """What `align_scale` does: a factor is taken only where chance does not explain its gain."""
    return together(block, reference, other, closest=False)


VARIANTS: dict[str, Solver | None] = {
    "unaligned": None,
    "rotation and permutation": matched,
    "then scaled": sequential,
    "scaled together": together,
    "with align_scale": as_merged,
}


def aligned(kind: str, reference: State, other: State, solve: Solver | None) -> State:
    """Move one model to another, block by block."""
    config = train.KINDS[kind].make().config
    model_class = type(train.KINDS[kind].make()).__name__
    family = find_family(config, model_class)
    assert family is not None
    result = dict(other)
    for index in range(elements.layer_count(config)) if solve is not None else ():
        for block in elements.present(family, config, index, reference):
            names = elements.legs(family, block, index, reference)
            sides = [
                {t: side[name] for t, (name, _) in names.items()} for side in (reference, other)
            ]
            transformation = solve(block, *sides)
            for name, pattern in names.values():
                result[name] = act(transformation, other[name], pattern, block.layout.sizes)
    return result


@torch.no_grad()
def loss(kind: str, model: PreTrainedModel) -> float:
    """Mean loss on held-out data."""
    generator = torch.Generator().manual_seed(7)
    batches = [train.KINDS[kind].data(generator, True) for _ in range(BATCHES)]
    return statistics.mean(float(model(**batch).loss) for batch in batches)


def measure(kind: str, pair: tuple[int, int], solve: Solver | None) -> tuple[float, float]:
    """Distance after alignment, and loss of the average."""
    states = [load_file(train.member(kind, seed) / "model.safetensors") for seed in pair]
    moved = aligned(kind, states[0], states[1], solve)
    distance = sum(float((x - moved[n]).double().square().sum()) for n, x in states[0].items())
    folder = train.CACHE / "average"
    model = train.KINDS[kind].make()
    model.save_pretrained(
        folder, state_dict={n: (x + moved[n].to(x.dtype)) / 2 for n, x in states[0].items()}
    )
    average = type(model).from_pretrained(folder).eval()
    return distance**0.5, loss(kind, average)


def main() -> None:
    train.train_all()
    torch.set_num_threads(1)
    lines = []
    for kind, entry in train.KINDS.items():
        ends = []
        for seed in train.SEEDS:
            ends.append(
                loss(kind, type(entry.make()).from_pretrained(train.member(kind, seed)).eval())
            )
        lines += [
            f"## {entry.title}",
            "",
            f"Loss of the {len(ends)} models: "
            f"{statistics.mean(ends):.3f} ± {statistics.stdev(ends):.3f}. "
            f"Mean and standard deviation over {len(PAIRS)} pairs:",
            "",
            "| | distance | loss of the average |",
            "|---|---|---|",
        ]
        for name, solve in VARIANTS.items():
            found = [measure(kind, pair, solve) for pair in PAIRS]
            cells = (
                f"{statistics.mean(x):.4f} ± {statistics.stdev(x):.4f}"
                for x in zip(*found, strict=True)
            )
            lines.append(f"| {name} | {' | '.join(cells)} |")
            print(kind, lines[-1], flush=True)
        lines.append("")
    text = f"# What rescaling adds\n\nMade by `python benchmarks/scaling`.\n\n{chr(10).join(lines)}"
    Path(__file__).with_name("results.md").write_text(text)


if __name__ == "__main__":
    main()
