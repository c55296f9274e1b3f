"""Peak memory of a merge of three models, over the number of layers.

    python benchmarks/memory.py

Random Llamas of one shape and 6, 12 and 24 layers, in shards of a layer each: the model, two copies
with 2 % of noise (same lineage), and two in other coordinates. Each merge is a process of its own;
its shards are written at 100 MB. Prints the largest resident set in MiB and its ratio to that of
plain `linear`, which has to be 1.2 at most and independent of the depth, and writes it to
memory.md beside this file.
"""

import json
import os
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


def main() -> None:
    lines = [
        "# Peak memory of a merge of three models",
        "",
        "Made by `python benchmarks/memory.py`: Llamas of width 768 with 3072 neurons, 33 MiB a",
        f"layer and model in float32. MiB; the imports alone take {imports():.0f}. In brackets the",
        "ratio to plain `linear`.",
        "",
        "| method | models | " + " | ".join(f"{depth} layers" for depth in DEPTHS) + " |",
        "|---|---|" + "---|" * len(DEPTHS),
    ]
    cells: dict[tuple[str, str], list[str]] = {row: [] for row in ROWS}
    for depth in DEPTHS:
        with tempfile.TemporaryDirectory() as tmp:
            folder = Path(tmp)
            apart(build, folder, depth)
            plain = 0.0
            for method, kind in ROWS:
                models = [folder / "model", *(folder / f"{kind}-{k}" for k in (1, 2))]
                _, memory = run(method, models, folder / "out", "--out-shard-size", "100M")
                plain = plain or memory
                cells[method, kind].append(f"{memory:.0f} ({memory / plain:.2f})")
                print(depth, method, kind, cells[method, kind][-1], flush=True)
    lines += [f"| `{m}` | {kind} | " + " | ".join(cells[m, kind]) + " |" for m, kind in ROWS]
    text = "\n".join(lines) + "\n"
    print(text)
    Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
