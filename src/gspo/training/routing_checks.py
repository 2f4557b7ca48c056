"""Whether a model can do what `[routing]` asks of it, found out before the first step."""

from __future__ import annotations

from typing import Any

from gspo.config import RoutingConfig
from gspo.errors import BadInputError
from gspo.policy.routing_probe import check_replayable, why_unobservable


def check_routing(model: Any, config: RoutingConfig) -> None:
    """Raises BadInputError where experts cannot be replayed or balanced, a dense model included."""
    if config.replay != "off":
        check_replayable(model)
    if config.load_balancing_weight > 0 and (why := why_unobservable(model)) is not None:
        raise BadInputError(
            f"routing.load_balancing_weight = {config.load_balancing_weight:g} needs a Mixture-of-Experts model whose "
            f"routers can be read: {why}; set it to 0 for this one"
        )
