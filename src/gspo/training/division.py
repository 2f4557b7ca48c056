"""Which process trains on which rollouts of a mini-batch."""

from __future__ import annotations

from collections.abc import Sequence

from gspo.policy.layout import LayoutKind, by_slot, fed_tokens, split_micro_batches
from gspo.types import Rollout


def divide(rollouts: Sequence[Rollout], size: int, kind: LayoutKind) -> list[list[int]]:
    """Indices of the rollouts of each of `size` processes, so that the fullest has as few fed tokens as can be.

    The largest part goes first, to the process with the fewest tokens so far. Where prompts are shared a group is one
    part, unless it pays to compute its prompt twice and let two processes have it. All processes find the same.

    >>> from gspo.types import Prompt, VersionSpan
    >>> def rollout(slot, length):
    ...     return Rollout(Prompt("k", "hi", (5, 6)), slot, 0, (7,) * length, (0.0,) * length, (True,) * length,
    ...                    "stop", (VersionSpan(0, 0),), "")
    >>> divide([rollout(0, 9), rollout(1, 4), rollout(2, 4)], 2, "packed")
    [[0], [1, 2]]
    """
    if size == 1:
        return [list(range(len(rollouts)))]
    if kind != "shared":
        return _spread(rollouts, [[index] for index in range(len(rollouts))], size, kind)[1]
    groups = list(by_slot(rollouts).values())
    share = sum(fed_tokens(rollouts, group, kind) for group in groups) / size
    found = [_spread(rollouts, groups, size, kind)]
    for pieces in (1, 2, 4, 8):
        parts = [part for group in groups for part in _split(rollouts, group, int(share / pieces), kind)]
        found.append(_spread(rollouts, parts, size, kind))
    return min(found, key=lambda division: division[0])[1]


def _split(rollouts: Sequence[Rollout], group: list[int], most: int, kind: LayoutKind) -> list[list[int]]:
    chosen = split_micro_batches([rollouts[index] for index in group], most, kind)
    return [[group[i] for i in part] for part in chosen]


def _spread(
    rollouts: Sequence[Rollout], parts: Sequence[list[int]], size: int, kind: LayoutKind
) -> tuple[int, list[list[int]]]:
    """The fed tokens of the fullest process, and everyone's rollouts."""
    costs = [fed_tokens(rollouts, part, kind) for part in parts]
    loads = [0] * size
    chosen: list[list[int]] = [[] for _ in range(size)]
    for n in sorted(range(len(parts)), key=lambda n: (-costs[n], n)):
        least = min(range(size), key=lambda rank: (loads[rank], rank))
        loads[least] += costs[n]
        chosen[least] += parts[n]
    return max(loads), [sorted(indices) for indices in chosen]
