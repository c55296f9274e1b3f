"""Make the two checkpoints of the quickstart (offline, seeded, about ten minutes on two cores).

    python recipes/quickstart/make.py

model             a small byte-level Llama trained on the sources of Python's standard library
finetune-rotated  the same model trained further on Python's documentation (the text of `help()`),
                  then written down in other coordinates: it computes what the fine-tune computes,
                  but heads, rotary pairs and MLP neurons no longer match those of `model`. Tools
                  that protect or quantise weights make changes of this kind.

The held-out texts in heldout-code.txt (the first 16 KiB of contextlib.py) and heldout-docs.txt
(of the help topics import, objects, raise) are from Python 3.11, Copyright (c) Python Software
Foundation, PSF License Version 2. Neither source is trained on.
"""

import copy
import math
import sysconfig
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from loss import TEXTS, losses, print_table, windows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)
from transformers.utils import logging

HERE = Path(__file__).resolve().parent
HELD_OUT_MODULES = {"contextlib.py"}
HELD_OUT_TOPICS = {"import", "objects", "raise"}
CODE_BYTES, DOCS_BYTES = 3_500_000, 400_000
BATCH, LENGTH = 16, 128
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=None,
)


def code_text() -> bytes:
    """The top-level modules of the standard library, by name (no generated `_sysconfigdata`)."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py"))
    return b"\n".join(f.read_bytes() for f in files if f.name not in HELD_OUT_MODULES)[:CODE_BYTES]


def docs_text() -> bytes:
    """What `help()` says about the topics of the language, by name."""
    chosen = (topics[name] for name in sorted(topics) if name not in HELD_OUT_TOPICS)
    return "\n".join(chosen).encode()[:DOCS_BYTES]


def train(model: LlamaForCausalLM, text: bytes, steps: int, peak_lr: float, seed: int) -> None:
    """AdamW on random windows of the text, with warm-up and cosine decay."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=peak_lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 20, steps)
    model.train()
    began, recent = time.time(), []
    for step in range(1, steps + 1):
        starts = torch.randint(len(data) - LENGTH, (BATCH, 1), generator=generator)
        ids = data[starts + torch.arange(LENGTH)].long()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent.append(loss.item())
        if step % 200 == 0 or step == steps:
            mean = sum(recent) / len(recent)
            seconds = time.time() - began
            print(f"  step {step}/{steps}  loss {mean:.3f}  {seconds:.0f} s", flush=True)
            recent.clear()
    model.eval()


def rotate_pairs(weight: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Turn rows i and i + d/2 of every head by angle[..., i]; weight is [..., d, columns]."""
    upper, lower = weight.chunk(2, dim=-2)
    cos, sin = angle.cos()[..., None], angle.sin()[..., None]
    return torch.cat((cos * upper - sin * lower, sin * upper + cos * lower), dim=-2)


@torch.no_grad()
def change_coordinates(model: LlamaForCausalLM, seed: int) -> None:
    """Rewrite the weights in random coordinates, layer by layer, without changing the function."""
    generator = torch.Generator().manual_seed(seed)
    cfg = model.config
    width, d, groups = cfg.hidden_size, cfg.head_dim, cfg.num_key_value_heads
    per_group = cfg.num_attention_heads // groups

    def shuffled(n: int) -> torch.Tensor:
        return torch.randperm(n, generator=generator)

    for layer in model.model.layers:
        attn, mlp = layer.self_attn, layer.mlp
        q = attn.q_proj.weight.double().view(groups, per_group, d, width)
        k = attn.k_proj.weight.double().view(groups, d, width)
        v = attn.v_proj.weight.double().view(groups, d, width)
        o = attn.o_proj.weight.double().T.reshape(groups, per_group, d, width)  # columns as rows

        # Values and outputs: one orthogonal matrix per KV head, shared by its query heads.
        normal = torch.randn(groups, d, d, generator=generator, dtype=torch.float64)
        basis = torch.linalg.qr(normal).Q
        v, o = basis @ v, basis[:, None] @ o
        # Queries and keys: one angle per KV head and rotary pair; it commutes with the rotation
        # by the position.
        angle = 2 * math.pi * torch.rand(groups, d // 2, generator=generator, dtype=torch.float64)
        q, k = rotate_pairs(q, angle[:, None]), rotate_pairs(k, angle)
        # Order of the KV heads, and of the query heads that share one.
        order = shuffled(groups)
        inner = torch.stack([shuffled(per_group) for _ in range(groups)])
        q, k, v, o = q[order[:, None], inner], k[order], v[order], o[order[:, None], inner]

        attn.q_proj.weight.copy_(q.reshape(-1, width))
        attn.k_proj.weight.copy_(k.reshape(-1, width))
        attn.v_proj.weight.copy_(v.reshape(-1, width))
        attn.o_proj.weight.copy_(o.reshape(-1, width).T)

        # MLP: order of the neurons, and a sign between up and down projection.
        neurons = shuffled(cfg.intermediate_size)
        sign = 2.0 * torch.randint(2, (cfg.intermediate_size,), generator=generator) - 1
        mlp.gate_proj.weight.copy_(mlp.gate_proj.weight[neurons])
        mlp.up_proj.weight.copy_(mlp.up_proj.weight[neurons] * sign[:, None])
        mlp.down_proj.weight.copy_(mlp.down_proj.weight[:, neurons] * sign)


@torch.no_grad()
def midpoint(a: LlamaForCausalLM, b: LlamaForCausalLM) -> LlamaForCausalLM:
    """The plain average of two models."""
    middle = copy.deepcopy(a)
    for mine, other in zip(middle.parameters(), b.parameters(), strict=True):
        mine.lerp_(other, 0.5)
    return middle


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, with the byte's value as its id."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    # Printable Latin-1 characters stand for themselves, the other bytes follow above 255.
    stand_ins = iter(sorted(char for char in alphabet if ord(char) > 255))
    vocab = {chr(b) if chr(b) in alphabet else next(stand_ins): b for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write a bfloat16 copy with its tokenizer."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def main() -> None:
    """Train, change the coordinates of the fine-tune, check, save, and print the losses."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    print("model: standard library sources")
    train(model, code_text(), steps=2000, peak_lr=4e-3, seed=1)
    finetune = copy.deepcopy(model)
    print("fine-tune: documentation")
    train(finetune, docs_text(), steps=500, peak_lr=1e-3, seed=2)

    rotated = copy.deepcopy(finetune)
    change_coordinates(rotated, seed=3)
    with torch.inference_mode():
        ids = windows(TEXTS["docs"].read_bytes())
        difference = (rotated(ids).logits - finetune(ids).logits).abs().max().item()
    print(f"largest change of a logit by the change of coordinates: {difference:.1e}")
    assert difference < 1e-3, "the change of coordinates must not change the function"

    save(model, HERE / "model")
    save(rotated, HERE / "finetune-rotated")
    print("\nloss on held-out text, nats per byte")
    rows = {
        "model": model,
        "fine-tune": finetune,
        "fine-tune, rotated": rotated,
        "average of model and fine-tune": midpoint(model, finetune),
        "average of model and fine-tune, rotated": midpoint(model, rotated),
    }
    print_table({name: losses(row) for name, row in rows.items()})


if __name__ == "__main__":
    main()
