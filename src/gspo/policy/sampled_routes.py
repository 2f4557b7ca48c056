"""Routes that came with the rollouts, put into the order of a forward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from gspo.policy.layout import TokenLayout, by_slot
from gspo.policy.route_checks import Routes, RoutingError
from gspo.types import Rollout


def sampled_routes(layout: TokenLayout, rollouts: Sequence[Rollout]) -> Routes:
    """Layer -> experts [N, K] that the inference engine used, for a replay over `layout`.

    Raises RoutingError, naming the rollout, where routes are missing or do not cover exactly the fed tokens.
    """
    given = []
    for rollout in rollouts:
        if rollout.routes is None:
            raise RoutingError(
                f"routing.replay: the rollout at slot {rollout.slot}, sample {rollout.sample} came without routes; "
                'the engine must record them, or use routing.replay = "old"'
            )
        given.append(rollout.routes)
    names = list(given[0]) if given else []
    try:
        placed = {name: layout.place_routes([routes[name] for routes in given]) for name in names}
    except (KeyError, ValueError) as error:
        raise RoutingError(f"routing.replay: routes that do not fit the rollouts ({error})") from None
    return {name: torch.from_numpy(rows).to(layout.input_ids.device) for name, rows in placed.items()}


def padding_rows(layout: TokenLayout) -> Bool[Tensor, "N"] | None:
    """True on the rows of a forward that are padding, which a replay leaves to the router; None without any."""
    return ~layout.attention_mask.flatten() if layout.kind == "padded" else None


def prompt_routes_agree(rollouts: Sequence[Rollout]) -> bool:
    """Whether every group's responses came with the same experts for their common prompt."""
    for members in by_slot(rollouts).values():
        first = rollouts[members[0]]
        length = len(first.prompt.ids)
        for other in (rollouts[i] for i in members[1:]):
            if first.routes is None or other.routes is None:
                continue
            same = (np.array_equal(first.routes[n][:length], other.routes[n][:length]) for n in first.routes)
            if not all(same):
                return False
    return True
