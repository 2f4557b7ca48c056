"""GSPO, GSPO-token and GRPO as functions to minimise.

Each returns the negated objective of its paper. Old log-probs and advantages are constants.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gspo.objectives.clipping import Band, clip_flags, clipped_surrogate, ratio_of
from gspo.objectives.form import Inputs, ObjectiveOutput, Totals, check_inputs, mean_of_rows, sequence_mean
from gspo.objectives.ratios import row_mean, span_mean
from gspo.objectives.stats import ObjectiveStats, collect_stats


def gspo_loss(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B"],
    mask: Bool[Tensor, "B T"],
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    totals: Totals | None = None,
    dual_clip: float | None = None,
) -> ObjectiveOutput:
    """Group Sequence Policy Optimization: one ratio, one clip and one weight a response.

    loss = -(1 / totals.sequences) sum_i min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)

    The gradient with respect to every trainable token's log-prob of response i is the same,
    -s_i A_i / (|y_i| totals.sequences), or 0 when the clip removed it: no token is singled out by its own ratio.

    Args: log-probs [B, T] in nats, advantages [B], `mask` [B, T] True at trainable tokens; `dual_clip` bounds
    the ratio at negative advantages (see `Band`). Raises ValueError for wrong shapes or ranges.
    Source: GSPO (arXiv 2507.18071) eq. 5, 7 and 10; the default clip range is that of its section 5.1.
    """
    band = Band(clip_low, clip_high, dual_clip)
    inputs = check_inputs(logprobs, old_logprobs, advantages, mask, per_token=False)
    log_ratio = row_mean(inputs.logprobs - inputs.old_logprobs, mask)
    seen = log_ratio.detach()
    flags = clip_flags(seen, inputs.advantages, band)
    rows = clipped_surrogate(ratio_of(log_ratio), inputs.advantages, flags, band)
    stats = collect_stats(seen, seen, inputs.advantages, mask, flags)
    return ObjectiveOutput(-mean_of_rows(rows, mask, totals), stats, seen)


def gspo_token_loss(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B"] | Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    totals: Totals | None = None,
    spans: Int[Tensor, "B T"] | None = None,
    dual_clip: float | None = None,
) -> ObjectiveOutput:
    """GSPO with an advantage per token: the ratio of the sequence, the credit of the token.

    s_it = sg[s_i] pi_theta(y_t) / sg[pi_theta(y_t)], equal to s_i in value; each token's term
    min(s_it A_it, clip(s_it) A_it) weighs 1 / |y_i|. The gradient with respect to a token's log-prob is
    -s_i A_it / (|y_i| totals.sequences) unless clipped. All tokens of a response share the ratio, but where
    their advantages differ in sign the clip decides token by token: at s_i > 1 + clip_high it takes the gradient
    from positive tokens and leaves it to negative ones.

    With `spans` (one integer a token, for instance its turn) the ratio is that of the span; a token's weight
    stays 1 / |y_i|. With equal advantages and no spans, value, clip and gradient are those of `gspo_loss`.

    Args as `gspo_loss`, advantages [B, T], or [B] for all tokens of a response alike. Raises ValueError.
    Source: GSPO (arXiv 2507.18071) eq. 13, 14 and 17.
    """
    band = Band(clip_low, clip_high, dual_clip)
    inputs = check_inputs(logprobs, old_logprobs, advantages, mask, per_token=True)
    token_log_ratio = (inputs.logprobs - inputs.old_logprobs).detach()
    sequence = row_mean(token_log_ratio, mask)
    units = sequence if spans is None else span_mean(token_log_ratio, mask, spans)
    shared = torch.where(mask, sequence[:, None], 0) if spans is None else units
    flags = clip_flags(shared, inputs.token_advantages, band)
    ratio = ratio_of(shared) * torch.exp(inputs.logprobs - inputs.logprobs.detach())
    terms = clipped_surrogate(ratio, inputs.token_advantages, flags, band)
    stats = collect_stats(units, sequence, inputs.advantages, mask, flags, spans=spans)
    return ObjectiveOutput(-sequence_mean(terms, mask, totals), stats, units)


def grpo_loss(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B"] | Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.27,
    totals: Totals | None = None,
    dual_clip: float | None = None,
) -> ObjectiveOutput:
    """Group Relative Policy Optimization: a ratio and a clip per token, mean over tokens, then over responses.

    The gradient with respect to a token's log-prob is -w_t A / (|y_i| totals.sequences), or 0 when the clip
    removed it: each token is weighted by its own ratio.

    Args as `gspo_token_loss`. Raises ValueError for wrong shapes or ranges.
    Source: GRPO (arXiv 2402.03300) eq. 3 without its KL term; the default clip range is that of the GSPO
    paper's GRPO runs (arXiv 2507.18071, section 5.1).
    """
    inputs = check_inputs(logprobs, old_logprobs, advantages, mask, per_token=True)
    terms, stats, log_ratios = clipped_tokens(inputs, Band(clip_low, clip_high, dual_clip))
    return ObjectiveOutput(-sequence_mean(terms, mask, totals), stats, log_ratios)


def clipped_tokens(inputs: Inputs, band: Band) -> tuple[Tensor, ObjectiveStats, Tensor]:
    """(min(w_t A, clip(w_t) A) [B, T], its counts, the log-ratios): what GRPO and its kin average each in its way."""
    log_ratio = inputs.logprobs - inputs.old_logprobs
    seen = log_ratio.detach()
    flags = clip_flags(seen, inputs.token_advantages, band)
    terms = clipped_surrogate(ratio_of(log_ratio), inputs.token_advantages, flags, band)
    mean = row_mean(seen, inputs.mask)
    return terms, collect_stats(seen, mean, inputs.advantages, inputs.mask, flags, token_units=True), seen
