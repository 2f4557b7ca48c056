"""What a metric is, and the list of all of them: `docs/metrics.md` is made from `METRICS`."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Ratio:
    """A sum over its denominator, so that adding two of them is exact where averaging averages is not.

    >>> (Ratio(3.0, 4) + Ratio(1.0, 12)).value
    0.25
    >>> Ratio(0.0, 0).value is None
    True
    """

    sum: float | int
    count: float | int

    def __add__(self, other: Ratio) -> Ratio:
        return Ratio(self.sum + other.sum, self.count + other.count)

    @property
    def value(self) -> float | None:
        """The quotient; None where there was nothing to count."""
        return self.sum / self.count if self.count else None


Metric = Ratio | float | int
"""A `Ratio`, or a plain number where no denominator makes sense (an extreme, a learning rate)."""

METRICS: Mapping[str, str] = {
    "reward/mean": "Reward, mean over kept rollouts.",
    "reward/min": "Smallest reward of a kept rollout.",
    "reward/max": "Largest reward of a kept rollout.",
    "reward/group_std": "Standard deviation (over G) of the rewards inside a group, mean over groups.",
    "reward/accuracy": "Kept rollouts whose reward reaches `reward.correct_at`, over kept rollouts.",
    "reward/function/<name>": "Reward of one function before its weight, mean over the rollouts that it applies to.",
    "reward/dropped": "Rollouts that could not be sampled or scored, over all rollouts.",
    "group/without_signal": "Groups whose rewards are all equal, so that their advantages are 0, over groups.",
    "group/resampled": "Groups that dynamic sampling replaced in this step.",
    "response/length": "Trainable tokens, mean over kept rollouts.",
    "response/length_max": "Trainable tokens of the longest kept rollout.",
    "response/truncated": "Rollouts cut at `rollout.max_tokens`, over kept rollouts.",
    "rollout/updates_behind": "Optimizer updates from the weights that drew a rollout's first token to those from "
    "which the step starts, mean over kept rollouts; above 0 with `rollout.lag` alone.",
    "rollout/updates_behind_max": "The largest such number of a kept rollout.",
    "conversation/turns": "Turns of the policy, mean over the kept rollouts of a multi-turn task.",
    "conversation/turn_reward/<n>": "Reward of turn n (from 0), mean over the kept rollouts that reached it.",
    "support/size": "Tokens that top-p, top-k and min-p kept, mean over the trainable tokens of kept rollouts; under "
    "truncated sampling.",
    "support/size_max": "Most tokens that were kept for one.",
    "support/single": "Trainable tokens for which one alone was kept, so that they have log-prob 0 and teach nothing, "
    "over trainable tokens.",
    "support/unusable": "Rollouts dropped because what the engine said it kept does not fit them, over all rollouts.",
    "policy/entropy": "Entropy of the policy in the updates' forward passes, in nats, mean over trainable tokens "
    "(under truncated sampling that of the distribution over what was kept).",
    "policy/kl": "KL to the reference policy (k3 estimate), mean over trainable tokens (under truncated sampling both "
    "over what was kept); with `objective.kl_weight`.",
    "mismatch/token": "|sampler - training engine| log-prob before the update, in nats, mean over trainable tokens.",
    "mismatch/token_max": "Largest |sampler - training engine| log-prob of a trainable token.",
    "mismatch/sequence": "|mean of a response's sampler - training engine log-probs|, mean over rollouts.",
    "mismatch/not_finite": "Rollouts dropped because the engine returned a log-prob that is not finite, over all "
    "rollouts.",
    "correction/weight": "old / sampler after it was cut or rejected, mean over responses (tokens) as "
    "`likelihoods.correction_level` says; the figures under `mismatch/` are those before.",
    "correction/changed": "Responses (tokens) whose weight was cut or rejected, over responses (tokens).",
    "objective/loss": "Loss, mean over the updates of the step.",
    "ratio/log_mean": "Length-normalised sequence log-ratio current / old, in nats, mean over sequences.",
    "ratio/log_{min,p01,p50,p99,max}": "Extremes and quantiles of the objective's log-ratios over its units "
    "(sequences, spans or tokens), all updates of the step.",
    "ratio/saturated": "Units whose log-ratio was clamped at +-20 nats, over units.",
    "clip/{sequence,token}_outside": "Sequences (spans, where credit is per span; tokens) whose ratio lies outside "
    "the clip range, over sequences (tokens), all updates of the step.",
    "clip/{sequence,token}_removed": "Sequences (tokens) whose gradient the clip removed, over sequences (tokens). A "
    "sequence counts when all of its tokens do.",
    "clip/{sequence,token}_{outside,removed}_{low,high}": "The part of it on one side of the range.",
    "clip/{sequence,token}_{outside,removed}_{low,high}_{negative,zero,positive,mixed}": "The part of that with one "
    "sign of the advantage (`mixed`: a sequence whose tokens differ); the parts add up to the whole.",
    "routing/agreement": "Experts that replay forced and the router of the moment would have chosen too, over those "
    "forced, mean over layers and the forward passes of the updates; with `routing.replay`.",
    "routing/agreement_min": "The smallest such share of a layer in one forward pass.",
    "routing/load_balancing": "Auxiliary load-balancing loss before its weight, mean over updates (K where experts are "
    "used alike); with `routing.load_balancing_weight`.",
    "routing/changed_{first,last}": "Experts that a router, left to itself, no longer chooses after the step's first "
    "(last) update, over those it chose under the old policy (1 - |A and B| / K, sets). This and all below: of the "
    "last mini-batch's trainable tokens, in steps that `routing.figures_every` names.",
    "routing/changed_{first,last}/<layer>": "The same in one layer.",
    "routing/{token,sequence}_log_ratio_std_{native,replayed}_{first,last}": "Standard deviation of the token "
    "(length-normalised sequence) log-ratios after the step's first (last) update / old, in nats, with the routers "
    "left to themselves and with the old policy's experts forced, whichever the updates used.",
    "routing/entropy": "Entropy of the softmax of the router logits under the old policy, in nats, mean over tokens "
    "and layers.",
    "routing/entropy/<layer>": "The same in one layer.",
    "routing/load_max/<layer>": "Choices of the busiest expert over the mean of all experts, under the old policy (1 "
    "where experts are used alike).",
    "routing/unused": "Experts that no token chose under the old policy, over all experts of all layers.",
    "optimizer/gradient_norm": "Norm of the gradient before it is clipped, mean over the updates of the step.",
    "optimizer/learning_rate": "Learning rate of the step's last update.",
    "optimizer/updates": "Updates made in the step.",
    "optimizer/non_finite": "Updates that were not made because their gradient was not finite.",
    "optimizer/skipped": "Mini-batches skipped: no advantage differs from 0, or a correction masked all that do.",
    "evaluation/accuracy": "Correct responses over all, mean over held-out prompts (pass@1).",
    "evaluation/pass_at_<k>": "Chance that one of k responses is correct, unbiased estimate, mean over prompts.",
    "evaluation/truncated": "Responses cut at `rollout.max_tokens`, over scored responses of the evaluation.",
    "evaluation/length": "Response tokens, mean over scored responses of the evaluation.",
}
"""Name -> definition. `{a,b}` stands for one metric each, `<name>` for any value."""


def expand(pattern: str) -> list[str]:
    """The names that a key of `METRICS` stands for, `<name>` left as it is.

    >>> expand("clip/{low,high}")
    ['clip/low', 'clip/high']
    """
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    return ["".join(choice) for choice in itertools.product(*parts)]


_FIXED = frozenset(name for pattern in METRICS for name in expand(pattern) if "<" not in name)
_OPEN = tuple(
    re.compile(re.sub("<[^>]*>", "[^/]+", re.escape(name)))
    for pattern in METRICS
    for name in expand(pattern)
    if "<" in name
)


def documented(name: str) -> bool:
    """Whether `METRICS` defines the name."""
    return name in _FIXED or any(pattern.fullmatch(name) for pattern in _OPEN)


def as_record(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """Metrics as JSON: each value under its name, sums and denominators under `sums`.

    What is not a finite number is null; where it came of a sum, `sums` says which (`"nan"`, `"inf"`).

    >>> as_record({"reward/mean": Ratio(1.0, 4), "optimizer/learning_rate": 1e-6})
    {'reward/mean': 0.25, 'optimizer/learning_rate': 1e-06, 'sums': {'reward/mean': [1.0, 4]}}
    """
    unknown = [name for name in metrics if not documented(name)]
    if unknown:
        raise ValueError(f"metrics without a definition in METRICS: {', '.join(unknown)}")
    record: dict[str, Any] = {name: _number(value_of(metric)) for name, metric in metrics.items()}
    record["sums"] = {
        name: [_sum(metric.sum), metric.count] for name, metric in metrics.items() if isinstance(metric, Ratio)
    }
    return record


def from_record(record: Mapping[str, Any]) -> dict[str, Metric]:
    """The metrics that `as_record` wrote, so that records of several steps or processes can be added.

    Plain numbers that were not finite are left out.
    """
    sums = record["sums"]
    found: dict[str, Metric] = {}
    for name, value in record.items():
        if not documented(name):
            continue
        if name in sums:
            total, count = sums[name]
            found[name] = Ratio(float(total), count)
        elif value is not None:
            found[name] = value
    return found


def value_of(metric: Metric) -> float | int | None:
    """The number to show for a metric, None where it has none."""
    return metric.value if isinstance(metric, Ratio) else metric


def _number(value: float | int | None) -> float | int | None:
    return value if value is not None and math.isfinite(value) else None


def _sum(value: float | int) -> float | int | str:
    return value if math.isfinite(value) else str(value)
