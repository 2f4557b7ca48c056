"""Tiny random models of several families, and a tokenizer whose tokens are known."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 101
EOS = 2

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 8,
        "tie_word_embeddings": False,
    },
    "gpt_oss": {
        "sliding_window": 5,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "gpt2": {"n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "gemma2": {
        "sliding_window": 6,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 8,
        "tie_word_embeddings": False,
    },
    "mamba": {"state_size": 4, "num_hidden_layers": 2, "expand": 2, "conv_kernel": 3},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 0,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 6},
}


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> Any:
    """A random model of the family, float32, in training mode as a policy is found."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**_COMMON, **FAMILIES[family], **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than the usual initialisation: next-token distributions that differ clearly by context.
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    return model.train()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Id 0 `<unk>`, 1 `<s>`, 2 `</s>`, then two-letter tokens `aa`, `ab`, ... that decode by joining."""
    letters = "abcdefghij"
    words = ["<unk>", "<s>", "</s>", *(a + b for a in letters for b in letters)][:VOCABULARY]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
