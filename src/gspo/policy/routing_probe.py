"""Whether a model's routes can be replayed, found out on a few tokens before a run starts."""

from __future__ import annotations

from typing import Any

import torch

from gspo.policy.moe import cannot_replay
from gspo.policy.route_checks import RoutingError
from gspo.policy.routing import record_routing, replay_routing


@torch.no_grad()
def check_replayable(model: Any) -> None:
    """Record and replay one short forward of a causal language model.

    Raises BadInputError, naming the class, when its routes cannot be recorded, cannot be forced, or change
    the output although they are its own.
    """
    ids = torch.arange(2, 34, device=next(model.parameters()).device)[None] % model.config.get_text_config().vocab_size
    try:
        with record_routing(model) as routes:
            native = model(input_ids=ids, use_cache=False).logits.float()
        with replay_routing(model, routes):
            replayed = model(input_ids=ids, use_cache=False).logits.float()
    except RoutingError as error:
        raise cannot_replay(model, "the model", str(error).removeprefix("routing.replay: ")) from None
    # Equal where sums have a fixed order; experts are summed with atomics on some devices.
    if (replayed - native).abs().max() > 1e-2 * native.abs().max():
        raise cannot_replay(model, "the model", "its own experts, replayed, change the output")
