"""What alignment costs on an accelerator, and whether it finds there what it finds on the CPU.

`python benchmarks/cost --device cuda` calls `measure`: one layer of BERT-base and of Llama-8B is
matched on the device, and merges are run with mergekit's own options for it, plain ones, aligned
ones and aligned ones on the CPU. Nothing is fetched, and no step begins that the time is too short
for; what was left out or failed is told. With --small it is a rehearsal of a few seconds for any
device, of which only the agreement means anything.
"""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from devices import forget_peak, options, peak, wait_for
from matcher import Layer, drawn, ours
from models import SHAPES, build
from real import apart
from safetensors import safe_open
from transformers import BertConfig

from mergekit_rotation.symmetry import AttentionLayout, full_precision

#: seconds that all steps may take, and those that a step needs at least
TIME, STEP = 560.0, 30.0

#: shape, layers (None: all), companions
PAIRS = (
    ("SmolLM2-135M", None, ("near", "twin", "other")),
    ("Llama-8B layers", 2, ("near", "twin", "other")),
    ("Gemma 3 270M", None, ("near", "twin")),
)
SMALL = (("small", None, ("near", "twin", "other")),)

#: takes minutes on a CPU
SLOW = {("Llama-8B layers", "other"), "Llama-8B layer, independent"}

#: mergekit's options beside that of the device, tried on one pair of each shape
VARIANTS = (("--low-cpu-memory",), ("--low-cpu-memory", "--read-to-gpu"))

Merge = Callable[..., dict]


def measure(device: str, small: bool, merge: Merge, seconds: float = TIME) -> dict[str, dict]:
    """Return all figures; ``merge`` runs mergekit and raises RuntimeError if that fails."""
    end = time.perf_counter() + seconds
    result: dict[str, dict] = {"layers": {}, "merges": {}, "left out": {}}

    def step(section: str, name: str, run: Callable[[], dict]) -> None:
        if time.perf_counter() + (0 if small else STEP) > end:
            result["left out"][name] = "no time left"
            return
        try:
            result[section][name] = run()
        except Exception as problem:  # the other figures are worth having
            result["left out"][name] = f"failed: {type(problem).__name__}: {problem}"
        print(f"{name}: {result[section].get(name, result['left out'].get(name))}", flush=True)

    for name in layers_of(small):  # apart: this process must stay small, see there
        step("layers", name, lambda n=name: apart(matched, n, small, device))
    for shape, count, kinds in SMALL if small else PAIRS:
        with tempfile.TemporaryDirectory() as tmp:
            folder = Path(tmp)
            merges = Merges(shape, folder, device, merge, lambda: end - time.perf_counter())
            step("merges", f"{shape}, plain", lambda m=merges, c=count, k=kinds: m.plain(c, k))
            for kind in kinds:
                step("merges", f"{shape}, {kind}", lambda m=merges, k=kind: m.aligned(k))
    return result


# -- one layer ----------------------------------------------------------------------------------


def layers_of(small: bool) -> dict[str, Callable[[], Layer]]:
    """Return functions that draw two layers to match, by name."""
    bert = (BertConfig(), "BertModel", torch.float32)
    llama, little = (
        (SHAPES[shape], "LlamaForCausalLM", torch.bfloat16)
        for shape in ("Llama-8B layers", "small")
    )
    models = {"small": little} if small else {"BERT-base": bert, "Llama-8B": llama}
    return {
        f"{name} layer, {kind}": lambda m=model, k=kind: drawn(*m)[k]
        for name, model in models.items()
        for kind in ("near", "independent")
    }


def matched(name: str, small: bool, device: str, repeats: int = 3) -> dict[str, float]:
    """Match a layer on a device: the fewest seconds by part, peak memory, and what is left."""
    layer = layers_of(small)[name]()
    found = _matched(layer, device, repeats)
    if name not in SLOW:
        there = _matched(layer, "cpu", 1)
        found |= {f"{key} on the CPU": value for key, value in there.items() if key != "memory"}
    return found


def _matched(layer: Layer, device: str, repeats: int) -> dict[str, float]:
    blocks, a, b = layer
    sides = [{name: x.to(device) for name, x in side.items()} for side in (a, b)]
    forget_peak(device)
    best: dict[str, float] = {}
    square = 0.0
    for _ in range(repeats):
        square = 0.0
        for block in blocks:
            part = "heads" if isinstance(block.layout, AttentionLayout) else "neurons"
            wait_for(device)
            start = time.perf_counter()
            with torch.no_grad(), full_precision():
                moved = ours(block, *sides)
            wait_for(device)
            spent = time.perf_counter() - start
            best[part] = min(best.get(part, spent), spent)
            for name, x in moved.items():
                square += float((sides[0][name].double() - x.double()).square().sum())
    return {**best, "memory": peak(device), "distance": square**0.5}


# -- merges ---------------------------------------------------------------------------------------


class Merges:
    """Merges of one shape in a folder."""

    def __init__(
        self, shape: str, folder: Path, device: str, merge: Merge, left: Callable[[], float]
    ):
        self.shape, self.folder, self.left = shape, folder, left
        self.options, self.merge = options(device), merge

    def _run(self, method: str, kind: str, out: str, *more: str) -> dict:
        models = [self.folder / "model", self.folder / kind]
        return self.merge(method, models, self.folder / out, *more, limit=max(1.0, self.left()))

    def plain(self, layers: int | None, kinds: tuple[str, ...]) -> dict:
        """Write the models, and merge two of them as they are."""
        apart(build, self.folder, self.shape, list(kinds), layers)
        return {"linear": self._run("linear", kinds[0], "plain", *self.options)}

    def aligned(self, kind: str) -> dict:
        """Merge two models on the device and on the CPU, and compare."""
        result = {"rotation_linear": self._run("rotation_linear", kind, "out", *self.options)}
        if (self.shape, kind) not in SLOW:
            result["rotation_linear on the CPU"] = self._run("rotation_linear", kind, "cpu")
            result["agreement"] = apart(agreement, self.folder / "out", self.folder / "cpu")
        if kind == "near" and self.options:
            for more in VARIANTS:
                name = " ".join(("rotation_linear", *more))
                result[name] = self._run(
                    "rotation_linear", kind, "other-options", *self.options, *more
                )
        return result


def agreement(found: Path, expected: Path) -> dict[str, float]:
    """Compare two merged models.

    Returns
    -------
    dict
        ``difference``: the largest relative difference of a tensor, as a share of what storing in
        its precision explains. The moved tensor and the average are rounded by half of eps at
        most, on both sides, and the moved one counts half: 3/2 eps. ``equal``: the share of the
        tensors in which every bit is the same. ``distance``: by how much the distances that the
        merges report differ, relatively.
    """
    largest, equal, count = 0.0, 0, 0
    for file in sorted(found.glob("*.safetensors")):
        with safe_open(file, "pt") as one, safe_open(expected / file.name, "pt") as two:
            for name in one.keys():
                x, y = one.get_tensor(name), two.get_tensor(name)
                eps = torch.finfo(y.dtype).eps
                apart_by = float((x.float() - y.float()).norm()) / max(float(y.float().norm()), eps)
                largest = max(largest, apart_by / (1.5 * eps))
                equal, count = equal + torch.equal(x, y), count + 1
    if not count:
        raise RuntimeError(f"{found} holds no tensors")
    left = [
        json.loads((out / "alignment.json").read_text(encoding="utf-8"))["distance_after"]
        for out in (found, expected)
    ]
    change = abs(left[0] - left[1]) / max(abs(left[1]), torch.finfo(torch.float32).eps)
    return {"difference": largest, "equal": equal / count, "distance": change}
