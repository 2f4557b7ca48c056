"""Importance weights for what the engines disagree by, as the config asks for them."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.config import LikelihoodsConfig
from gspo.objectives import Correction, masked_importance_weights, truncated_importance_weights
from gspo.types import Batch


def correction_of(batch: Batch, config: LikelihoodsConfig) -> Correction | None:
    """The weights old / sampler of a batch whose old log-probs are known; None where the config wants none."""
    if config.correction == "none":
        return None
    assert batch.old_logprobs is not None
    old, sampler, level, high = (
        batch.old_logprobs,
        batch.sampler_logprobs,
        config.correction_level,
        config.correction_high,
    )
    if config.correction == "truncate":
        return truncated_importance_weights(old, sampler, batch.mask, level=level, high=high)
    return masked_importance_weights(old, sampler, batch.mask, level=level, low=config.correction_low, high=high)


def corrected(advantages: Tensor, weights: Tensor) -> Tensor:
    """Advantages [B] or [B, T] times weights [B] or [B, T]; per token as soon as one of the two is."""
    if advantages.ndim == weights.ndim:
        return advantages * weights
    return torch.where(weights != 0, _by_row(advantages) * _by_row(weights), 0.0)


def _by_row(values: Tensor) -> Tensor:
    return values if values.ndim == 2 else values[:, None]
