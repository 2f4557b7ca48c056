"""Importance weights from the sampler to the old policy, for when the two engines disagree.

Responses were drawn from the sampler; the losses correct from `old` to `current`. These weights correct the
rest, old / sampler, and are applied by multiplying the advantages: min(r w A, clip(r) w A) = w min(r A, clip(r) A)
for w >= 0. Weights by sequence fit every loss, weights by token those that take advantages [B, T].

A rejected unit (weight 0) keeps its place in the loss's denominators, as a masked response does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gspo.objectives.clipping import ratio_of
from gspo.objectives.ratios import sequence_log_ratio, token_log_ratio

Level = Literal["token", "sequence"]


@dataclass(frozen=True)
class Correction:
    """`weights` [B, T] or [B], constants; 0 where there is no trainable token.

    `changed` of `units` (tokens or sequences) were cut or rejected.
    """

    weights: Float[Tensor, "B T"] | Float[Tensor, "B"]
    changed: Int[Tensor, ""]
    units: Int[Tensor, ""]


def truncated_importance_weights(
    old_logprobs: Float[Tensor, "B T"],
    sampler_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    level: Level = "token",
    high: float = 2.0,
) -> Correction:
    """min(old / sampler, high), by token or by length-normalised sequence: bounded variance, a small bias.

    The sequence ratio is the geometric mean of the token ratios: their plain product falls below or rises above
    any bound as a response gets longer, so that it would end up dropping every long response.
    Source: Ionides, "Truncated Importance Sampling" (2008); Yao et al. (2025) for engine mismatch, with C = 2.
    """
    _check_bounds(0.0, high)
    weights, units = _weights(old_logprobs, sampler_logprobs, mask, level)
    return Correction(weights.clamp(max=high), (units & (weights > high)).sum(), units.sum())


def masked_importance_weights(
    old_logprobs: Float[Tensor, "B T"],
    sampler_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    level: Level = "token",
    low: float = 0.5,
    high: float = 2.0,
) -> Correction:
    """old / sampler inside [low, high], 0 outside: what the engines disagree on most is not learnt from.

    Source: masked importance sampling, Liu et al., "When Speed Kills Stability" (2025); by token also known as
    IcePop, with 0.5 and 5.
    """
    _check_bounds(low, high)
    weights, units = _weights(old_logprobs, sampler_logprobs, mask, level)
    rejected = units & ((weights < low) | (weights > high))
    return Correction(torch.where(rejected, 0.0, weights), rejected.sum(), units.sum())


def _weights(old: Tensor, sampler: Tensor, mask: Tensor, level: Level) -> tuple[Tensor, Tensor]:
    if level == "token":
        log_ratio, units = token_log_ratio(old.detach(), sampler, mask), mask
    elif level == "sequence":
        log_ratio, units = sequence_log_ratio(old.detach(), sampler, mask), mask.any(1)
    else:
        raise ValueError(f'level = "{level}": must be "token" or "sequence"')
    return torch.where(units, ratio_of(log_ratio), 0.0), units


def _check_bounds(low: float, high: float) -> None:
    if not 0 <= low < 1 < high:
        raise ValueError(f"low = {low}, high = {high}: the ratio 1 must lie inside, 0 <= low < 1 < high")
