"""Whether a model can do what `[routing]` asks of it, found out before the first step."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from gspo.config import Config, RoutingConfig
from gspo.errors import BadInputError
from gspo.policy.load import Preview
from gspo.policy.moe import moe_layers, require_moe_layers
from gspo.policy.routing_probe import check_replayable, why_dense, why_unobservable
from gspo.rollout.vllm_routes import check_reports_experts


def check_architecture(preview: Preview, config: Config) -> None:
    """Raises BadInputError where experts are to be replayed or balanced and there are none, or none are reported.

    No weight is read.
    """
    routing = config.routing
    if routing.replay == "sampler" and config.rollout.engine == "vllm":
        check_reports_experts(on_cpu=preview.device.type == "cpu")
    if routing.replay == "off" and routing.load_balancing_weight == 0:
        return
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(preview.config, trust_remote_code=config.model.trust_remote_code)
    if routing.replay != "off":
        require_moe_layers(shell)
    elif not moe_layers(shell):
        raise _cannot_balance(routing, why_dense(shell))


def check_routing(model: Any, config: RoutingConfig) -> None:
    """Raises BadInputError where experts cannot be replayed or balanced, a dense model included."""
    if config.replay != "off":
        check_replayable(model)
    if config.load_balancing_weight > 0 and (why := why_unobservable(model)) is not None:
        raise _cannot_balance(config, why)


def _cannot_balance(config: RoutingConfig, why: str) -> BadInputError:
    return BadInputError(
        f"routing.load_balancing_weight = {config.load_balancing_weight:g} needs a Mixture-of-Experts model whose "
        f"routers can be read: {why}; set it to 0 for this one"
    )
