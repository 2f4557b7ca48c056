"""The paper's mathematics: pure functions over [B, T] tensors, usable in anybody's trainer.

Needs torch and jaxtyping, and nothing else of the project.
"""

import inspect
from collections.abc import Mapping

from gspo.objectives.credit import group_advantages
from gspo.objectives.form import Loss, ObjectiveOutput, Totals, sequence_mean, token_mean
from gspo.objectives.losses import grpo_loss, gspo_loss, gspo_token_loss
from gspo.objectives.ratios import kl_k3, sequence_log_ratio, token_log_ratio
from gspo.objectives.stats import ClipCounts, ObjectiveStats

LOSSES: Mapping[str, Loss] = {
    "gspo": gspo_loss,
    "gspo_token": gspo_token_loss,
    "grpo": grpo_loss,
}
"""Objectives by the name that the config gives them; all can be called as `Loss`."""


def default_clip_range(name: str) -> tuple[float, float]:
    """(clip_low, clip_high) of the objective of that name when none is given, read off its signature."""
    parameters = inspect.signature(LOSSES[name]).parameters
    return parameters["clip_low"].default, parameters["clip_high"].default


__all__ = [
    "LOSSES",
    "ClipCounts",
    "Loss",
    "ObjectiveOutput",
    "ObjectiveStats",
    "Totals",
    "default_clip_range",
    "group_advantages",
    "grpo_loss",
    "gspo_loss",
    "gspo_token_loss",
    "kl_k3",
    "sequence_log_ratio",
    "sequence_mean",
    "token_log_ratio",
    "token_mean",
]
