"""Peak memory of a merge of three models, over the number of layers.

    python benchmarks/memory.py [--runs 5]

Random Llamas of one shape and 6, 12 and 24 layers, in shards of a layer each: the model, two copies
with 2 % of noise (same lineage), and two in other coordinates. Each merge is a process of its own;
its shards are written at 100 MB. All methods run in turn, with the C library's allocator as it is
and as `STEADY` sets it. Prints the largest resident set in MiB, and writes median, smallest and
largest to memory.md beside this file, with the ratio of the medians to that of plain `linear`,
which has to be 1.2 at most and independent of the depth.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from real import apart, other_coordinates, run
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

DEPTHS = (6, 12, 24)
ROWS = (
    ("linear", "near"),
    ("rotation_linear", "near"),
    ("rotation_linear", "twin"),
)
#: blocks from 1 MiB on go back to the system once they are freed; glibc raises that limit by itself
STEADY = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}
ALLOCATORS = {"as it is": {}, "steady": STEADY}


def build(folder: Path, depth: int) -> None:
    """Write the model, and two companions of each kind."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=depth,
        num_attention_heads=12,
        num_key_value_heads=4,
    )
    state = {name: x.detach() for name, x in LlamaForCausalLM(config).state_dict().items()}
    save(folder / "model", config, state)
    for k in (1, 2):
        generator = torch.Generator().manual_seed(k)
        near = {
            name: x * (1 + 0.02 * torch.randn(x.shape, generator=generator))
            for name, x in state.items()
        }
        save(folder / f"near-{k}", config, near)
        save(folder / f"twin-{k}", config, other_coordinates(folder / "model", near, generator))


def save(folder: Path, config: LlamaConfig, state: dict[str, torch.Tensor]) -> None:
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, x in state.items():
        shards.setdefault(name.rpartition(".layers.")[2].split(".")[0], {})[name] = x.contiguous()
    places = {}
    for number, part in enumerate(shards.values(), 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def imports() -> float:
    """Peak memory in MiB of mergekit's imports alone."""
    code = "import mergekit.scripts.run_yaml"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    return os.wait4(process.pid, 0)[2].ru_maxrss / 1024


_EXPLANATION = (
    "As it is, glibc keeps freed blocks of up to the size of the largest that was freed before,",
    "32 MiB at most, and what it keeps falls into pieces: figures differ between runs of one",
    "merge, and between depths without order, those of plain `linear` too. `steady` keeps",
    f"blocks below 1 MiB alone ({' '.join(f'{name}={value}' for name, value in STEADY.items())}).",
    "",
    "No tensor of a layer outlives it (a test counts them). Of what still grows under `steady`,",
    "the planned tasks are about 0.1 MiB a layer by tracemalloc; the rest was not traced.",
)


def measure(runs: int) -> dict[tuple[str, str, str, int], list[float]]:
    """Peak memory in MiB by allocator, method, kind of models and depth."""
    found: dict[tuple[str, str, str, int], list[float]] = {}
    for depth in DEPTHS:
        with tempfile.TemporaryDirectory() as tmp:
            folder = Path(tmp)
            apart(build, folder, depth)
            for _ in range(runs):
                for name, variables in ALLOCATORS.items():
                    for method, kind in ROWS:
                        models = [folder / "model", *(folder / f"{kind}-{k}" for k in (1, 2))]
                        options = ("--out-shard-size", "100M")
                        _, memory = run(method, models, folder / "out", *options, **variables)
                        found.setdefault((name, method, kind, depth), []).append(memory)
                        print(f"{depth:3} {name:9} {method:16} {kind} {memory:.0f}", flush=True)
    return found


def table(found: dict[tuple[str, str, str, int], list[float]]) -> list[str]:
    """Return the lines of the table, one row for each allocator, method and kind of models."""
    lines = [
        "| allocator | method | models | " + " | ".join(f"{d} layers" for d in DEPTHS) + " |",
        "|---|---|---|" + "---|" * len(DEPTHS),
    ]
    for name in ALLOCATORS:
        for method, kind in ROWS:
            cells = []
            for depth in DEPTHS:
                values = found[name, method, kind, depth]
                plain = statistics.median(found[(name, *ROWS[0], depth)])
                median = statistics.median(values)
                spread = f"{min(values):.0f} to {max(values):.0f}"
                cells.append(f"{median:.0f}, {spread} ({median / plain:.2f})")
            lines.append(f"| {name} | `{method}` | {kind} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    lines = [
        "# Peak memory of a merge of three models",
        "",
        f"Made by `python benchmarks/memory.py --runs {runs}`: Llamas of width 768 with 3072",
        f"neurons, 33 MiB a layer and model in float32. MiB: median of {runs} runs, smallest to",
        f"largest; the imports alone take {imports():.0f}. In brackets the ratio of the medians to",
        "plain `linear`.",
        "",
        *table(measure(runs)),
        "",
        *_EXPLANATION,
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
