"""Importance ratios and the KL estimate, in log space.

All inputs are log-probs [B, T] in nats of the sampled tokens, with a boolean mask that is True at trainable
tokens. Arithmetic is in float32 (float64 inputs stay float64) and masked positions are replaced before it, so
that nothing that stands there reaches a value or a gradient.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios beyond this many nats, either way, count as saturated and weigh as much as this one."""


def token_log_ratio(
    logprobs: Float[Tensor, "B T"], old_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """log w_t = log pi_theta(y_t) - log pi_old(y_t), in nats; 0 where the mask is False.

    Gradients reach `logprobs` alone: the old policy is a constant. Not clamped.
    Source: GSPO (arXiv 2507.18071) eq. 3, GRPO (arXiv 2402.03300).
    """
    return masked_float(logprobs, mask) - masked_float(old_logprobs, mask).detach()


def sequence_log_ratio(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    spans: Int[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B"] | Float[Tensor, "B T"]:
    """log s_i = (1/|y_i|) sum_t log w_t, the length-normalised log-ratio in nats; 0 for an empty response.

    With `spans` (any integers; tokens of one row that share one belong together) the mean is taken over each
    span, and every trainable token carries that of its own: [B, T], 0 where the mask is False. Not clamped. Raises
    ValueError for spans of another shape.
    Source: GSPO (arXiv 2507.18071) eq. 7.
    """
    log_ratio = token_log_ratio(logprobs, old_logprobs, mask)
    return row_mean(log_ratio, mask) if spans is None else span_mean(log_ratio, mask, spans)


def kl_k3(
    logprobs: Float[Tensor, "B T"], reference_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Per-token estimate of KL(pi_theta || pi_ref) in nats, never negative; 0 where the mask is False.

    k3 = d^-1 - 1 + log d with d = pi_theta / pi_ref, differentiable in `logprobs`; the log-ratio saturates as
    the losses' does. Its gradient, 1 - pi_ref / pi_theta, is that of the estimate and not of the KL itself.
    Source: Schulman, "Approximating KL divergence" (2020); GRPO (arXiv 2402.03300) eq. 4.
    """
    log_ratio = saturate(-token_log_ratio(logprobs, reference_logprobs, mask))
    return torch.expm1(log_ratio) - log_ratio


def saturate(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Clamps to +-MAX_LOG_RATIO in value; the gradient passes straight through.

    A clamp that stopped the gradient would silence exactly those responses that drifted furthest. NaN and
    infinities come out as NaN: a trainable token without a finite log-prob is an error of the caller.
    """
    return log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) + (log_ratio - log_ratio.detach())


def masked_float(values: Tensor, mask: Tensor) -> Tensor:
    """`values` in at least float32, 0 where the mask is False."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    return torch.where(mask, values, 0).to(dtype)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over a row's trainable tokens [B]; 0 for a row without any. `values` are 0 where masked."""
    return values.sum(1) / mask.sum(1).clamp(min=1)


def span_mean(values: Tensor, mask: Tensor, spans: Tensor) -> Tensor:
    """Mean over the trainable tokens of each token's span [B, T]; 0 where masked. Raises ValueError on a bad shape."""
    if spans.shape != mask.shape:
        raise ValueError(f"spans must be [B, T] = {tuple(mask.shape)}, one a token; found {tuple(spans.shape)}")
    index = dense_ids(spans)
    sums = torch.zeros_like(values).scatter_add(1, index, values)
    counts = torch.zeros_like(values).scatter_add(1, index, mask.to(values.dtype))
    return torch.where(mask, (sums / counts.clamp(min=1)).gather(1, index), 0)


def dense_ids(ids: Int[Tensor, "*rows n"]) -> Int[Tensor, "*rows n"]:
    """Renumbers ids along the last dimension from 0 on without gaps, equal ids staying equal.

    Sorting instead of `unique`: the shape does not depend on the values, so no device has to be waited for.
    """
    ordered, order = ids.sort(dim=-1)
    rank = (ordered != ordered.roll(1, dims=-1)).cumsum(-1)
    return torch.zeros_like(rank).scatter(-1, order, rank - rank[..., :1])
