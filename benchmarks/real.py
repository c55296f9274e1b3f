"""Cost and fidelity of `rotation_linear` on a real checkpoint, beside plain `linear`.

    python benchmarks/real.py MODEL [--runs 3]

MODEL is a folder with a causal language model of a supported family. Two companions are made in
a temporary folder: ``near``, the model with 2 % of noise (same lineage), ``twin``, the model
in other coordinates (heads, rotations, neurons; random elements of the declared symmetries), and,
where the family allows it, ``stream``, the twin with its residual stream rotated as well.
Prints whole-process wall time and peak memory of both methods, run in turn, their ratios, and the
mean KL divergence of the merged twin from the model on a few sentences.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from mergekit_rotation.architecture import Family, find_family
from mergekit_rotation.symmetry import (
    AttentionLayout,
    Orthogonal,
    OrthogonalFixingOnes,
    OrthogonalMap,
    Permute,
    Rotate,
    Sign,
    Transformation,
    act,
    into_stream,
    out_of_stream,
    target_norm,
)

T = TypeVar("T")

SENTENCES = [
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "Water boils at one hundred degrees Celsius at sea level.",
    "def add(a, b):\n    return a + b\n",
    "Once upon a time there was a small village at the edge of a forest.",
]


def companions(model: Path, folder: Path) -> dict[str, Path]:
    """Write the near copy and the twin of a single-file checkpoint."""
    state = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    near = {
        name: (t.float() * (1 + 0.02 * torch.randn(t.shape, generator=generator))).to(t.dtype)
        for name, t in state.items()
    }
    twin = other_coordinates(model, state, generator)
    folders = {
        "near": write(model, folder / "near", near),
        "twin": write(model, folder / "twin", twin),
    }
    if "orthogonal" in family_of(model)[1].stream.maps:
        folders["stream"] = write(model, folder / "stream", rotated(model, twin, generator))
        file = folders["stream"] / "config.json"
        config = {**json.loads(file.read_text()), "tie_word_embeddings": False}
        file.write_text(json.dumps(config))
    return folders


def write(model: Path, folder: Path, state: dict[str, torch.Tensor]) -> Path:
    shutil.copytree(model, folder)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def family_of(model: Path) -> tuple[PretrainedConfig, Family]:
    config = AutoConfig.from_pretrained(model)
    family = find_family(config, config.architectures[0])
    assert family is not None, "not a supported family"
    return config, family


def rotated(
    model: Path, state: dict[str, torch.Tensor], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Rotate the residual stream in float64; norms become constants, a tied head its own."""
    config, family = family_of(model)
    stream, size = family.stream_of(config.architectures[0]), family.layer(config).sizes["e"]
    group = (OrthogonalFixingOnes if stream.layout.layer_norm else Orthogonal)(size)
    turn = OrthogonalMap(group.sample(1, generator)[0])
    result = dict(state)
    for head, embedding in stream.tied.items():
        result.setdefault(head, state[embedding])
    for index in (None, *range(config.num_hidden_layers)):
        names = {
            template: name
            for template in stream.known
            if ("$" in template) == (index is not None)
            and (name := template.replace("${layer_index}", str(index))) in result
        }
        tensors = {template: result[name].double() for template, name in names.items()}
        layout = replace(stream.layout, carried=frozenset(stream.layout.readers))
        targets = {
            norm: target_norm(layout.norm(norm, tensors), None, turn)
            for norm in layout.readers
            if norm in tensors
        }
        inside = into_stream(tensors, tensors, layout, turn)
        moved = out_of_stream(inside, tensors, tensors, layout, turn, targets)
        for template, name in names.items():
            result[name] = moved[template].to(state.get(name, result[name]).dtype).contiguous()
    return result


def other_coordinates(
    model: Path, state: dict[str, torch.Tensor], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Apply random elements of every symmetry of the family, in float64."""
    config, family = family_of(model)
    layer, result = family.layer(config), dict(state)
    for index in range(config.num_hidden_layers):
        for block in family.layer(config, index).blocks:
            transformation = draw(block.layout, generator)
            for template, pattern in block.layout.patterns.items():
                name = template.replace("${layer_index}", str(index))
                if name in state:
                    moved = act(transformation, state[name].double(), pattern, layer.sizes)
                    result[name] = moved.to(state[name].dtype).contiguous()
    return result


def draw(layout: object, generator: torch.Generator) -> Transformation:
    sizes = layout.sizes  # type: ignore[attr-defined]
    if isinstance(layout, AttentionLayout):
        kv, g = sizes["kv"], sizes.get("g", 1)
        order = torch.stack([torch.randperm(g, generator=generator) for _ in range(kv)])
        heads: Transformation = (Permute("kv", torch.randperm(kv, generator=generator)),)
        if "g" in sizes:
            heads += (Permute("g", order, per="kv"),)
        return (
            *heads,
            Rotate("qk", layout.query_key.sample(kv, generator), per="kv"),
            Rotate("vo", layout.value_output.sample(kv, generator), per="kv"),
        )
    sign = 2.0 * torch.randint(2, (sizes["f"],), generator=generator) - 1.0
    return (Permute("f", torch.randperm(sizes["f"], generator=generator)), Sign("f", sign))


#: what is timed: merge method and top-level parameters
VARIANTS: dict[str, tuple[str, dict[str, str]]] = {
    "linear": ("linear", {}),
    "rotation_linear": ("rotation_linear", {}),
    "align_residual": ("rotation_linear", {"align_residual": "orthogonal"}),
}


def run(
    variant: str, models: list[Path], out: Path, *options: str, **environment: str
) -> tuple[float, float]:
    """Merge in a process of its own; wall seconds and peak memory in MiB."""
    shutil.rmtree(out, ignore_errors=True)
    method, parameters = VARIANTS[variant]
    entries = [{"model": str(m), "parameters": {"weight": 0.5}} for m in models]
    file = out.with_suffix(".yml")
    config = {"merge_method": method, "models": entries, "dtype": "bfloat16"}
    file.write_text(
        yaml.safe_dump({**config, **({"parameters": parameters} if parameters else {})})
    )
    command = [str(Path(sys.executable).parent / "mergekit-yaml"), str(file), str(out)]
    start = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--no-write-model-card", "--quiet", *options],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, f"{variant} failed"
    return time.perf_counter() - start, usage.ru_maxrss / 1024


def divergence(model: Path, other: Path) -> float:
    """Mean over tokens of KL(model || other), in nats, evaluated in float32."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    a, b = (
        AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32).eval() for p in (model, other)
    )
    total, count = 0.0, 0
    with torch.no_grad():
        for sentence in SENTENCES:
            ids = tokenizer(sentence, return_tensors="pt").input_ids
            p, q = (m(ids).logits[0].log_softmax(-1) for m in (a, b))
            total += float((p.exp() * (p - q)).sum())
            count += ids.shape[1]
    return total / count


def apart(function: Callable[..., T], *arguments: object) -> T:
    """Call a function in a fresh process.

    Children inherit the peak memory of their parent: this one must stay small.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        others = apart(companions, arguments.model, folder)
        print(f"{arguments.model.name}, {torch.get_num_threads()} threads, {arguments.runs} runs")
        print(f"{'pair':6}{'method':18}{'wall s':>8}{'MiB':>8}{'ratio':>8}{'memory':>8}{'KL':>11}")
        for name, other in others.items():
            models = [arguments.model, other]
            variants = list(VARIANTS)[: 3 if "stream" in others else 2]
            figures: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
            for _ in range(arguments.runs):
                for method, results in figures.items():
                    results.append(run(method, models, folder / method))
            median = {
                method: [statistics.median(column) for column in zip(*results, strict=True)]
                for method, results in figures.items()
            }
            for method, (wall, memory) in median.items():
                ratio, share = wall / median["linear"][0], memory / median["linear"][1]
                kl = apart(divergence, arguments.model, folder / method)
                print(
                    f"{name:6}{method:18}{wall:8.1f}{memory:8.0f}{ratio:8.2f}{share:8.2f}{kl:11.2e}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
