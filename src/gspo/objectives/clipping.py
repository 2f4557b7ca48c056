"""The clip of the policy ratio, and which units it touches.

The pessimistic surrogate min(r A, clip(r) A) differs from r A on one side only: above 1 + clip_high when the
advantage is positive, below 1 - clip_low when it is negative. There its gradient is removed. A ratio can thus
be *outside the band* and keep its gradient; the two are kept apart everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gspo.objectives.ratios import saturate


@dataclass(frozen=True)
class Band:
    """Ratios in [1 - low, 1 + high] are left alone.

    `low` = 1 and `high` = inf mean no bound on that side. `dual`, a ratio above 1 + high, bounds the side that
    the pessimistic surrogate leaves open, large ratios at negative advantages (dual clip, arXiv
    1912.09729, where it is called c); None leaves it open.
    """

    low: float
    high: float
    dual: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1:
            raise ValueError(f"clip_low = {self.low}: must lie in [0, 1]")
        if not self.high >= 0:
            raise ValueError(f"clip_high = {self.high}: must not be negative")
        if self.dual is not None and not self.dual > 1 + self.high:
            raise ValueError(f"dual_clip = {self.dual}: a ratio, must exceed 1 + clip_high = {1 + self.high}")

    @property
    def log_low(self) -> float:
        """Lower bound of the log-ratio. Near 1 a float32 ratio is coarse against clip_low; its log is not."""
        return math.log1p(-self.low) if self.low < 1 else -math.inf

    @property
    def log_high(self) -> float:
        """Upper bound of the log-ratio."""
        return math.log1p(self.high)


@dataclass(frozen=True)
class ClipFlags:
    """Which units lie outside the band, and from which the clip takes the gradient: [B] or [B, T] each."""

    outside_low: Bool[Tensor, "*units"]
    outside_high: Bool[Tensor, "*units"]
    removed_low: Bool[Tensor, "*units"]
    removed_high: Bool[Tensor, "*units"]


def clip_flags(log_ratio: Float[Tensor, "*units"], advantages: Float[Tensor, "*units"], band: Band) -> ClipFlags:
    """Compares log-ratios with the band, and the advantage's sign with the side."""
    outside_low, outside_high = log_ratio < band.log_low, log_ratio > band.log_high
    removed_high = outside_high & (advantages > 0)
    if band.dual is not None:
        removed_high = removed_high | ((log_ratio > math.log(band.dual)) & (advantages < 0))
    return ClipFlags(outside_low, outside_high, outside_low & (advantages < 0), removed_high)


def band_flags(log_ratio: Float[Tensor, "*units"], band: Band) -> ClipFlags:
    """The flags of an objective that never takes a gradient away."""
    outside_low, outside_high = log_ratio < band.log_low, log_ratio > band.log_high
    none = torch.zeros_like(outside_low)
    return ClipFlags(outside_low, outside_high, none, none)


def clipped_surrogate(
    ratio: Float[Tensor, "*units"], advantages: Float[Tensor, "*units"], flags: ClipFlags, band: Band
) -> Float[Tensor, "*units"]:
    """min(r A, clip(r, 1 - low, 1 + high) A), and no less than dual * A for A < 0 if there is a dual clip.

    Chosen by the flags instead of by `min`, so that what is counted as removed is what is removed, ties
    included.
    """
    bound_high = (1 + band.high) * advantages
    if band.dual is not None:
        bound_high = torch.where(advantages < 0, band.dual * advantages, bound_high)
    bounded = torch.where(flags.removed_low, (1 - band.low) * advantages, bound_high)
    return torch.where(flags.removed_low | flags.removed_high, bounded, ratio * advantages)


def ratio_of(log_ratio: Float[Tensor, "*units"]) -> Float[Tensor, "*units"]:
    """exp of the saturated log-ratio: finite whatever the drift."""
    return torch.exp(saturate(log_ratio))
