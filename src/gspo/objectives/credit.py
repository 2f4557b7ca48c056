"""Credit: how rewards become advantages, relative to the group that shares a prompt."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
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

    A reward that is not finite makes its whole group NaN: no device is waited for to find out. Raises ValueError for
    shapes that differ.
    Source: GSPO (arXiv 2507.18071) eq. 6, which leaves the kind of deviation open.
    """
    _check_scale(scale)
    if rewards.ndim != 1 or group_ids.shape != rewards.shape:
        shapes = f"{list(rewards.shape)} and {list(group_ids.shape)}"
        raise ValueError(f"rewards and group_ids: found shapes {shapes}; both must be [B]")
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


def turn_advantages(
    rewards: Float[Tensor, "B S"],
    group_ids: Int[Tensor, "B"],
    turns: Int[Tensor, "B T"],
    *,
    scale: Scale = "std",
    discount: float = 0.0,
) -> Float[Tensor, "B T"]:
    """Advantage of each token from rewards per turn, for `gspo_token_loss`.

    `rewards[i, k]` is that of turn k (of at most S) of response i; `turns` gives each token its turn, from 0 on,
    and a negative number to tokens of no turn, which get 0. A turn that no token belongs to does not exist: its
    reward is ignored, whatever it is, and it is in nobody's baseline.

    The return of a turn is its reward plus `discount` times the return of the next one: its own reward alone at
    0, the sum of all rewards to come at 1. Returns are compared with those of the same turn in the other
    responses of the group, as in `group_advantages`: a turn that only one response reached gets 0.
    """
    rows, count = rewards.shape
    at = turns.clamp(min=0)
    exists = torch.zeros(rewards.shape, dtype=torch.int64, device=turns.device)
    exists = exists.scatter_add(1, at, (turns >= 0).long()) > 0
    returns = torch.where(exists, rewards.detach().double(), 0.0)
    for turn in reversed(range(count - 1)):
        returns[:, turn] += discount * returns[:, turn + 1]
    own_group = torch.arange(rows * count, device=turns.device).view(rows, count) + rows * count
    same_turn = dense_ids(group_ids)[:, None] * count + torch.arange(count, device=turns.device)
    keys = torch.where(exists, same_turn, own_group)
    by_turn = group_advantages(returns.flatten(), keys.flatten(), scale=scale).view(rows, count)
    return torch.where(turns >= 0, by_turn.gather(1, at), 0.0)


def token_advantages(
    rewards: Float[Tensor, "B T"],
    group_ids: Int[Tensor, "B"],
    mask: Bool[Tensor, "B T"],
    *,
    scale: Scale = "std",
) -> Float[Tensor, "B T"]:
    """Advantage of each token from a reward per token, for `gspo_token_loss`; 0 where the mask is False.

    (r - mean) / (deviation + EPSILON) over the trainable tokens of the group, in which every response weighs the
    same and its tokens share that weight, as they do in the loss. Rewards that are equal within each response give
    `group_advantages`. Equal rewards in a group give exactly 0; masked rewards are ignored, whatever they are.
    """
    _check_scale(scale)
    values = torch.where(mask, rewards.detach().double(), 0.0)
    if not mask.any():
        return values.float()
    index = dense_ids(group_ids)
    zeros = torch.zeros(len(index), dtype=torch.float64, device=values.device)
    counts = mask.sum(1)
    size = zeros.index_add(0, index, (counts > 0).double()).clamp(min=1)

    def group_mean(per_token: Tensor) -> Tensor:
        of_rows = per_token.sum(1) / counts.clamp(min=1)
        return (zeros.index_add(0, index, of_rows) / size)[index][:, None]

    centred = torch.where(mask, values - group_mean(values), 0.0)
    highest = torch.where(mask, values, -torch.inf).amax(1)
    lowest = torch.where(mask, values, torch.inf).amin(1)
    high = zeros.scatter_reduce(0, index, highest, "amax", include_self=False)
    low = zeros.scatter_reduce(0, index, lowest, "amin", include_self=False)
    if scale != "none":
        freedom = (size / (size - int(scale == "sample_std")).clamp(min=1))[index][:, None]
        centred = centred / ((group_mean(centred.square()) * freedom).sqrt() + EPSILON)
    return torch.where((high > low)[index][:, None], centred, 0.0).float()
