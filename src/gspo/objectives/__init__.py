"""The paper's mathematics: pure functions over [B, T] tensors, usable in anybody's trainer.

Needs torch and jaxtyping, and nothing else of the project.
"""

import inspect
from collections.abc import Mapping

from gspo.objectives.controls import cispo_loss, dapo_loss, dr_grpo_loss, gmpo_loss, sapo_loss
from gspo.objectives.corrections import Correction, masked_importance_weights, truncated_importance_weights
from gspo.objectives.credit import group_advantages, token_advantages, turn_advantages
from gspo.objectives.form import Loss, ObjectiveOutput, Totals, sequence_mean, token_mean
from gspo.objectives.guidance import (
    ClipRange,
    EngineDifferences,
    EngineNoise,
    clip_range_below_noise,
    engine_differences,
    measure_noise,
    noise_outside,
    suggest_clip_range,
)
from gspo.objectives.losses import grpo_loss, gspo_loss, gspo_token_loss
from gspo.objectives.ratios import kl_k3, sequence_log_ratio, token_log_ratio
from gspo.objectives.stats import ClipCounts, ObjectiveStats

LOSSES: Mapping[str, Loss] = {
    "gspo": gspo_loss,
    "gspo_token": gspo_token_loss,
    "grpo": grpo_loss,
    "dr_grpo": dr_grpo_loss,
    "dapo": dapo_loss,
    "cispo": cispo_loss,
    "gmpo": gmpo_loss,
    "sapo": sapo_loss,
}
"""Objectives by the name that the config gives them; all can be called as `Loss`."""


def _default_clip_range(loss: Loss) -> tuple[float, float]:
    parameters = inspect.signature(loss).parameters
    return parameters["clip_low"].default, parameters["clip_high"].default


CLIP_RANGES: Mapping[str, tuple[float, float]] = {name: _default_clip_range(loss) for name, loss in LOSSES.items()}
"""(clip_low, clip_high) that an objective takes when none is given, read off its signature."""

__all__ = [
    "CLIP_RANGES",
    "LOSSES",
    "ClipCounts",
    "ClipRange",
    "Correction",
    "EngineDifferences",
    "EngineNoise",
    "Loss",
    "ObjectiveOutput",
    "ObjectiveStats",
    "Totals",
    "cispo_loss",
    "clip_range_below_noise",
    "dapo_loss",
    "dr_grpo_loss",
    "engine_differences",
    "gmpo_loss",
    "group_advantages",
    "grpo_loss",
    "gspo_loss",
    "gspo_token_loss",
    "kl_k3",
    "masked_importance_weights",
    "measure_noise",
    "noise_outside",
    "sapo_loss",
    "sequence_log_ratio",
    "sequence_mean",
    "suggest_clip_range",
    "token_advantages",
    "token_log_ratio",
    "token_mean",
    "truncated_importance_weights",
    "turn_advantages",
]
