"""The auxiliary load-balancing loss of a Mixture-of-Experts policy, exact however a mini-batch is cut."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.config import Config
from gspo.distributed.world import World
from gspo.policy.layout import TokenLayout
from gspo.policy.model import Policy
from gspo.policy.moe import moe_layers
from gspo.policy.routing_figures import expert_counts, load_balancing_loss, router_logits
from gspo.training.minibatch import MiniBatch


@dataclass(frozen=True, slots=True)
class LoadBalancing:
    """The loss of one mini-batch: how often each expert was chosen, over how many tokens.

    Counted are the positions that predict trainable tokens, one a token: neither padding nor the number of times
    that a layout feeds a prompt changes anything.
    """

    weight: float
    counts: Mapping[str, Tensor]
    tokens: int

    def part(self, logits: Mapping[str, Tensor], layout: TokenLayout) -> Tensor:
        """What one micro-batch adds to the unweighted loss; `logits` [N, E] are those of its forward, by layer."""
        return load_balancing_loss({name: x[layout.source] for name, x in logits.items()}, self.counts, self.tokens)


def load_balancing(policy: Policy, minibatch: MiniBatch, config: Config, world: World) -> LoadBalancing | None:
    """Counts the experts of a mini-batch before its update; None where the loss is off.

    The experts are those that the update will use. Where none are recorded, a pass without gradients at the same
    weights finds them; under `routing.replay` they are then replayed.
    """
    weight = config.routing.load_balancing_weight
    if weight == 0 or minibatch.totals.tokens == 0:
        return None
    layers = moe_layers(policy.model)
    counts = {name: torch.zeros(layer.num_experts, device=policy.device) for name, layer in layers.items()}
    scored = [micro for micro in minibatch.micro_batches if len(micro.layout.source)]
    missing = sum(micro.routes is None for micro in scored)
    idle = minibatch.passes - missing if int(world.sum(torch.tensor(missing))) > 0 else 0
    for micro in scored:
        routes = micro.routes
        if routes is None:
            temperature = config.rollout.temperature
            routes = policy.score(micro.layout, temperature=temperature, entropy=False, record=True).routes
            assert routes is not None
            micro.routes = routes if config.routing.replay != "off" else None
        for name, indices in routes.items():
            counts[name] += expert_counts(indices[micro.layout.source], layers[name].num_experts)
    for _ in range(idle):  # the other processes may have more to count
        policy.take_part()
    summed = torch.split(world.sum(torch.cat(list(counts.values()))), [len(count) for count in counts.values()])
    return LoadBalancing(weight, dict(zip(counts, summed, strict=True)), minibatch.totals.tokens)


def observed(
    policy: Policy, layout: TokenLayout, balance: LoadBalancing | None
) -> AbstractContextManager[dict[str, Tensor] | None]:
    """Router logits of the forward inside, where there is one and a loss that needs them."""
    if balance is None or len(layout.source) == 0:
        return nullcontext()
    return router_logits(policy.model)
