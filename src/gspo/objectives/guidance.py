"""A clip range from measured noise, and the warning that a given one lies below it.

At equal weights every ratio would be 1 if the two engines agreed. What they measure instead is noise, and a clip
range narrower than the noise clips at random. The model of the noise and its derivation are in
docs/clip_range.md. These functions are for diagnosis: they wait for the device and compute on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gspo.objectives.ratios import row_mean, token_log_ratio


@dataclass(frozen=True)
class EngineNoise:
    """Noise of token log-ratios at equal weights, in nats: d_it = bias + u_i + e_it.

    `bias` is common to all responses; `response_std` is the deviation of u_i, the part that a whole response
    shares and that no length averages out; `token_std` that of e_it, independent from token to token.
    """

    bias: float
    response_std: float
    token_std: float

    def std_of_mean(self, length: int) -> float:
        """Deviation of log s over responses of `length` tokens, in nats."""
        return math.sqrt(self.response_std**2 + self.token_std**2 / length)


class ClipRange(NamedTuple):
    """Ratios in [1 - clip_low, 1 + clip_high] are left alone."""

    clip_low: float
    clip_high: float


@dataclass(frozen=True)
class EngineDifferences:
    """What is needed of the token log-ratios of some responses, in float64; `a + b` is that of both together.

    Per response: trainable tokens, mean log-ratio, and the sum of squared deviations from that mean.
    """

    lengths: Int[Tensor, "B"]
    means: Float[Tensor, "B"]
    squares: Float[Tensor, "B"]

    def __add__(self, other: EngineDifferences) -> EngineDifferences:
        return EngineDifferences(
            torch.cat([self.lengths, other.lengths]),
            torch.cat([self.means, other.means]),
            torch.cat([self.squares, other.squares]),
        )

    def trainable(self) -> EngineDifferences:
        """The responses that have a trainable token, on the host."""
        lengths, means, squares = self.lengths.cpu(), self.means.cpu(), self.squares.cpu()
        return EngineDifferences(lengths[lengths > 0], means[lengths > 0], squares[lengths > 0])


def engine_differences(
    logprobs: Float[Tensor, "B T"], old_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> EngineDifferences:
    """Differences between two log-probs of the same tokens at the same weights; does not wait for the device."""
    delta = token_log_ratio(logprobs.detach().double(), old_logprobs.double(), mask)
    means = row_mean(delta, mask)
    deviations = torch.where(mask, delta - means[:, None], 0)
    return EngineDifferences(mask.sum(1), means, deviations.square().sum(1))


def measure_noise(differences: EngineDifferences) -> EngineNoise:
    """Noise between two engines, from the differences of their log-probs.

    One-way analysis of variance with responses as classes: the token variance is the one within responses; the
    response variance is what is left of the variance of their means after token_std^2 / |y_i| is taken out, 0 if
    nothing is left. Raises ValueError if no token is trainable.
    """
    found = differences.trainable()
    count, tokens = len(found.lengths), int(found.lengths.sum())
    if not count:
        raise ValueError("no trainable token: there is no noise to measure")
    within = float(found.squares.sum()) / max(tokens - count, 1)
    between = float(found.means.var(correction=1)) if count > 1 else 0.0
    response = between - within * float((1 / found.lengths.double()).mean())
    return EngineNoise(float(found.means.mean()), math.sqrt(max(response, 0.0)), math.sqrt(within))


def noise_outside(noise: EngineNoise, lengths: Sequence[int], *, clip_low: float, clip_high: float) -> float:
    """Expected share of responses of these lengths whose ratio lies outside the range by noise alone."""
    below = math.log1p(-clip_low) if clip_low < 1 else -math.inf
    stds = _stds(noise, lengths)
    return _share_below(noise, stds, below) + 1 - _share_below(noise, stds, math.log1p(clip_high))


def suggest_clip_range(noise: EngineNoise, lengths: Sequence[int], *, share: float = 0.05) -> ClipRange:
    """The narrowest range outside of which noise alone puts no more than `share` of responses, half on each side.

    `lengths` are trainable tokens per response, as sampled. A range meant to restrain the policy must be at
    least this wide; where it would be narrower, the noise decides what is clipped. Raises ValueError.
    """
    if not 0 < share < 1:
        raise ValueError(f"share = {share}: must lie between 0 and 1")
    if not lengths or min(lengths) < 1:
        raise ValueError("lengths: at least one response is needed, and none may be empty")
    stds = _stds(noise, lengths)
    low, high = _quantile(noise, stds, share / 2), _quantile(noise, stds, 1 - share / 2)
    return ClipRange(-math.expm1(min(low, 0.0)), math.expm1(max(high, 0.0)))


def clip_range_below_noise(
    differences: EngineDifferences, *, clip_low: float, clip_high: float, share: float = 0.05
) -> str | None:
    """A warning if, at equal weights, more than `share` of the sequence ratios lie outside the range; else None.

    `differences` are between the log-probs that stand in the ratio, taken before the first update. The share is
    counted, not modelled; the suggested range comes from `suggest_clip_range`.
    """
    found = differences.trainable()
    lengths, means = found.lengths.tolist(), found.means.tolist()
    below = math.log1p(-clip_low) if clip_low < 1 else -math.inf
    outside = sum(1 for m in means if m < below or m > math.log1p(clip_high)) / max(len(means), 1)
    if outside <= share:
        return None
    noise = measure_noise(found)
    wide = suggest_clip_range(noise, lengths, share=share)
    return (
        f"the clip range is below the numerical noise of this set-up: before any update {outside:.0%} of "
        f"{len(means)} responses lie outside [1 - {clip_low:.2g}, 1 + {clip_high:.2g}] (mean |log s| "
        f"{sum(map(abs, means)) / len(means):.1e}; noise per token {noise.token_std:.1e}, per response "
        f"{noise.response_std:.1e}, bias {noise.bias:+.1e}; {sum(lengths) / len(lengths):.0f} tokens a response); "
        f"clip_low = {wide.clip_low:.2g} and clip_high = {wide.clip_high:.2g} would leave out {share:.0%}"
    )


def _stds(noise: EngineNoise, lengths: Sequence[int]) -> Tensor:
    return torch.tensor([noise.std_of_mean(n) for n in lengths], dtype=torch.float64)


def _share_below(noise: EngineNoise, stds: Tensor, log_ratio: float) -> float:
    """Expected share of responses with log s <= log_ratio, one deviation a response."""
    distance = torch.tensor(log_ratio - noise.bias, dtype=torch.float64)
    exact = (distance >= 0).double()
    return float(torch.where(stds > 0, torch.special.ndtr(distance / stds), exact).mean())


def _quantile(noise: EngineNoise, stds: Tensor, target: float) -> float:
    """The log-ratio below which `target` of the responses are expected, by bisection."""
    reach = 40 * float(stds.max())
    left, right = noise.bias - reach, noise.bias + reach
    for _ in range(80):
        middle = (left + right) / 2
        left, right = (middle, right) if _share_below(noise, stds, middle) < target else (left, middle)
    return right
