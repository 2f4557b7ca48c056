"""Objectives that people compare GSPO with, in the same form.

All are written over the token ratio w_t = exp(log w_t) and the loss is minimised. Each docstring says what the
gradient with respect to a token's log-prob is; A is the token's advantage and N stands for `totals.sequences`.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gspo.objectives.clipping import Band, band_flags, clip_flags, ratio_of
from gspo.objectives.form import (
    ObjectiveOutput,
    Totals,
    check_inputs,
    mean_of_rows,
    sequence_mean,
    token_mean,
)
from gspo.objectives.losses import clipped_tokens
from gspo.objectives.ratios import row_mean
from gspo.objectives.stats import collect_stats


def dr_grpo_loss(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B"] | Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    totals: Totals | None = None,
    length: float = 1.0,
    dual_clip: float | None = None,
) -> ObjectiveOutput:
    """GRPO without the response's length: a sum over tokens, divided by the constant `length`, mean over responses.

    Gradient: -w_t A / (length N), or 0 when clipped. The paper's objective is `length` = 1; its authors' code
    divides by the token budget of a response, which only rescales the loss. Meant for advantages with
    `scale="none"`. Source: Dr. GRPO (arXiv 2503.20783), section 3.2.
    """
    inputs = check_inputs(logprobs, old_logprobs, advantages, mask, per_token=True)
    terms, stats, log_ratios = clipped_tokens(inputs, Band(clip_low, clip_high, dual_clip))
    return ObjectiveOutput(-mean_of_rows(terms.sum(1), mask, totals) / length, stats, log_ratios)


def dapo_loss(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B"] | Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    totals: Totals | None = None,
    dual_clip: float | None = None,
) -> ObjectiveOutput:
    """DAPO's loss: GRPO's clip with a wider upper side, and a mean over all tokens of the mini-batch.

    Gradient: -w_t A / totals.tokens, or 0 when clipped; a long response weighs as much as its tokens. DAPO's
    dynamic sampling and its penalty for length are not part of a loss.
    Source: DAPO (arXiv 2503.14476) eq. 8.
    """
    inputs = check_inputs(logprobs, old_logprobs, advantages, mask, per_token=True)
    terms, stats, log_ratios = clipped_tokens(inputs, Band(clip_low, clip_high, dual_clip))
    return ObjectiveOutput(-token_mean(terms, mask, totals), stats, log_ratios)


def cispo_loss(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B"] | Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    totals: Totals | None = None,
) -> ObjectiveOutput:
    """CISPO: the clipped ratio is a constant weight on log pi, so that no token loses its gradient.

    Gradient: -clip(w_t, 1 - clip_low, 1 + clip_high) A / totals.tokens. The loss's value, a weighted
    log-likelihood, means nothing by itself. Like the paper, no lower bound by default; the paper does not give
    its upper one, and 1 + clip_high = 5 is ScaleRL's (arXiv 2510.13786).
    Source: MiniMax-M1 (arXiv 2506.13585) eq. 4 and 5.
    """
    band = Band(clip_low, clip_high)
    inputs = check_inputs(logprobs, old_logprobs, advantages, mask, per_token=True)
    seen = (inputs.logprobs - inputs.old_logprobs).detach()
    weights = ratio_of(seen).clamp(1 - clip_low, 1 + clip_high)
    terms = weights * inputs.token_advantages * inputs.logprobs
    stats = collect_stats(seen, row_mean(seen, mask), inputs.advantages, mask, band_flags(seen, band), token_units=True)
    return ObjectiveOutput(-token_mean(terms, mask, totals), stats, seen)


def gmpo_loss(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B"],
    mask: Bool[Tensor, "B T"],
    *,
    clip_low: float = -math.expm1(-0.4),
    clip_high: float = math.expm1(0.4),
    totals: Totals | None = None,
) -> ObjectiveOutput:
    """GMPO: the geometric mean of token ratios that are clipped one by one; without a clip it is GSPO.

    Gradient: -g_i A_i / (|y_i| N) with g_i the geometric mean of the clipped ratios, 0 at clipped tokens: the
    response keeps its other tokens where GSPO lets go of all. The default band is the paper's (e^-0.4, e^0.4).
    `log_ratios` are log g_i; clips are of tokens. Source: GMPO (arXiv 2507.20673).
    """
    band = Band(clip_low, clip_high)
    inputs = check_inputs(logprobs, old_logprobs, advantages, mask, per_token=False)
    log_ratio = inputs.logprobs - inputs.old_logprobs
    flags = clip_flags(log_ratio.detach(), inputs.token_advantages, band)
    clipped = torch.where(flags.removed_high, band.log_high, log_ratio)
    mean = row_mean(torch.where(flags.removed_low, band.log_low, clipped), mask)
    rows = ratio_of(mean) * inputs.advantages
    stats = collect_stats(mean.detach(), row_mean(log_ratio.detach(), mask), inputs.advantages, mask, flags)
    return ObjectiveOutput(-mean_of_rows(rows, mask, totals), stats, mean.detach())


def sapo_loss(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B"] | Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    clip_low: float = 1.0,
    clip_high: float = math.inf,
    totals: Totals | None = None,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> ObjectiveOutput:
    """SAPO: a smooth gate f(w) = (4 / tau) sigmoid(tau (w - 1)) in place of the clip, mean over tokens, then responses.

    Gradient: -4 p (1 - p) w_t A / (|y_i| N) with p = sigmoid(tau (w_t - 1)): full at w = 1, fading on both
    sides, faster for a larger tau (`temperature_negative` where A <= 0). The band takes no part in the loss; it
    sets what counts as outside. Source: SAPO (arXiv 2511.20347).
    """
    band = Band(clip_low, clip_high)
    inputs = check_inputs(logprobs, old_logprobs, advantages, mask, per_token=True)
    log_ratio = inputs.logprobs - inputs.old_logprobs
    seen = log_ratio.detach()
    credit = inputs.token_advantages
    tau = torch.where(credit > 0, temperature_positive, temperature_negative)
    gate = 4 / tau * torch.sigmoid(tau * (ratio_of(log_ratio) - 1))
    stats = collect_stats(seen, row_mean(seen, mask), inputs.advantages, mask, band_flags(seen, band), token_units=True)
    return ObjectiveOutput(-sequence_mean(gate * credit, mask, totals), stats, seen)
