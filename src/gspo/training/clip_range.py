"""The clip range that a run uses."""

from __future__ import annotations

from gspo.config import ObjectiveConfig
from gspo.errors import BadInputError
from gspo.objectives import CLIP_RANGES, ClipRange


def clip_range(objective: ObjectiveConfig) -> ClipRange:
    """The bounds of the config, or the objective's own where it gives none.

    Raises BadInputError where the dual clip lies inside the range.
    """
    low, high = CLIP_RANGES[objective.name]
    found = ClipRange(
        low if objective.clip_low is None else objective.clip_low,
        high if objective.clip_high is None else objective.clip_high,
    )
    if objective.dual_clip is not None and objective.dual_clip <= 1 + found.clip_high:
        raise BadInputError(
            f"objective.dual_clip = {objective.dual_clip}: a ratio, must exceed 1 + clip_high = "
            f"{1 + found.clip_high:g}; 3 is usual"
        )
    return found
