"""What can be done with a model's routing, found out on a few tokens before a run starts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gspo.errors import BadInputError
from gspo.policy.moe import cannot_replay, moe_layers
from gspo.policy.route_checks import RoutingError
from gspo.policy.routing import record_routing, replay_routing
from gspo.policy.routing_figures import router_logits


@torch.no_grad()
def check_replayable(model: Any) -> None:
    """Record and replay one short forward of a causal language model.

    Raises BadInputError, naming the class, when its routes cannot be recorded, cannot be forced, or change
    the output although they are its own.
    """
    ids = _few_tokens(model)
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


@torch.no_grad()
def why_unobservable(model: Any) -> str | None:
    """Why experts and router logits of a model cannot be read off its forward; None where they can."""
    try:
        if not moe_layers(model):
            return why_dense(model)
        with record_routing(model), router_logits(model):
            model(input_ids=_few_tokens(model), use_cache=False)
    except (BadInputError, RoutingError) as error:
        # What the user can do about replay is no help here.
        return str(error).partition("; docs/")[0].removeprefix("routing.replay: ").removeprefix("routing: ")
    return None


def why_dense(model: Any) -> str:
    """What to say of a model without MoE layers."""
    return f"{type(model).__name__} has no Mixture-of-Experts layer with an experts module"


def _few_tokens(model: Any) -> Tensor:
    vocabulary: int = model.config.get_text_config().vocab_size
    return torch.arange(2, 34, device=next(model.parameters()).device)[None] % vocabulary
