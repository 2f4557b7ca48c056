"""A model that vLLM serves in seconds, and its float32 forward pass as the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from gspo.types import Prompt, Request, Rollout
from tests.rollout.families import tiny_model, tiny_tokenizer

# Longer than a block of the CPU backend's key-value cache, so that prefixes are really shared.
LONG = tuple(3 + (7 * i + i * i) % 95 for i in range(300))


@dataclass
class Policy:
    """A tiny model, and the folder from which an engine starts."""

    model: Any
    tokenizer: PreTrainedTokenizerFast
    folder: Path

    def tensors(self) -> list[tuple[str, Tensor]]:
        return [(name, tensor) for name, tensor in self.model.state_dict().items() if name != "lm_head.weight"]

    @torch.no_grad()
    def logits(self, rollout: Rollout) -> Tensor:
        """float32 logits [T, V] from which the response's tokens were drawn."""
        ids = torch.tensor([rollout.prompt.ids + rollout.response_ids])
        first = len(rollout.prompt.ids) - 1
        logits: Tensor = self.model(ids).logits[0, first:-1]
        return logits

    def logprobs(self, rollout: Rollout, temperature: float = 1.0) -> Tensor:
        chosen = torch.tensor(rollout.response_ids)[:, None]
        return (self.logits(rollout) / temperature).log_softmax(-1).gather(-1, chosen)[:, 0]

    @torch.no_grad()
    def change(self, seed: int) -> None:
        """As an update does, but far: every next-token distribution is another."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def policy(folder: Path) -> Policy:
    return Policy(make_model(), tiny_tokenizer(), folder)


def make_model() -> Any:
    """Head size 32 is the smallest that the CPU backend has."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    return tiny_model("llama", max_position_embeddings=512, tie_word_embeddings=True, **sizes).eval()


def requests(samples: int = 4, step: int = 0) -> list[Request]:
    """Four prompts of unlike lengths."""
    prompts = [Prompt(str(n), "", LONG[:n]) for n in (1, 5, 140, 300)]
    return [Request(prompt, samples=samples, step=step, slot=slot) for slot, prompt in enumerate(prompts)]


def assert_agree(rollouts: Sequence[Rollout], policy: Policy, temperature: float = 1.0) -> None:
    """The engine's log-probs are those of the float32 forward pass, up to the rounding of logits in the tens."""
    assert all(rollout.dropped is None for rollout in rollouts)
    for rollout in rollouts:
        sampled = torch.tensor(rollout.sampler_logprobs)
        torch.testing.assert_close(sampled, policy.logprobs(rollout, temperature), atol=1e-3, rtol=0)
