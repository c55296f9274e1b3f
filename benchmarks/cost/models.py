"""Models to merge: random weights of published shapes, or a checkpoint, and its companions.

``near`` is the model with 2 % of noise (same lineage), ``twin`` the model in other coordinates,
``other`` has weights of its own. Everything is written layer by layer, a shard each.
"""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from real import draw, family_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PretrainedConfig

from mergekit_rotation.symmetry import act

State = dict[str, torch.Tensor]

SHAPES: dict[str, PretrainedConfig] = {
    "SmolLM2-135M": LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    ),
    "Gemma 3 270M": Gemma3TextConfig(
        architectures=["Gemma3ForCausalLM"],
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        tie_word_embeddings=True,
    ),
    "Llama-8B layers": LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=1024,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "small": LlamaConfig(  # for rehearsals
        architectures=["LlamaForCausalLM"],
        vocab_size=256,
        hidden_size=64,
        intermediate_size=300,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
}


def build(folder: Path, shape: str, kinds: list[str], layers: int | None = None) -> None:
    """Write the models ``model`` and ``kinds`` of a shape into a folder."""
    config = type(SHAPES[shape]).from_dict(SHAPES[shape].to_dict())
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    shapes = _shapes(config)
    for kind in ("model", *kinds):
        (folder / kind).mkdir(parents=True)
        config.save_pretrained(folder / kind)
    _write(folder, kinds, lambda part: random_part(shapes, part, "model"), _parts(shapes), shapes)


def companions(folder: Path, checkpoint: Path, kinds: list[str]) -> None:
    """Write companions of a checkpoint of one file, and the checkpoint itself as ``model``."""
    state = load_file(checkpoint / "model.safetensors")
    for kind in ("model", *kinds):
        (folder / kind).mkdir(parents=True)
        text = (checkpoint / "config.json").read_text(encoding="utf-8")
        (folder / kind / "config.json").write_text(text, encoding="utf-8")
    shapes = {name: tuple(x.shape) for name, x in state.items()}

    def part(index: str) -> State:
        return {name: x for name, x in state.items() if _part(name) == index}

    _write(folder, kinds, part, _parts(shapes), shapes)


def _write(folder: Path, kinds: list[str], source, parts: list[str], shapes) -> None:
    config, family = family_of(folder / "model")
    places: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        state = source(part)
        places |= dict.fromkeys(state, file)
        save_file(state, folder / "model" / file, metadata={"format": "pt"})
        for kind in kinds:
            base = kind.rstrip("0123456789")
            if base == "near":
                changed = {name: noisy(name, x, kind) for name, x in state.items()}
            elif base == "twin":
                changed = _turned(config, family, part, state)
            else:
                changed = random_part(shapes, part, kind)
            save_file(changed, folder / kind / file, metadata={"format": "pt"})
    index = json.dumps({"metadata": {}, "weight_map": places})
    for kind in ("model", *kinds):
        (folder / kind / "model.safetensors.index.json").write_text(index, encoding="utf-8")


def _shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return {n: tuple(x.shape) for n, x in model.state_dict().items() if n not in tied}


def _part(name: str) -> str:
    """Return the layer that a tensor belongs to; empty for what is outside of the layers."""
    return name.rpartition(".layers.")[2].split(".")[0] if ".layers." in name else ""


def _parts(shapes: dict[str, tuple[int, ...]]) -> list[str]:
    return list(dict.fromkeys(map(_part, shapes)))


def seeded(name: str, kind: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"{kind} {name}".encode()))


def random_part(shapes: dict[str, tuple[int, ...]], part: str, kind: str) -> State:
    """Random weights of a layer: neurons and columns of unequal sizes, norms near one."""
    state = {}
    for name, shape in shapes.items():
        if _part(name) != part:
            continue
        generator = seeded(name, kind)
        x = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            x = 1 + 0.1 * x
        else:
            for dim in range(2):
                size = [1, 1]
                size[dim] = shape[dim]
                x *= torch.exp(0.3 * torch.randn(size, generator=generator))
            x *= 0.02
        state[name] = x.to(torch.bfloat16)
    return state


def noisy(name: str, x: torch.Tensor, kind: str) -> torch.Tensor:
    noise = torch.randn(x.shape, generator=seeded(name, kind))
    return (x.float() * (1 + 0.02 * noise)).to(x.dtype)


def _turned(config: PretrainedConfig, family, part: str, state: State) -> State:
    """Move a layer by random elements of every symmetry, in float64."""
    result = {name: x.clone() for name, x in state.items()}
    if not part:
        return result
    layer = family.layer(config, int(part))
    for block in layer.blocks:
        transformation = draw(block.layout, seeded(f"{part} {block.kind}", "twin"))
        for template, pattern in block.layout.patterns.items():
            name = stored(template.replace("${layer_index}", part), family.prefixes, state)
            if name is not None:
                moved = act(transformation, state[name].double(), pattern, layer.sizes)
                result[name] = moved.to(state[name].dtype).contiguous()
    return result


def stored(local: str, prefixes: Iterator[str], state: State) -> str | None:
    return next((p + local for p in prefixes if p + local in state), None)
