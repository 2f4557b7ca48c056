"""From rewards to a batch that the objective takes: group advantages, masks, dropped rollouts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gspo.config import Config
from gspo.objectives import group_advantages, token_advantages, turn_advantages
from gspo.types import Batch, Rollout


def make_batch(groups: Sequence[Sequence[Rollout]], config: Config) -> Batch:
    """Credits the kept rollouts of a step (paper, eq. 6); a dropped one counts as if it had not been sampled.

    `groups` are the step's P groups in order; group p has id p in the result even where rollouts are missing,
    so that mini-batches are cut before anything is dropped.
    """
    placed = [(p, r) for p, group in enumerate(groups) for r in group if r.dropped is None]
    rollouts = [rollout for _, rollout in placed]
    group_ids = torch.tensor([p for p, _ in placed], dtype=torch.long)
    mask = _pad([r.trainable for r in rollouts], torch.bool)
    if config.reward.truncated == "mask":
        mask &= ~torch.tensor([r.truncated for r in rollouts], dtype=torch.bool)[:, None]
    return Batch(
        rollouts=rollouts,
        group_ids=group_ids,
        rewards=torch.tensor([credited_reward(r, config) for r in rollouts], dtype=torch.float32),
        advantages=advantages(rollouts, group_ids, config),
        mask=mask,
        sampler_logprobs=_pad([r.sampler_logprobs for r in rollouts], torch.float32),
        spans=_turns(rollouts) if config.objective.ratio_span == "turn" else None,
    )


def advantages(rollouts: Sequence[Rollout], group_ids: Tensor, config: Config) -> Tensor:
    """Advantages as `objective.credit` says: [B] for credit per response, else [B, T]."""
    objective = config.objective
    if objective.credit == "turn":
        return turn_advantages(
            _pad([_turn_rewards(r, config) for r in rollouts], torch.float64),
            group_ids,
            _turns(rollouts),
            scale=objective.advantage_scale,
            discount=objective.discount,
        )
    if objective.credit == "token":
        return token_advantages(
            _pad([_token_rewards(r, config) for r in rollouts], torch.float64),
            group_ids,
            _pad([r.trainable for r in rollouts], torch.bool),
            scale=objective.advantage_scale,
        )
    rewards = torch.tensor([credited_reward(r, config) for r in rollouts], dtype=torch.float32)
    return group_advantages(rewards, group_ids, scale=objective.advantage_scale)


def credited_reward(rollout: Rollout, config: Config) -> float:
    """A kept rollout's reward, less the penalty of a truncated response where the config asks for one."""
    assert rollout.reward is not None, "a rollout without a reward has been dropped"
    return rollout.reward - _penalty(rollout, config)


def has_signal(group: Sequence[Rollout], config: Config) -> bool:
    """Whether a group's kept rewards differ, so that it has non-zero advantages."""
    kept = [r for r in group if r.dropped is None]
    return bool((advantages(kept, torch.zeros(len(kept), dtype=torch.long), config) != 0).any())


def _penalty(rollout: Rollout, config: Config) -> float:
    penalized = rollout.truncated and config.reward.truncated == "penalize"
    return config.reward.truncated_penalty if penalized else 0.0


def _turn_rewards(rollout: Rollout, config: Config) -> list[float]:
    """A conversation's rewards by turn; it is the last turn that was truncated."""
    assert rollout.turn_rewards, "a conversation without a turn has been dropped"
    return [*rollout.turn_rewards[:-1], rollout.turn_rewards[-1] - _penalty(rollout, config)]


def _token_rewards(rollout: Rollout, config: Config) -> list[float]:
    """What was said of each token; where nothing was, that of the response counts for all of them."""
    if rollout.token_rewards is None:
        return [credited_reward(rollout, config)] * len(rollout.response_ids)
    return [reward - _penalty(rollout, config) for reward in rollout.token_rewards]


def _turns(rollouts: Sequence[Rollout]) -> Tensor:
    """The turn of each response token; negative for an environment's, and for padding."""
    return _pad([[turn + 1 for turn in r.turns or ()] for r in rollouts], torch.long) - 1


def _pad(rows: Sequence[Sequence[float] | Sequence[int] | Sequence[bool]], dtype: torch.dtype) -> Tensor:
    width = max((len(row) for row in rows), default=0)
    padded = torch.zeros(len(rows), width, dtype=dtype)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row, dtype=dtype)
    return padded
