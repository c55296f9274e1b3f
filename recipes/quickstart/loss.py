"""Held-out loss of byte-level checkpoints, in nats per byte.

    python recipes/quickstart/loss.py FOLDER [FOLDER ...]

One row per checkpoint folder, one column per text: Python source code (what the base model was
trained on) and Python documentation (what the fine-tune was trained on). Smaller is better;
ln 256 = 5.55 is what a model scores that knows nothing.
"""

import argparse
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

HERE = Path(__file__).resolve().parent
TEXTS = {"code": HERE / "heldout-code.txt", "docs": HERE / "heldout-docs.txt"}
WINDOW = 128


def windows(text: bytes) -> torch.Tensor:
    """The text as byte ids, cut into rows of WINDOW bytes (an incomplete last row is dropped)."""
    rows = len(text) // WINDOW
    data = torch.frombuffer(bytearray(text[: rows * WINDOW]), dtype=torch.uint8)
    return data.long().view(rows, WINDOW)


@torch.inference_mode()
def losses(model: PreTrainedModel) -> dict[str, float]:
    """Mean loss per byte on each held-out text, every window read on its own."""
    result = {}
    for name, path in TEXTS.items():
        ids = windows(path.read_bytes())
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
        result[name] = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()
    return result


def print_table(rows: dict[str, dict[str, float]]) -> None:
    """One aligned line per name."""
    width = max(map(len, rows))
    print(" " * width, *(f"{name:>8}" for name in TEXTS))
    for name, row in rows.items():
        print(f"{name:<{width}}", *(f"{row[text]:8.3f}" for text in TEXTS))


def main() -> None:
    """Print the losses of the folders named on the command line."""
    parser = argparse.ArgumentParser(description="held-out loss in nats per byte")
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="folder of a checkpoint")
    folders: list[str] = parser.parse_args().folders
    for folder in folders:
        if not (Path(folder) / "config.json").is_file():
            parser.error(f"{folder} holds no checkpoint (no config.json)")

    logging.disable_progress_bar()
    rows = {}
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        rows[folder] = losses(model.eval())
    print_table(rows)


if __name__ == "__main__":
    main()
