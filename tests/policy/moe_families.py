"""Tiny random models of the six MoE families that routing is proven on."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

COMMON: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
    "initializer_range": 0.5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "qwen3_moe": (
        Qwen3MoeConfig,
        # A dense layer between MoE layers: naive layer numbers would shift.
        {
            "num_experts": 8,
            "moe_intermediate_size": 16,
            "head_dim": 16,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen2_moe": (
        Qwen2MoeConfig,
        {"num_experts": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    ),
    "olmoe": (OlmoeConfig, {"num_experts": 8}),
    "mixtral": (MixtralConfig, {"num_local_experts": 8, "head_dim": 16}),
    "deepseek_v3": (
        DeepseekV3Config,
        {
            "n_routed_experts": 8,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "q_lora_rank": None,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "gpt_oss": (
        GptOssConfig,
        {
            "num_local_experts": 8,
            "head_dim": 16,
            "sliding_window": 16,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
}


def make(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model of `family` in evaluation mode."""
    kind, special = FAMILIES[family]
    torch.manual_seed(seed)
    config = kind(**{**COMMON, **special, **changes})
    config._attn_implementation = "eager"
    if dtype is torch.float64:
        config._experts_implementation = "eager"  # grouped_mm has no float64
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def tokens(rows: int = 2, length: int = 12, *, seed: int = 0) -> torch.Tensor:
    """Random ids [rows, length]."""
    return torch.randint(3, 40, (rows, length), generator=torch.Generator().manual_seed(seed))
