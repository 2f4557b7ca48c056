"""Rollouts of random ids, to try on a model or a kernel what must hold for any."""

from __future__ import annotations

import torch

from gspo.types import Prompt, Rollout, VersionSpan


def trial_rollouts(groups: list[tuple[int, tuple[int, ...]]], vocabulary: int) -> list[Rollout]:
    """A group is (tokens of its prompt, tokens of each response); always the same ids."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, vocabulary, (count,), generator=generator).tolist())

    rollouts = []
    for slot, (prompt_length, lengths) in enumerate(groups):
        prompt = Prompt(str(slot), "", draw(prompt_length))
        for sample, length in enumerate(lengths):
            rollouts.append(
                Rollout(
                    prompt=prompt,
                    slot=slot,
                    sample=sample,
                    response_ids=draw(length),
                    sampler_logprobs=(0.0,) * length,
                    trainable=(True,) * length,
                    finish_reason="stop",
                    policy_version=(VersionSpan(0, 0),),
                    text="",
                )
            )
    return rollouts
