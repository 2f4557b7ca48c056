"""What the sampled rollouts of a step say, as sums with their denominators."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gspo.config import Config
from gspo.reporting.metrics import Metric, Ratio
from gspo.rollout.engine import NOT_FINITE, UNUSABLE_SUPPORT
from gspo.training.collect import Collected
from gspo.training.credit import has_signal
from gspo.types import Rollout


def rollout_metrics(collected: Collected, config: Config) -> dict[str, Metric]:
    """Figures over every rollout that was sampled, those of replaced groups included.

    Rewards are the reward functions' own, without the penalty of truncated responses.
    """
    groups = collected.groups + collected.replaced
    sampled = collected.sampled
    kept = [rollout for rollout in sampled if rollout.dropped is None]
    rewards = [rollout.reward for rollout in kept if rollout.reward is not None]
    lengths = [sum(rollout.trainable) for rollout in kept]
    metrics: dict[str, Metric] = {
        "reward/mean": Ratio(sum(rewards), len(rewards)),
        "reward/group_std": _group_std(groups),
        "reward/accuracy": Ratio(sum(reward >= config.reward.correct_at for reward in rewards), len(rewards)),
        "reward/dropped": Ratio(len(sampled) - len(kept), len(sampled)),
        "mismatch/not_finite": Ratio(sum((r.dropped or "").startswith(NOT_FINITE) for r in sampled), len(sampled)),
        "group/without_signal": Ratio(sum(not has_signal(group, config) for group in groups), len(groups)),
        "group/resampled": len(collected.replaced),
        "response/length": Ratio(sum(lengths), len(lengths)),
        "response/truncated": Ratio(sum(rollout.truncated for rollout in kept), len(kept)),
    }
    behind = [rollout.updates_behind for rollout in kept]
    metrics["rollout/updates_behind"] = Ratio(sum(behind), len(behind))
    if kept:
        metrics |= {
            "rollout/updates_behind_max": max(behind),
            "reward/min": min(rewards),
            "reward/max": max(rewards),
            "response/length_max": max(lengths),
        }
    if config.rollout.truncated:
        metrics |= _support_metrics(sampled, kept)
    metrics |= _turn_metrics([rollout.turn_rewards for rollout in kept if rollout.turn_rewards is not None])
    for name in sorted({name for rollout in kept for name in rollout.rewards}):
        values = [value for rollout in kept if (value := rollout.rewards.get(name)) is not None]
        metrics[f"reward/function/{name}"] = Ratio(sum(values), len(values))
    return metrics


def _support_metrics(sampled: Sequence[Rollout], kept: Sequence[Rollout]) -> dict[str, Metric]:
    """How much truncated sampling left to choose from."""
    unusable = sum((rollout.dropped or "").startswith(UNUSABLE_SUPPORT) for rollout in sampled)
    counts = [r.support.counts[np.asarray(r.trainable, bool)] for r in kept if r.support is not None]
    sizes = np.concatenate([np.zeros(0, np.int64), *counts])
    metrics: dict[str, Metric] = {
        "support/size": Ratio(int(sizes.sum()), len(sizes)),
        "support/single": Ratio(int((sizes == 1).sum()), len(sizes)),
        "support/unusable": Ratio(unusable, len(sampled)),
    }
    return metrics | ({"support/size_max": int(sizes.max())} if len(sizes) else {})


def _turn_metrics(rewards: Sequence[Sequence[float]]) -> dict[str, Metric]:
    """Figures of conversations, from the rewards of each one's turns."""
    if not rewards:
        return {}
    longest = max(map(len, rewards))
    by_turn = [[of_one[turn] for of_one in rewards if turn < len(of_one)] for turn in range(longest)]
    return {
        "conversation/turns": Ratio(sum(map(len, rewards)), len(rewards)),
        **{f"conversation/turn_reward/{n}": Ratio(sum(values), len(values)) for n, values in enumerate(by_turn)},
    }


def _group_std(groups: Sequence[Sequence[Rollout]]) -> Ratio:
    rewards = [[r.reward for r in group if r.dropped is None and r.reward is not None] for group in groups]
    deviations = [float(np.std(group)) for group in rewards if group]
    return Ratio(sum(deviations), len(deviations))
