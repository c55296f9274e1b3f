"""Tiny random transformers models, evaluated exactly and saved so that mergekit can merge them.

Every size of a model differs from the others (hidden size, heads times head width, MLP width,
vocabulary), so that a mixed-up axis fails loudly. All randomness comes from seeded generators;
the global generator is left as it was.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from mergekit_rotation.proof import exact_outputs, float64_exact, outputs, randomise

__all__ = [
    "FAMILIES",
    "build",
    "exact_outputs",
    "float64_exact",
    "inputs",
    "outputs",
    "randomise",
    "save",
]

VOCABULARY = 67
HIDDEN = 48
INTERMEDIATE = 80
LAYERS = 2
POSITIONS = 32
LENGTH = 12
LABELS = 3
CHOICES = 3
FIRST_ORDINARY_TOKEN = 3
"""Token ids below this one are kept for padding, start and end."""


@dataclass(frozen=True)
class Case:
    """One model class of one family, and how to build a tiny model of it."""

    family: str
    """Name of the layout, the one `scramble` understands."""
    model_class: type[PreTrainedModel]
    config_class: type[PretrainedConfig]
    config: Mapping[str, Any]
    biases: Mapping[str, Any] = field(default_factory=dict)
    """Config entries that turn on every optional bias. mergekit drops the extra tensors."""
    features: tuple[int, ...] = ()
    """Shape of a continuous input (an image, a spectrogram) in the place of tokens."""
    mergeable: bool = True
    """Whether mergekit 0.1.5 by itself can merge the model."""
    position_axes: int = 1
    """How many positions each token has (time, height and width of a video)."""


_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = _SPECIAL | {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
}
_GROUPED = _DECODER | {"num_key_value_heads": 2}
_WIDE_HEADS = _GROUPED | {"head_dim": 16}
_SOFT_CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}
_ALTERNATING = {
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 16,
}
_PARTIAL_ROTARY = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    }
}
_GRANITE_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
}
_LLAMA3_ROTARY = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
}
_MINISTRAL3_ROTARY = {
    "rope_parameters": _LLAMA3_ROTARY["rope_parameters"]
    | {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.1}
}
_SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_FALCON = _SPECIAL | {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
}
_FALCON_NEW = {
    "new_decoder_architecture": True,
    "num_kv_heads": 2,
    "tie_word_embeddings": False,
}
_FALCON_ALIBI = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
_EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
_QWEN3_EXPERTS = _EXPERTS | {"num_experts": 5, "moe_intermediate_size": 28}
_GLM4_MOE = _EXPERTS | {
    "n_routed_experts": 6,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 2,
    "moe_intermediate_size": 28,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
}
_LATENT_HEADS = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 18,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 14,
}
_DEEPSEEK = _EXPERTS | {
    "n_routed_experts": 6,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 2,
    "moe_intermediate_size": 28,
    "first_k_dense_replace": 1,
}
_DEEPSEEK_V2 = _DEEPSEEK | {"topk_method": "group_limited_greedy"}
_LLAMA4 = {
    "intermediate_size_mlp": 88,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "no_rope_layers": [0, 1],
    "floor_scale": 4,
}
_GRANITE4 = _GRANITE_MULTIPLIERS | {
    "layer_types": ["full_attention", "linear_attention"],
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",
    "intermediate_size": 28,
    "shared_intermediate_size": 56,
    "mamba_n_heads": 4,
    "mamba_d_head": 24,
    "mamba_d_state": 8,
}
_LFM2 = {"layer_types": ["full_attention", "conv"], "block_multiple_of": 8}
_AFMOE = _SLIDING | {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_shared_experts": 2,
    "moe_intermediate_size": 28,
    "num_dense_layers": 1,
    "experts_implementation": "eager",
}
_LLAMA4_VISION = {
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "vision_output_dim": 16,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}
_MAMBA = _SPECIAL | {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "state_size": 8,
    "time_step_rank": 6,
}
_OPT = _SPECIAL | {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "word_embed_proj_dim": HIDDEN,
    "ffn_dim": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "dropout": 0.0,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "out_hidden_size": HIDDEN,
    "num_heads": 2,
}
_QWEN2_VISION = {"depth": 1, "embed_dim": 16, "hidden_size": HIDDEN, "num_heads": 2}
_QWEN3_VISION = _QWEN_VISION | {
    "depth": 3,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1, 2],
}
_AXIAL_ROTARY = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 2, 2],
    }
}
_AXIAL_ROTARY_OF_16 = {
    "rope_parameters": _AXIAL_ROTARY["rope_parameters"] | {"mrope_section": [4, 2, 2]}
}
_GPT2 = _SPECIAL | {
    "vocab_size": VOCABULARY,
    "n_embd": HIDDEN,
    "n_inner": INTERMEDIATE,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": POSITIONS,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_BERT = _DECODER | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ROBERTA = _BERT | {"pad_token_id": 1, "bos_token_id": 0}
_DISTILBERT = {
    "vocab_size": VOCABULARY,
    "dim": HIDDEN,
    "hidden_dim": INTERMEDIATE,
    "n_layers": LAYERS,
    "n_heads": 4,
    "max_position_embeddings": POSITIONS,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "qa_dropout": 0.0,
    "seq_classif_dropout": 0.0,
    "pad_token_id": 0,
}
_DEBERTA = _BERT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
_DEBERTA_V3 = _DEBERTA | {
    "position_biased_input": False,
    "position_buckets": 4,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
}
_ELECTRA = _BERT | {"embedding_size": 40}
_VIT = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "image_size": 12,
    "patch_size": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": HIDDEN,
    "d_ff": INTERMEDIATE,
    "d_kv": 16,
    "num_heads": 4,
    "num_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
_GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_WHISPER = _SPECIAL | {
    "vocab_size": VOCABULARY,
    "d_model": HIDDEN,
    "encoder_ffn_dim": INTERMEDIATE,
    "decoder_ffn_dim": 88,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_mel_bins": 10,
    "max_source_positions": 16,
    "max_target_positions": POSITIONS,
    "decoder_start_token_id": 1,
    "dropout": 0.0,
}
_LABELS = {"num_labels": LABELS}
_ATTENTION_BIAS = {"attention_bias": True}
_FALCON_BIAS = {"bias": True}
_MAMBA_BIAS = {"mamba_proj_bias": True}
_LLAMA_BIASES = {"attention_bias": True, "mlp_bias": True}


def _case(family: str, model: str, config: str, entries: Mapping[str, Any], **more: Any) -> Case:
    """A case from the names of its transformers classes."""
    return Case(
        family, getattr(transformers, model), getattr(transformers, config), entries, **more
    )


def _heads(family: str, prefix: str, entries: Mapping[str, Any]) -> dict[str, Case]:
    """The bare encoder and its usual heads, of which mergekit knows none."""
    heads = {
        "": ("Model", {}),
        "-masked-lm": ("ForMaskedLM", {}),
        "-sequence-classification": ("ForSequenceClassification", _LABELS),
        "-token-classification": ("ForTokenClassification", _LABELS),
    }
    return {
        family + name: _case(
            family, prefix + head, prefix + "Config", entries | more, mergeable=False
        )
        for name, (head, more) in heads.items()
    }


FAMILIES: dict[str, Case] = {
    "llama": _case("llama", "LlamaForCausalLM", "LlamaConfig", _WIDE_HEADS, biases=_LLAMA_BIASES),
    "llama-sequence-classification": _case(
        "llama",
        "LlamaForSequenceClassification",
        "LlamaConfig",
        _WIDE_HEADS | _LABELS,
        biases=_LLAMA_BIASES,
    ),
    "mistral": _case(
        "mistral", "MistralForCausalLM", "MistralConfig", _WIDE_HEADS | {"sliding_window": 6}
    ),
    "qwen2": _case("qwen2", "Qwen2ForCausalLM", "Qwen2Config", _GROUPED),
    "qwen3": _case("qwen3", "Qwen3ForCausalLM", "Qwen3Config", _WIDE_HEADS, biases=_ATTENTION_BIAS),
    "gemma": _case("gemma", "GemmaForCausalLM", "GemmaConfig", _WIDE_HEADS, biases=_ATTENTION_BIAS),
    "gemma2": _case(
        "gemma2",
        "Gemma2ForCausalLM",
        "Gemma2Config",
        _WIDE_HEADS | _SOFT_CAPS | _ALTERNATING,
        biases=_ATTENTION_BIAS,
    ),
    "gemma3": _case(
        "gemma3",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        _WIDE_HEADS | _ALTERNATING,
        biases=_ATTENTION_BIAS,
    ),
    "phi": _case("phi", "PhiForCausalLM", "PhiConfig", _GROUPED | _PARTIAL_ROTARY),
    "phi3": _case("phi3", "Phi3ForCausalLM", "Phi3Config", _GROUPED | _PARTIAL_ROTARY),
    "gpt2": _case("gpt2", "GPT2LMHeadModel", "GPT2Config", _GPT2),
    "gpt2-sequence-classification": _case(
        "gpt2", "GPT2ForSequenceClassification", "GPT2Config", _GPT2 | _LABELS
    ),
    "gpt_neox": _case(
        "gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", _DECODER | _PARTIAL_ROTARY
    ),
    "starcoder2": _case("starcoder2", "Starcoder2ForCausalLM", "Starcoder2Config", _GROUPED),
    "bert-masked-lm": _case("bert", "BertForMaskedLM", "BertConfig", _BERT),
    "bert-sequence-classification": _case(
        "bert", "BertForSequenceClassification", "BertConfig", _BERT | _LABELS
    ),
    "bert-token-classification": _case(
        "bert", "BertForTokenClassification", "BertConfig", _BERT | _LABELS
    ),
    "bert-multiple-choice": _case("bert", "BertForMultipleChoice", "BertConfig", _BERT),
    "bert": _case("bert", "BertModel", "BertConfig", _BERT, mergeable=False),
    "roberta-masked-lm": _case("roberta", "RobertaForMaskedLM", "RobertaConfig", _ROBERTA),
    "roberta-sequence-classification": _case(
        "roberta", "RobertaForSequenceClassification", "RobertaConfig", _ROBERTA | _LABELS
    ),
    "roberta-token-classification": _case(
        "roberta", "RobertaForTokenClassification", "RobertaConfig", _ROBERTA | _LABELS
    ),
    "distilbert-masked-lm": _case(
        "distilbert", "DistilBertForMaskedLM", "DistilBertConfig", _DISTILBERT
    ),
    "distilbert-sequence-classification": _case(
        "distilbert",
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        _DISTILBERT | _LABELS,
    ),
    "distilbert-token-classification": _case(
        "distilbert", "DistilBertForTokenClassification", "DistilBertConfig", _DISTILBERT | _LABELS
    ),
    "granite": _case(
        "granite",
        "GraniteForCausalLM",
        "GraniteConfig",
        _WIDE_HEADS | _GRANITE_MULTIPLIERS,
        biases=_LLAMA_BIASES,
    ),
    "arcee": _case("arcee", "ArceeForCausalLM", "ArceeConfig", _WIDE_HEADS, biases=_LLAMA_BIASES),
    "apertus": _case(
        "apertus",
        "ApertusForCausalLM",
        "ApertusConfig",
        _WIDE_HEADS | _LLAMA3_ROTARY,
        biases=_ATTENTION_BIAS,
    ),
    "olmo2": _case("olmo2", "Olmo2ForCausalLM", "Olmo2Config", _WIDE_HEADS, biases=_ATTENTION_BIAS),
    "cohere": _case(
        "cohere",
        "CohereForCausalLM",
        "CohereConfig",
        _WIDE_HEADS | {"logit_scale": 0.5},
        biases=_ATTENTION_BIAS,
        mergeable=False,
    ),
    "cohere_qk_norm": _case(
        "cohere_qk_norm",
        "CohereForCausalLM",
        "CohereConfig",
        _WIDE_HEADS | {"logit_scale": 0.5, "use_qk_norm": True},
        biases=_ATTENTION_BIAS,
    ),
    "cohere2": _case(
        "cohere2",
        "Cohere2ForCausalLM",
        "Cohere2Config",
        _WIDE_HEADS | _SLIDING | {"logit_scale": 0.5},
        biases=_ATTENTION_BIAS,
    ),
    "glm4": _case("glm4", "Glm4ForCausalLM", "Glm4Config", _WIDE_HEADS | _PARTIAL_ROTARY),
    "glm": _case("glm", "GlmForCausalLM", "GlmConfig", _WIDE_HEADS | _PARTIAL_ROTARY),
    "stablelm": _case(
        "stablelm",
        "StableLmForCausalLM",
        "StableLmConfig",
        _GROUPED | _PARTIAL_ROTARY | {"use_qkv_bias": True},
    ),
    "gpt_bigcode_mqa": _case(
        "gpt_bigcode_mqa",
        "GPTBigCodeForCausalLM",
        "GPTBigCodeConfig",
        _GPT2 | {"multi_query": True},
    ),
    "gpt_bigcode_mha": _case(
        "gpt_bigcode_mha",
        "GPTBigCodeForCausalLM",
        "GPTBigCodeConfig",
        _GPT2 | {"multi_query": False},
    ),
    "falcon_new": _case(
        "falcon_new",
        "FalconForCausalLM",
        "FalconConfig",
        _FALCON | _FALCON_NEW,
        biases=_FALCON_BIAS,
    ),
    "falcon_mqa": _case(
        "falcon_mqa",
        "FalconForCausalLM",
        "FalconConfig",
        _FALCON | {"multi_query": True},
        biases=_FALCON_BIAS,
        mergeable=False,
    ),
    "falcon_alibi": _case(
        "falcon_alibi",
        "FalconForCausalLM",
        "FalconConfig",
        _FALCON | _FALCON_ALIBI,
        mergeable=False,
    ),
    "exaone4": _case("exaone4", "Exaone4ForCausalLM", "Exaone4Config", _WIDE_HEADS | _SLIDING),
    "mixtral": _case(
        "mixtral",
        "MixtralForCausalLM",
        "MixtralConfig",
        _WIDE_HEADS | _EXPERTS | {"num_local_experts": 5},
    ),
    "qwen3_moe": _case(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        _WIDE_HEADS | _QWEN3_EXPERTS | {"mlp_only_layers": [1]},
        biases=_ATTENTION_BIAS,
        mergeable=False,
    ),
    "glm4_moe": _case(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        _WIDE_HEADS | _PARTIAL_ROTARY | _GLM4_MOE,
        biases=_ATTENTION_BIAS,
        mergeable=False,
    ),
    "gpt_oss": _case(
        "gpt_oss",
        "GptOssForCausalLM",
        "GptOssConfig",
        _WIDE_HEADS
        | _EXPERTS
        | _SLIDING
        | _LLAMA3_ROTARY
        | {"num_local_experts": 5, "attention_bias": True},
    ),
    "deepseek_v3": _case(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        _DECODER | _LATENT_HEADS | _DEEPSEEK,
        biases=_ATTENTION_BIAS,
        mergeable=False,
    ),
    "deepseek_v3-all-experts": _case(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        _DECODER | _LATENT_HEADS | _DEEPSEEK | {"q_lora_rank": None, "first_k_dense_replace": 0},
        biases=_ATTENTION_BIAS,
    ),
    "deepseek_v2": _case(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        _DECODER | _LATENT_HEADS | _DEEPSEEK_V2,
        biases=_LLAMA_BIASES,
        mergeable=False,
    ),
    "llama4": _case(
        "llama4",
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        _WIDE_HEADS | _LLAMA4 | {"moe_layers": [1]},
        biases=_ATTENTION_BIAS,
    ),
    "smollm3": _case(
        "smollm3",
        "SmolLM3ForCausalLM",
        "SmolLM3Config",
        _GROUPED | {"no_rope_layers": [0, 1]},
        biases=_LLAMA_BIASES,
    ),
    "llama-seed_oss": _case(
        "llama",
        "SeedOssForCausalLM",
        "SeedOssConfig",
        _WIDE_HEADS,
        biases=_LLAMA_BIASES | {"attention_out_bias": True},
    ),
    "ernie4_5": _case(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        "Ernie4_5Config",
        _WIDE_HEADS,
        biases={"use_bias": True},
    ),
    "hunyuan_v1_dense": _case(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        "HunYuanDenseV1Config",
        _WIDE_HEADS,
        biases=_ATTENTION_BIAS,
    ),
    "olmo": _case("olmo", "OlmoForCausalLM", "OlmoConfig", _GROUPED, biases=_ATTENTION_BIAS),
    "olmo2-olmo3": _case(
        "olmo2",
        "Olmo3ForCausalLM",
        "Olmo3Config",
        _WIDE_HEADS | _SLIDING,
        biases=_ATTENTION_BIAS,
    ),
    "opt": _case("opt", "OPTForCausalLM", "OPTConfig", _OPT),
    "granitemoehybrid": _case(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        _GROUPED | _GRANITE4,
        biases=_ATTENTION_BIAS | _MAMBA_BIAS,
    ),
    "granitemoehybrid-rotary": _case(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        _GROUPED | _GRANITE4 | {"position_embedding_type": "rope"},
        biases=_ATTENTION_BIAS | _MAMBA_BIAS,
    ),
    "lfm2": _case(
        "lfm2",
        "Lfm2ForCausalLM",
        "Lfm2Config",
        _GROUPED | _LFM2 | {"block_auto_adjust_ff_dim": False},
        biases={"conv_bias": True},
    ),
    "lfm2_adjusted": _case(
        "lfm2_adjusted",
        "Lfm2ForCausalLM",
        "Lfm2Config",
        _GROUPED | _LFM2,
        biases={"conv_bias": True},
    ),
    "afmoe": _case(
        "afmoe",
        "AfmoeForCausalLM",
        "AfmoeConfig",
        _WIDE_HEADS | _AFMOE,
        biases=_ATTENTION_BIAS,
    ),
    "llama4_vl": _case(
        "llama4_vl",
        "Llama4ForConditionalGeneration",
        "Llama4Config",
        {
            "text_config": _WIDE_HEADS | _LLAMA4 | {"moe_layers": [1]},
            "vision_config": _LLAMA4_VISION,
        },
        biases={"text_config": _WIDE_HEADS | _LLAMA4 | _ATTENTION_BIAS | {"moe_layers": [1]}},
    ),
    "qwen2_moe": _case(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        _GROUPED | _QWEN3_EXPERTS | {"shared_expert_intermediate_size": 56, "mlp_only_layers": [1]},
        mergeable=False,
    ),
    "qwen2_moe-all-experts": _case(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        _GROUPED | _QWEN3_EXPERTS | {"shared_expert_intermediate_size": 56},
    ),
    "olmoe": _case(
        "olmoe",
        "OlmoeForCausalLM",
        "OlmoeConfig",
        _GROUPED | _EXPERTS | {"num_experts": 5, "intermediate_size": 28},
        biases=_ATTENTION_BIAS,
    ),
    "mamba": _case("mamba", "MambaForCausalLM", "MambaConfig", _MAMBA, biases={"use_bias": True}),
    "gptj": _case("gptj", "GPTJForCausalLM", "GPTJConfig", _GPT2 | {"rotary_dim": 8}),
    "nemotron": _case(
        "nemotron",
        "NemotronForCausalLM",
        "NemotronConfig",
        _WIDE_HEADS | _PARTIAL_ROTARY,
        biases=_LLAMA_BIASES,
    ),
    "granitemoe": _case(
        "granitemoe",
        "GraniteMoeForCausalLM",
        "GraniteMoeConfig",
        _GROUPED | _GRANITE_MULTIPLIERS | _EXPERTS | {"num_local_experts": 5},
        biases=_ATTENTION_BIAS,
    ),
    "mistral-ministral": _case(
        "mistral", "MinistralForCausalLM", "MinistralConfig", _WIDE_HEADS | _SLIDING
    ),
    "mistral-ministral3": _case(
        "mistral", "Ministral3ForCausalLM", "Ministral3Config", _WIDE_HEADS | _MINISTRAL3_ROTARY
    ),
    "mistral3": _case(
        "mistral3",
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        {
            "text_config": _WIDE_HEADS | _MINISTRAL3_ROTARY | {"model_type": "ministral3"},
            "vision_config": _VISION,
        },
    ),
    "gemma3_vl": _case(
        "gemma3_vl",
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {
            "text_config": _WIDE_HEADS | _ALTERNATING,
            "vision_config": _VISION | {"vision_use_head": False},
            "mm_tokens_per_image": 4,
        },
        biases={"text_config": _WIDE_HEADS | _ALTERNATING | _ATTENTION_BIAS},
    ),
    "qwen2_vl": _case(
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {"text_config": _GROUPED | _AXIAL_ROTARY, "vision_config": _QWEN2_VISION},
        position_axes=3,
        mergeable=False,
    ),
    "qwen2_5_vl": _case(
        "qwen2_vl",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        {"text_config": _GROUPED | _AXIAL_ROTARY, "vision_config": _QWEN_VISION},
        position_axes=3,
    ),
    "qwen3_vl": _case(
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        {"text_config": _WIDE_HEADS | _AXIAL_ROTARY_OF_16, "vision_config": _QWEN3_VISION},
        biases={"text_config": _WIDE_HEADS | _AXIAL_ROTARY_OF_16 | _ATTENTION_BIAS},
        position_axes=3,
    ),
    "qwen3_moe-all-experts": _case(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        _WIDE_HEADS | _QWEN3_EXPERTS,
        biases=_ATTENTION_BIAS,
    ),
    "xlm-roberta-masked-lm": _case(
        "roberta", "XLMRobertaForMaskedLM", "XLMRobertaConfig", _ROBERTA, mergeable=False
    ),
    "camembert-masked-lm": _case(
        "roberta", "CamembertForMaskedLM", "CamembertConfig", _ROBERTA, mergeable=False
    ),
    **_heads("deberta", "Deberta", _DEBERTA),
    **_heads("deberta_v2", "DebertaV2", _DEBERTA),
    **_heads("mpnet", "MPNet", _ROBERTA),
    "deberta_v3-masked-lm": _case(
        "deberta_v2", "DebertaV2ForMaskedLM", "DebertaV2Config", _DEBERTA_V3, mergeable=False
    ),
    **_heads("electra", "Electra", _ELECTRA),
    "electra-pre-training": _case(
        "electra",
        "ElectraForPreTraining",
        "ElectraConfig",
        _ELECTRA,
        mergeable=False,
    ),
    "vit": _case("vit", "ViTModel", "ViTConfig", _VIT, features=(3, 12, 12), mergeable=False),
    "vit-image-classification": _case(
        "vit",
        "ViTForImageClassification",
        "ViTConfig",
        _VIT | _LABELS,
        features=(3, 12, 12),
        mergeable=False,
    ),
    "t5": _case("t5", "T5ForConditionalGeneration", "T5Config", _T5, mergeable=False),
    "t5_gated": _case("t5_gated", "T5ForConditionalGeneration", "T5Config", _T5 | _GATED),
    "mt5": _case(
        "t5_gated", "MT5ForConditionalGeneration", "MT5Config", _T5 | _GATED, mergeable=False
    ),
    "whisper": _case(
        "whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        _WHISPER,
        features=(10, 32),
        mergeable=False,
    ),
}


def build(
    case: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    biases: bool = False,
    **config_overrides: Any,
) -> PreTrainedModel:
    """A tiny model of a case with random parameters.

    `biases` turns on every optional bias of the config; mergekit drops such tensors, so that is
    for tests in memory.
    """
    entry = FAMILIES[case]
    entries = {**entry.config, **(entry.biases if biases else {}), **config_overrides}
    config = entry.config_class(**copy.deepcopy(entries), attn_implementation="eager")
    with torch.random.fork_rng(devices=[]):
        model = entry.model_class(config)
    randomise(model, seed)
    return model.to(dtype).eval()


def inputs(case: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """A batch of random ordinary tokens, or of what else a case reads."""
    entry = FAMILIES[case]
    choices = (CHOICES,) if case.endswith("multiple-choice") else ()
    shape = (2, *choices, LENGTH)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(FIRST_ORDINARY_TOKEN, VOCABULARY, shape, generator=generator)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if entry.position_axes > 1:
        positions = (entry.position_axes, *shape)
        batch["position_ids"] = torch.randint(POSITIONS, positions, generator=generator)
    if entry.features:
        features = torch.randn((2, *entry.features), generator=generator)
        batch = {entry.model_class.main_input_name: features}
    if entry.config_class().is_encoder_decoder:
        batch["decoder_input_ids"] = ids.flip(-1)
    return batch


def save(model: PreTrainedModel, folder: str | Path, **kwargs: Any) -> None:
    """Save a model as safetensors, with the further tensors that mergekit insists on."""
    model.save_pretrained(folder, state_dict={**model.state_dict(), **_demanded(model)}, **kwargs)


def _demanded(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Tensors of older checkpoints that mergekit's definition of a family still demands."""
    config = model.config
    if config.model_type == "gpt_neox":
        length = config.max_position_embeddings
        demanded = {}
        for layer in range(config.num_hidden_layers):
            prefix = f"gpt_neox.layers.{layer}.attention."
            mask = torch.ones(length, length, dtype=torch.bool).tril()
            demanded[prefix + "bias"] = mask.view(1, 1, length, length)
            demanded[prefix + "masked_bias"] = torch.tensor(-1e9)
            demanded[prefix + "rotary_emb.inv_freq"] = model.gpt_neox.rotary_emb.inv_freq.clone()
        return demanded
    if type(model).__name__ == "Gemma3ForConditionalGeneration":
        tower = model.model.vision_tower.state_dict()
        return {f"model.vision_tower.vision_model.{n}": x.clone() for n, x in tower.items()}
    if type(model).__name__ == "BertForMaskedLM" and model.bert.pooler is None:
        size = config.hidden_size
        generator = torch.Generator().manual_seed(0)
        return {
            "bert.pooler.dense.weight": torch.randn(size, size, generator=generator),
            "bert.pooler.dense.bias": torch.randn(size, generator=generator),
        }
    return {}
