"""The models of the benchmark: small, byte-level, trained from scratch on the CPU and cached.

Five seeds of three architectures (initial weights and order of the text both differ), two far
forks of one of the models, and one fine-tune. The text is that of the quickstart.
"""

import sys
import sysconfig
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes" / "quickstart"))

import make

CACHE = Path(__file__).resolve().parent / "cache"
SEEDS = range(5)
STEPS, BATCH = 1800, 8

_COMMON = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None}
_GROUPED = _COMMON | {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_GPT2 = _COMMON | {
    "n_embd": 128,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 128,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
#: name, how to make one, peak learning rate
ARCHITECTURES: dict[str, tuple[Callable[[], PreTrainedModel], float]] = {
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**_GROUPED)), 2e-3),
    "gpt2": (lambda: GPT2LMHeadModel(GPT2Config(**_GPT2)), 2e-3),
    "qwen3": (lambda: Qwen3ForCausalLM(Qwen3Config(**_GROUPED)), 2e-3),
}
TITLES = {
    "llama": "Llama (GQA)",
    "gpt2": "GPT-2 (LayerNorm, tied)",
    "qwen3": "Llama with QK-norm (Qwen3)",
}


def headers_text() -> bytes:
    """Python's C headers, by path; the fine-tune learns them."""
    files = sorted(Path(sysconfig.get_paths()["include"]).rglob("*.h"))
    return b"\n".join(file.read_bytes() for file in files)


def split(text: bytes) -> tuple[bytes, bytes]:
    """Training text, and the last 32 KiB, held out."""
    return text[: -(1 << 15)], text[-(1 << 15) :]


def member(name: str, seed: int) -> Path:
    """Folder of one independently trained model."""
    return CACHE / f"{name}-{seed}"


def _start(path: Path | None, name: str, seed: int) -> PreTrainedModel:
    if path is not None:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path)
        return model
    torch.manual_seed(seed)
    return ARCHITECTURES[name][0]()


def _train(
    target: Path, start: Path | None, name: str, text: str, steps: int, rate: float, seed: int
) -> None:
    if (target / "config.json").exists():
        return
    torch.set_num_threads(1)
    make.BATCH = BATCH
    texts = {"code": make.code_text, "docs": make.docs_text, "headers": headers_text}
    data = texts[text]()
    print(f"training {target.name}", flush=True)
    model = _start(start, name, seed)
    make.train(model, data if text == "code" else split(data)[0], steps, rate, seed + 1000)
    make.byte_tokenizer().save_pretrained(target)
    model.save_pretrained(target)


def train_all(workers: int = 2) -> None:
    """Train what the cache does not hold yet, one process and one thread per model."""
    llama, rate = member("llama", 0), ARCHITECTURES["llama"][1]
    first = [
        (member(name, seed), None, name, "code", STEPS, ARCHITECTURES[name][1], seed)
        for name in ARCHITECTURES
        for seed in SEEDS
    ]
    second = [
        (CACHE / "fork-code", llama, "llama", "code", STEPS, 2 * rate, 101),
        (CACHE / "fork-docs", llama, "llama", "docs", STEPS, 2 * rate, 102),
        (CACHE / "finetune", member("llama", 1), "llama", "headers", 500, rate / 4, 103),
    ]
    for jobs in (first, second):
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            for future in [pool.submit(_train, *job) for job in jobs]:
                future.result()


def export_quickstart() -> None:
    """Write the first two Llamas to the quickstart, in bfloat16."""
    for seed in (0, 1):
        model = AutoModelForCausalLM.from_pretrained(member("llama", seed))
        make.save(model, Path(make.__file__).parent / f"seed-{seed}")


if __name__ == "__main__":
    train_all()
    export_quickstart()
