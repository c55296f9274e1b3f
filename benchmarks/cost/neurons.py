"""Matching the neurons of one gated layer: as it is done, and with all products and a dense solver.

Two layers in bfloat16 are matched: ``near`` has 2 % of noise, ``twin`` the neurons in another
order and with other signs, the same with noise of some standard deviations, ``independent`` is
another layer, of the same checkpoint where there is one. The dense solver is the reference: its
scores are taken apart from the package, and its assignment is optimal. One thread.
"""

import time
from pathlib import Path

import torch
from models import State, noisy, random_part, seeded, stored
from real import draw, family_of
from safetensors import safe_open
from scipy.optimize import linear_sum_assignment
from transformers import LlamaConfig

from mergekit_rotation.architecture import find_family
from mergekit_rotation.symmetry import (
    NeuronLayout,
    Permute,
    Transformation,
    act,
    full_precision,
    solve_neurons,
)
from mergekit_rotation.symmetry.neurons import neuron_rows

#: neurons and width by shape
SHAPES = {
    "SmolLM2-135M": (1536, 576),
    "Qwen2.5-0.5B": (4864, 896),
    "Llama-2-7B": (11008, 4096),
    "Llama-8B layers": (14336, 4096),
}

#: neurons up to which the dense solver takes a second; and some, as independent layers do otherwise
FEW, SOME = 2048, 8192

#: standard deviations of the weights that twins of few neurons differ by
NOISE = (0.05, 0.5, 1.0, 2.0)

Figures = dict[str, float]


def measure(
    large: bool, checkpoints: dict[str, Path], shapes: dict[str, tuple[int, int]] = SHAPES
) -> dict[str, Figures]:
    """Return the figures of each pair; see `compare`.

    Raises
    ------
    ValueError
        If a checkpoint does not have the shape that it is given for.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    result: dict[str, Figures] = {}
    try:
        for shape, (n, width) in shapes.items():
            layers = Layers(shape, n, width, checkpoints.get(shape))
            dense = n <= (SOME if large else FEW)
            for kind in kinds_of(n, large):
                other, order = layers.pair(kind)
                slow = kind == "independent" and n > SOME
                runs = 1 if slow else 5 if large else 3
                found = compare(layers.first, other, layers.layout, order, runs, dense)
                result[f"{shape}, {kind}"] = {"n": n, "width": width, **found}
                print(f"{shape}, {kind}: {found}", flush=True)
    finally:
        torch.set_num_threads(threads)
    return result


def kinds_of(n: int, large: bool) -> list[str]:
    noise = [f"twin, noise {level:g}" for level in NOISE] if n <= FEW else []
    independent = ["independent"] if large or n <= SOME else []
    return ["near", "twin", *noise, *independent]


class Layers:
    """A gated layer of a shape, and what it is matched with.

    Attributes
    ----------
    layout : NeuronLayout
    first : mapping of name to Tensor
        The middle layer of the checkpoint, or random weights.
    """

    layout: NeuronLayout
    first: State

    def __init__(self, shape: str, n: int, width: int, checkpoint: Path | None) -> None:
        self.checkpoint = checkpoint
        if checkpoint is None:
            config = LlamaConfig(hidden_size=width, intermediate_size=n)
            family = find_family(config, "LlamaForCausalLM")
            assert family is not None
        else:
            config, family = family_of(checkpoint)
        self.family, self.depth = family, config.num_hidden_layers
        layers = family.layer(config, self.depth // 2)
        self.layout = next(x.layout for x in layers.blocks if isinstance(x.layout, NeuronLayout))
        sizes = self.layout.sizes
        if (sizes["f"], sizes["e"]) != (n, width):
            raise ValueError(
                f"{checkpoint}: {sizes['f']} neurons at width {sizes['e']}, where {shape} has "
                f"{n} at {width}: give it for another shape"
            )
        self.first = self._random("model") if checkpoint is None else self._read(self.depth // 2)

    def pair(self, kind: str) -> tuple[State, torch.Tensor | None]:
        """Return the other layer, and where it has the neurons of the first (None: nowhere)."""
        if kind == "independent":
            if self.checkpoint is None:
                return self._random("other"), None
            return self._read(self.depth // 4), None
        if kind == "near":
            near = {name: noisy(name, x, kind) for name, x in self.first.items()}
            return near, torch.arange(self.layout.sizes["f"])
        level = float(kind.partition(" noise ")[2] or 0)
        permutation, *signs = draw(self.layout, seeded("neurons", kind))
        assert isinstance(permutation, Permute)
        other = {}
        for name, x in self.first.items():
            if level:
                noise = torch.randn(x.shape, generator=seeded(name, kind))
                x = (x.float() + level * x.float().std() * noise).to(x.dtype)
            other[name] = act(
                (permutation, *signs), x, self.layout.patterns[name], self.layout.sizes
            )
        return other, permutation.inverse().index

    def _random(self, kind: str) -> State:
        shapes = {
            name: pattern.shape(self.layout.sizes)
            for name, pattern in self.layout.patterns.items()
            if not name.endswith(".bias")
        }
        return random_part(shapes, "${layer_index}", kind)

    def _read(self, index: int) -> State:
        assert self.checkpoint is not None
        state: State = {}
        for file in sorted(self.checkpoint.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                names = dict.fromkeys(tensors.keys())
                for template in self.layout.patterns:
                    local = template.replace("${layer_index}", str(index))
                    name = stored(local, self.family.prefixes, names)
                    if name is not None:
                        state[template] = tensors.get_tensor(name).to(torch.bfloat16)
        if not state:
            raise ValueError(f"{self.checkpoint}: no neurons of layer {index} in safetensors files")
        return state


def compare(
    a: State,
    b: State,
    layout: NeuronLayout,
    order: torch.Tensor | None,
    runs: int,
    dense: bool,
) -> Figures:
    """Match two layers, by turns with the dense solver.

    Parameters
    ----------
    order : Tensor of int64, shape (n,), or None
        Where the other has the neurons of the first, if it has them.
    dense : bool
        Whether to solve densely as well.

    Returns
    -------
    dict
        ``ours``, ``dense``: the fewest seconds. ``as drawn``: share of the neurons whose partner
        is that of ``order``. ``same``: share of those whose partner is the dense solver's.
        ``below``: by how much the sum of scores is below the optimum, relatively. ``gap``: most
        that it can be, as certified.
    """
    found: Transformation = ()
    best: Figures = {}
    for _ in range(runs):
        with torch.no_grad(), full_precision():
            start = time.perf_counter()
            found = solve_neurons(a, b, layout)
            now = time.perf_counter()
            best["ours"] = min(best.get("ours", now - start), now - start)
            if dense:
                start = time.perf_counter()
                score = scores(a, b, layout)
                _, columns = linear_sum_assignment(score.numpy(), maximize=True)
                now = time.perf_counter()
                best["dense"] = min(best.get("dense", now - start), now - start)
    rows = torch.arange(layout.sizes["f"])
    permutation = next((one for one in found if isinstance(one, Permute)), Permute("f", rows))
    if order is not None:
        best["as drawn"] = share(permutation.index, order)
    if dense:
        optimal = torch.as_tensor(columns)
        most, value = (float(score[rows, i].double().sum()) for i in (optimal, permutation.index))
        best |= {"same": share(permutation.index, optimal), "below": (most - value) / most}
    return {**best, "gap": permutation.gap or 0.0}


def scores(a: State, b: State, layout: NeuronLayout) -> torch.Tensor:
    """Return the scores that `solve_neurons` maximises, all of them, float32 of shape (n, n)."""
    n = layout.sizes["f"]
    plain, signed = torch.zeros(2, n, n)
    for name, pattern in layout.patterns.items():
        if name in a and name in b:
            x, y = (pattern.split(side[name], layout.sizes) for side in (a, b))
            for one, other in zip(x, y, strict=True):
                total = signed if "~f" in one.axes else plain
                total.addmm_(neuron_rows(one).float(), neuron_rows(other).float().mT)
    return plain.add_(signed.abs_())


def share(index: torch.Tensor, expected: torch.Tensor) -> float:
    return float((index == expected).double().mean())
