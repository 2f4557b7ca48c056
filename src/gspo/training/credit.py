"""From rewards to a batch that the objective takes: group advantages, masks, dropped rollouts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gspo.config import Config
from gspo.objectives import group_advantages
from gspo.types import Batch, Rollout


def make_batch(groups: Sequence[Sequence[Rollout]], config: Config) -> Batch:
    """Credits the kept rollouts of a step (paper, eq. 6); a dropped one counts as if it had not been sampled.

    `groups` are the step's P groups in order; group p has id p in the result even where rollouts are missing,
    so that mini-batches are cut before anything is dropped.
    """
    placed = [(p, r) for p, group in enumerate(groups) for r in group if r.dropped is None]
    rollouts = [rollout for _, rollout in placed]
    group_ids = torch.tensor([p for p, _ in placed], dtype=torch.long)
    rewards = torch.tensor([credited_reward(r, config) for r in rollouts], dtype=torch.float32)
    mask = _pad([r.trainable for r in rollouts], torch.bool)
    if config.reward.truncated == "mask":
        mask &= ~torch.tensor([r.truncated for r in rollouts], dtype=torch.bool)[:, None]
    return Batch(
        rollouts=rollouts,
        group_ids=group_ids,
        rewards=rewards,
        advantages=group_advantages(rewards, group_ids, scale=config.objective.advantage_scale),
        mask=mask,
        sampler_logprobs=_pad([r.sampler_logprobs for r in rollouts], torch.float32),
    )


def credited_reward(rollout: Rollout, config: Config) -> float:
    """A kept rollout's reward, less the penalty of a truncated response where the config asks for one."""
    assert rollout.reward is not None, "a rollout without a reward has been dropped"
    if rollout.truncated and config.reward.truncated == "penalize":
        return rollout.reward - config.reward.truncated_penalty
    return rollout.reward


def has_signal(group: Sequence[Rollout], config: Config) -> bool:
    """Whether a group's kept rewards differ, so that it has non-zero advantages."""
    rewards = [credited_reward(r, config) for r in group if r.dropped is None]
    return bool(rewards) and min(rewards) < max(rewards)


def _pad(rows: Sequence[Sequence[float] | Sequence[bool]], dtype: torch.dtype) -> Tensor:
    width = max((len(row) for row in rows), default=0)
    padded = torch.zeros(len(rows), width, dtype=dtype)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row, dtype=dtype)
    return padded
