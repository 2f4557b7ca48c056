"""Tiny random models of many families, rollouts for them, and the slow, plain way to score a rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from gspo.types import Prompt, Rollout, VersionSpan

VOCABULARY = 61

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma2": (
        "Gemma2Config",
        {
            "sliding_window": 6, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0,
            "attn_logit_softcapping": 1.5, "attn_implementation": "eager",
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": 6, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "mistral": ("MistralConfig", {"sliding_window": 5}),
    "phi": ("PhiConfig", {}),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "granite": ("GraniteConfig", {"logits_scaling": 3.0, "residual_multiplier": 0.7}),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "cohere2": ("Cohere2Config", {"logit_scale": 0.25, "sliding_window": 6}),
    "gpt2": ("GPT2Config", {}),
    "olmo2": ("Olmo2Config", {}),
    "gpt_oss": ("GptOssConfig", {"sliding_window": 6, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1,
            "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
            "first_k_dense_replace": 1, "num_key_value_heads": 4,
        },
    ),
    "qwen3_moe": ("Qwen3MoeConfig", {**MOE, "norm_topk_prob": True}),
}  # fmt: skip


# Layers that carry a state along the row: never packed, always exact when padded.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "mamba2": ("Mamba2Config", {"state_size": 8, "num_heads": 8, "n_groups": 2, "chunk_size": 4}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **MOE, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
            "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
            "shared_expert_intermediate_size": 16,
        },
    ),
}  # fmt: skip


def tiny_model(family: str, *, seed: int = 0, scale: float = 4.0) -> Any:
    """A float32 model with weights large enough that its distributions are far from uniform."""
    name, extra = {**FAMILIES, **HYBRIDS}[family]
    sizes = SIZES
    if family == "gpt2":
        sizes = {
            "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128,
            "eos_token_id": 1, "bos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        }  # fmt: skip
    config = getattr(transformers, name)(**{**sizes, **extra})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.mul_(scale)
                else:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def save_tiny(folder: Path, family: str = "llama", **options: Any) -> Path:
    """A folder as `save_pretrained` leaves it, with a word-level tokenizer."""
    model = tiny_model(family, **options)
    model.save_pretrained(folder)
    words = {"<pad>": 0, "</s>": 1, "<s>": 2} | {f"w{n}": n for n in range(3, VOCABULARY)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="</s>"
    )
    tokenizer.save_pretrained(folder)
    return folder


def make_rollout(
    slot: int,
    sample: int,
    prompt: tuple[int, ...],
    response: tuple[int, ...],
    trainable: tuple[bool, ...] | None = None,
) -> Rollout:
    return Rollout(
        prompt=Prompt(str(slot), "", prompt),
        slot=slot,
        sample=sample,
        response_ids=response,
        sampler_logprobs=(0.0,) * len(response),
        trainable=trainable or (True,) * len(response),
        finish_reason="stop",
        policy_version=(VersionSpan(0, 0),),
        text="",
    )


def random_rollouts(groups: list[tuple[int, tuple[int, ...]]] | None = None, *, seed: int = 0) -> list[Rollout]:
    """Rollouts of random ids; a group is (prompt length, response lengths). One has untrainable tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, VOCABULARY, (count,), generator=generator).tolist())

    rollouts = []
    for slot, (prompt_length, lengths) in enumerate(groups or [(9, (6, 1, 10, 0)), (3, (4, 12)), (12, (2, 5))]):
        prompt = draw(prompt_length)
        for sample, length in enumerate(lengths):
            trainable = tuple(not (sample == 0 and t in (1, 2)) for t in range(length))
            rollouts.append(make_rollout(slot, sample, prompt, draw(length), trainable))
    return rollouts


def plain_logprobs(model: Any, rollout: Rollout, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of every response token from the logits of this one sequence alone."""
    ids = torch.tensor([[*rollout.prompt.ids, *rollout.response_ids]])
    logits = model(input_ids=ids, use_cache=False).logits[0].float() / temperature
    logs = torch.log_softmax(logits, -1)[len(rollout.prompt.ids) - 1 : -1]
    targets = torch.tensor(rollout.response_ids, dtype=torch.long)
    return logs.gather(1, targets[:, None]).squeeze(1), -(logs.exp() * logs).sum(-1)


def plain_scores(model: Any, rollouts: list[Rollout], temperature: float) -> tuple[Tensor, Tensor]:
    """[B, T] log-probs and entropies of trainable tokens, one forward per rollout; 0 elsewhere."""
    columns = max(len(r.response_ids) for r in rollouts)
    rows = [[torch.zeros(columns), torch.zeros(columns)] for _ in rollouts]
    for row, rollout in zip(rows, rollouts, strict=True):
        if not rollout.response_ids:
            continue
        mask = torch.tensor(rollout.trainable)
        pad = (0, columns - len(mask))
        for n, values in enumerate(plain_logprobs(model, rollout, temperature)):
            row[n] = torch.nn.functional.pad(values * mask, pad)
    return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])


def gradients(model: Any) -> dict[str, Tensor]:
    """The gradients that a backward left, taken away from the model."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of any gradient, relative to that tensor's largest value.

    A tensor whose gradient is under a thousandth of the model's largest is what is left of much larger terms, and is
    measured against that thousandth.
    """
    assert found.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    return max(
        float((found[name] - g).abs().max()) / max(float(g.abs().max()), 1e-3 * largest) for name, g in expected.items()
    )


def cut_routes(layout: Any, flat: Any) -> list[Any]:
    """The inverse of `place_routes`: for each rollout the rows of its fed tokens, from [N, K] of all."""
    routes = [flat[:0]] * layout.rows
    for piece in layout.pieces:
        prompt = flat[piece.prompt.start : piece.prompt.stop]
        for index, span in piece.responses:
            routes[index] = np.concatenate([prompt, flat[span.start : span.stop]])
    return routes
