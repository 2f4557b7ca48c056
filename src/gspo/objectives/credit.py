"""Credit: how rewards become advantages, relative to the group that shares a prompt."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gspo.objectives.ratios import dense_ids

Scale = Literal["std", "sample_std", "none"]

EPSILON = 1e-6
"""Added to a group's deviation: rewards that differ by rounding alone are not blown up to full size."""


def group_advantages(
    rewards: Float[Tensor, "B"], group_ids: Int[Tensor, "B"], *, scale: Scale = "std"
) -> Float[Tensor, "B"]:
    """Advantage of each response over its group: (r - mean) / (deviation + EPSILON).

    `scale`: "std" divides by the population deviation, so that a group's advantages have mean square 1 whatever
    its size; "sample_std" by the sample deviation, which shrinks them by sqrt((G - 1) / G); "none" by nothing.
    Groups may be of unequal size and in any order; a rollout that was dropped is simply not among the rows.
    A group whose rewards are all equal gets exactly 0, and so does a group of one.

    Source: GSPO (arXiv 2507.18071) eq. 6, which leaves the kind of deviation open.
    """
    _check_scale(scale)
    values = rewards.detach().double()
    index = dense_ids(group_ids)
    zeros = torch.zeros_like(values)
    size = zeros.index_add(0, index, torch.ones_like(values))
    mean = zeros.index_add(0, index, values) / size.clamp(min=1)
    centred = values - mean[index]
    high = zeros.scatter_reduce(0, index, values, "amax", include_self=False)
    low = zeros.scatter_reduce(0, index, values, "amin", include_self=False)
    if scale != "none":
        squares = zeros.index_add(0, index, centred.square())
        deviation = (squares / (size - int(scale == "sample_std")).clamp(min=1)).sqrt()
        centred = centred / (deviation + EPSILON)[index]
    return torch.where((high == low)[index], 0.0, centred).float()


def _check_scale(scale: str) -> None:
    if scale not in ("std", "sample_std", "none"):
        raise ValueError(f'scale = "{scale}": must be "std", "sample_std" or "none"')
