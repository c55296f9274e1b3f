"""Peak memory of merges as `mergekit-rotation plan` predicts it, beside what they take.

    python benchmarks/plan.py [MODEL]

On random Llamas of width 768 (see memory.py), and on companions of MODEL, a folder with a causal
language model in one file, if it is given (see real.py). Each merge is a process of its own, and
so is each plan. Prints MiB and seconds, and writes them to plan.md beside this file. The prediction
has to lie within 25 %.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from memory import build
from real import apart, companions, run

DEPTH = 12
#: name, variant of real.py, companions of the model, options
CASES = (
    ("fine-tune", "rotation_linear", ("near-1",), ()),
    ("twin", "rotation_linear", ("twin-1",), ()),
    ("three models", "rotation_linear", ("near-1", "twin-2"), ()),
    ("three models, shards of 100 MB", "rotation_linear", ("near-1", "twin-2"), ("100M",)),
    ("fine-tune, align_residual: orthogonal", "align_residual", ("near-1",), ()),
    ("twin, align_residual: orthogonal", "align_residual", ("twin-1",), ()),
    ("fine-tune, plain linear", "linear", ("near-1",), ()),
)
REAL = (
    ("fine-tune", "rotation_linear", ("near",), ()),
    ("twin", "rotation_linear", ("twin",), ()),
    ("three models", "rotation_linear", ("near", "twin"), ()),
    ("other stream, align_residual: orthogonal", "align_residual", ("stream",), ()),
)


def predicted(config: Path, *options: str) -> tuple[float, float]:
    """Seconds and MiB that `plan` predicts."""
    with tempfile.TemporaryDirectory() as tmp:
        file = Path(tmp) / "plan.json"
        command = [sys.executable, "-m", "mergekit_rotation", "plan", str(config), "--json", file]
        subprocess.run([*command, *options], check=True, capture_output=True)
        plan = json.loads(file.read_text())
    return plan["seconds"]["least"], plan["memory"]["peak"] / 2**20


def row(name: str, variant: str, models: list[Path], out: Path, options: tuple[str, ...]) -> str:
    """One row of the table."""
    options = tuple(word for size in options for word in ("--out-shard-size", size))
    seconds, measured = run(variant, models, out, *options)
    guess, memory = predicted(out.with_suffix(".yml"), *options)
    ratio = memory / measured
    print(
        f"{name:45}{measured:8.0f}{memory:8.0f}{ratio:7.2f}{seconds:8.1f}{guess:8.1f}", flush=True
    )
    assert abs(ratio - 1) <= 0.25, name
    return f"| {name} | {measured:.0f} | {memory:.0f} | {ratio:.2f} | {seconds:.0f} | {guess:.0f} |"


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    lines = []
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        apart(build, folder, DEPTH)
        for name, variant, others, options in CASES:
            models = [folder / "model", *(folder / other for other in others)]
            lines.append(row(f"Llama, {name}", variant, models, folder / "out", options))
    if len(sys.argv) > 1:
        with tempfile.TemporaryDirectory() as tmp:
            folder, model = Path(tmp), Path(sys.argv[1])
            made = apart(companions, model, folder)
            for name, variant, others, options in REAL:
                models = [model, *(made[other] for other in others if other in made)]
                if len(models) > len(others):
                    out = folder / "out"
                    lines.append(row(f"{model.name}, {name}", variant, models, out, options))
    head = [
        "# What `plan` predicts, and what merges take",
        "",
        "Made by `python benchmarks/plan.py MODEL`. Peak memory of the process in MiB; seconds on",
        "the machine that it ran on, which other work shared.",
        "",
        "| merge | peak | predicted | ratio | seconds | predicted |",
        "|---|---|---|---|---|---|",
    ]
    Path(__file__).with_suffix(".md").write_text("\n".join([*head, *lines]) + "\n")


if __name__ == "__main__":
    main()
