"""The form that all objectives share: what goes in, what comes out, and how terms are averaged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gspo.objectives.ratios import masked_float
from gspo.objectives.stats import ObjectiveStats


@dataclass(frozen=True)
class Totals:
    """Denominators of the whole mini-batch, over all micro-batches and ranks.

    `sequences` counts every kept rollout, those without variance and fully masked ones included; `tokens`
    counts trainable tokens.
    """

    sequences: int
    tokens: int

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.sequences + other.sequences, self.tokens + other.tokens)


@dataclass(frozen=True)
class ObjectiveOutput:
    """`loss` to be minimised: these rows' share, adding up over micro-batches to the mini-batch's.

    `log_ratios` are detached and not clamped, one a unit: [B], or [B, T] where the unit is a token or span; 0
    where there is no trainable token.
    """

    loss: Float[Tensor, ""]
    stats: ObjectiveStats
    log_ratios: Float[Tensor, "B"] | Float[Tensor, "B T"]


@runtime_checkable
class Loss(Protocol):
    """What every objective can be called as."""

    def __call__(
        self,
        logprobs: Float[Tensor, "B T"],
        old_logprobs: Float[Tensor, "B T"],
        advantages: Float[Tensor, "B"] | Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
        *,
        clip_low: float = ...,
        clip_high: float = ...,
        totals: Totals | None = None,
    ) -> ObjectiveOutput: ...


@dataclass(frozen=True)
class Inputs:
    """Checked inputs in float32, 0 where masked; only `logprobs` carries a gradient."""

    logprobs: Float[Tensor, "B T"]
    old_logprobs: Float[Tensor, "B T"]
    advantages: Float[Tensor, "B"] | Float[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]

    @property
    def token_advantages(self) -> Float[Tensor, "B T"]:
        """One advantage a token, 0 where masked."""
        if self.advantages.dim() == 2:
            return self.advantages
        return torch.where(self.mask, self.advantages[:, None], 0)


def check_inputs(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, per_token: bool
) -> Inputs:
    """Refuses wrong shapes before broadcasting can hide them; `per_token`: advantages [B, T] are welcome.

    Raises ValueError.
    """
    if logprobs.dim() != 2 or old_logprobs.shape != logprobs.shape or mask.shape != logprobs.shape:
        raise ValueError(
            "logprobs, old_logprobs and mask must all be [B, T]; found "
            f"{tuple(logprobs.shape)}, {tuple(old_logprobs.shape)}, {tuple(mask.shape)}"
        )
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be boolean; found {mask.dtype}")
    by_row = advantages.shape == logprobs.shape[:1]
    if not by_row and not (per_token and advantages.shape == logprobs.shape):
        allowed = "[B] or [B, T]" if per_token else "[B]"
        raise ValueError(
            f"advantages must be {allowed} with [B, T] = {tuple(logprobs.shape)}; found {tuple(advantages.shape)}"
        )
    return Inputs(
        masked_float(logprobs, mask),
        masked_float(old_logprobs, mask).detach(),
        masked_float(advantages, mask.any(1) if by_row else mask).detach(),
        mask,
    )


def sequence_mean(
    values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], totals: Totals | None = None
) -> Float[Tensor, ""]:
    """Mean over a response's trainable tokens, then over `totals.sequences`: every response weighs the same.

    Without `totals` over the rows that have a trainable token. Masked values are ignored, whatever they are.
    """
    rows = torch.where(mask, values, 0).sum(1) / mask.sum(1).clamp(min=1)
    return mean_of_rows(rows, mask, totals)


def token_mean(
    values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], totals: Totals | None = None
) -> Float[Tensor, ""]:
    """Mean over `totals.tokens` trainable tokens: every token weighs the same. Masked values are ignored."""
    total = torch.where(mask, values, 0).sum()
    return total / (mask.sum().clamp(min=1) if totals is None else max(totals.tokens, 1))


def mean_of_rows(rows: Float[Tensor, "B"], mask: Bool[Tensor, "B T"], totals: Totals | None) -> Float[Tensor, ""]:
    """Mean of one value a response; rows without a trainable token must be 0."""
    return rows.sum() / (mask.any(1).sum().clamp(min=1) if totals is None else max(totals.sequences, 1))
