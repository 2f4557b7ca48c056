"""What the update benchmarks measure on: models, rollouts, and the arithmetic that an update of them needs."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo.policy.layout import build_layout
from gspo.types import Prompt, Rollout, VersionSpan

FIRST_ID = 5
"""Ids below are left to special tokens."""


@dataclass(frozen=True, slots=True)
class Case:
    """The rollouts of one update: `prompts` x `group_size` responses of up to `response_max` tokens."""

    prompts: int
    prompt_length: int
    group_size: int
    response_max: int

    @property
    def rows(self) -> int:
        return self.prompts * self.group_size

    def response_lengths(self) -> list[int]:
        """From an eighth of the longest to the longest, evenly, in random order."""
        lengths = torch.linspace(max(2, self.response_max // 8), self.response_max, self.rows).long()
        order = torch.randperm(self.rows, generator=torch.Generator().manual_seed(0))
        return [int(n) for n in lengths[order]]


def make_groups(case: Case, vocabulary: int) -> list[list[Rollout]]:
    """The case's groups: random ids, random rewards, the same for everyone who asks."""
    generator = torch.Generator().manual_seed(1)
    lengths = iter(case.response_lengths())

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(FIRST_ID, vocabulary, (count,), generator=generator).tolist())

    groups = []
    for slot in range(case.prompts):
        prompt = Prompt(str(slot), "", draw(case.prompt_length))
        groups.append([_rollout(prompt, slot, i, draw(next(lengths)), generator) for i in range(case.group_size)])
    return groups


def _rollout(prompt: Prompt, slot: int, sample: int, ids: tuple[int, ...], generator: torch.Generator) -> Rollout:
    return Rollout(
        prompt=prompt,
        slot=slot,
        sample=sample,
        response_ids=ids,
        sampler_logprobs=(0.0,) * len(ids),
        trainable=(True,) * len(ids),
        finish_reason="stop",
        policy_version=(VersionSpan(0, 0),),
        text="",
        reward=float(torch.randn((), generator=generator)),
    )


def with_old(groups: list[list[Rollout]], current: Tensor) -> list[list[Rollout]]:
    """The groups with old log-probs: `current` [B, T] plus noise of 0.05 per token, so that ratios differ from 1.

    They go where the sampler's belong, which is where the update takes them from.
    """
    noisy = current + 0.05 * torch.randn(current.shape, generator=torch.Generator().manual_seed(2))
    rows = iter(noisy.tolist())
    return [[replace(r, sampler_logprobs=tuple(next(rows)[: len(r.response_ids)])) for r in g] for g in groups]


SMALL_QWEN3: dict[str, dict[str, Any]] = {
    # The vocabulary and width of Qwen3-0.6B under four of its 28 layers: the head dominates.
    "qwen3-0.6b-head": {"num_hidden_layers": 4},
    "tiny": {
        "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 199, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
}  # fmt: skip
QWEN3: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {},
    "qwen3-1.7b": {"hidden_size": 2048, "intermediate_size": 6144},
    "qwen3-4b": {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
    },
}  # fmt: skip
_BASE = {
    "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 40_960, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1,
}  # fmt: skip


def model_folder(name: str, scratch: Path) -> Path:
    """A `from_pretrained` folder: `smollm2`, a Qwen3 shape with random weights made in `scratch`, or a path."""
    if name == "smollm2":
        from gspo.policy.smollm2 import prepare

        return prepare()
    shapes = SMALL_QWEN3 | QWEN3
    if name not in shapes:
        return Path(name)
    folder = scratch / name
    if not folder.exists():
        _save_random(folder, _BASE | shapes[name])
    return folder


def _save_random(folder: Path, sizes: dict[str, Any]) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**sizes)).save_pretrained(folder)
    words = Tokenizer(WordLevel({"<eos>": 0, "<pad>": 1}, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)


def model_flops(model: Any, rollouts: list[Rollout]) -> float:
    """Floating-point operations that an update needs: each prompt once, logits of response tokens alone.

    Forward and backward are three products of each matrix, two operations a multiply-add. The head's second product
    (logits made again in the backward pass) and padding are costs, not needs.
    """
    config = model.config.get_text_config()
    layout = build_layout(rollouts, "shared")
    embeddings = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    layers = sum(p.numel() for p in model.parameters() if p.ndim >= 2 and id(p) not in embeddings)
    head = model.get_output_embeddings().weight.numel()
    width = config.num_attention_heads * (getattr(config, "head_dim", None) or 0)
    width = width or config.hidden_size
    pairs = 0
    for piece in layout.pieces:
        lengths = [span.length for _, span in piece.responses]
        pairs += sum(n * (n + 1) // 2 for n in (piece.prompt.length, *lengths)) + piece.prompt.length * sum(lengths)
    attention = 2 * width * pairs * config.num_hidden_layers
    return 6.0 * (layers * layout.fed_tokens + head * len(layout.source) + attention)


def matrix_rate(device: str, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a large matrix product here; the best of several."""
    size = 8192 if device.startswith("cuda") else 1536
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        start = now(device)
        a @ b
        best = min(best, now(device) - start)
    return 2.0 * size**3 / best


def now(device: str) -> float:
    """Seconds, with all work queued on the device done."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()
