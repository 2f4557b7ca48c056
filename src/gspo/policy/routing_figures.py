"""What routing looks like from outside: experts that change, their load, the routers' entropy and balance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn

from gspo.policy.moe import MoeLayer, in_backward, require_moe_layers
from gspo.policy.route_checks import RoutingError

# Routers whose output holds probabilities where the others have logits.
_GIVE_PROBABILITIES = ("Gemma4TextRouter", "DiffusionGemmaTextRouter")


def changed_experts(before: Integer[Tensor, "N K"], after: Integer[Tensor, "N K"]) -> Float[Tensor, "N"]:
    """The share of each token's experts that are others than before, 1 - |A & B| / K: sets, not slots.

    The paper (section 5.3) finds about 10 % after one update of a model of 48 layers.
    """
    kept = (before.long()[:, :, None] == after.long()[:, None, :]).any(-1)
    return 1.0 - kept.float().mean(-1)


def expert_counts(
    indices: Integer[Tensor, "N K"], num_experts: int, rows: Bool[Tensor, "N"] | None = None
) -> Float[Tensor, "E"]:
    """How often each expert was chosen; only rows that are True count.

    Counts of micro-batches and ranks add up; divided by their sum they are the expert load.
    """
    chosen = indices.long().reshape(-1)
    weight = torch.ones(len(indices), device=indices.device) if rows is None else rows.to(indices.device).float()
    counts = torch.zeros(num_experts, device=indices.device)
    return counts.scatter_add_(0, chosen, weight.repeat_interleave(indices.shape[1]))


def router_entropy(logits: Float[Tensor, "N E"]) -> Float[Tensor, "N"]:
    """Entropy of softmax(logits) in nats, from 0 (always one expert) to log E."""
    logprobs = logits.detach().float().log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


@contextmanager
def router_logits(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Fill a dict with each MoE layer's router logits [N, E], in the graph, by layer name.

    A later forward replaces them; an activation checkpoint's recompute does not. Works inside
    `record_routing` and `replay_routing`. Raises RoutingError when the context ends and a router was not seen.
    """
    layers = require_moe_layers(model)
    logits: dict[str, Tensor] = {}
    handles = [
        child.register_forward_hook(_collector(layer, logits))
        for layer in layers.values()
        for child in layer.block.children()
        if child is not layer.experts
    ]
    try:
        yield logits
    finally:
        for handle in handles:
            handle.remove()
    missing = [name for name in layers if name not in logits]
    if missing:
        raise RoutingError(f"routing: no module of {missing[0]} gave logits over its experts")


def load_balancing_loss(
    logits: Mapping[str, Float[Tensor, "N E"]],
    counts: Mapping[str, Float[Tensor, "E"]],
    tokens: int,
    rows: Bool[Tensor, "N"] | None = None,
) -> Float[Tensor, ""]:
    """One micro-batch's part of the auxiliary load-balancing loss of a whole mini-batch, mean over layers.

    Per layer E * sum_e f_e P_e (Switch Transformer, arXiv 2101.03961, eq. 4-6): f_e is how often a token of
    the mini-batch chose expert e, P_e the mean of softmax(logits) for it. As f comes from the routes of the
    whole mini-batch, the parts of its micro-batches add up to the loss exactly. K is its value at balance.

    Args:
        logits: of this micro-batch (`router_logits`); gradients flow through them alone.
        counts: of the whole mini-batch (`expert_counts`, summed over micro-batches and ranks).
        tokens: rows counted in `counts`.
        rows: True for rows of this micro-batch that count (not padding).

    Raises RoutingError when gradients are on and no logits carry any, as under re-entrant checkpointing.
    """
    if torch.is_grad_enabled() and not any(value.requires_grad for value in logits.values()):
        raise RoutingError(
            "routing: the router logits carry no gradient; train the routers, and recompute "
            "activations with use_reentrant=False"
        )
    parts = []
    for name, value in logits.items():
        probabilities = value.float().softmax(-1)
        if rows is not None:
            probabilities = probabilities[rows.to(value.device)]
        share = counts[name].to(value.device) / tokens
        parts.append(value.shape[-1] * (share * probabilities.sum(0)).sum() / tokens)
    return torch.stack([part.to(parts[0].device) for part in parts]).mean()


def _collector(layer: MoeLayer, logits: dict[str, Tensor]) -> Callable[..., None]:
    def collect(module: nn.Module, _args: Any, output: Any) -> None:
        if in_backward():
            return
        for value in output if isinstance(output, tuple) else (output,):
            if isinstance(value, Tensor) and value.is_floating_point() and value.shape[-1] == layer.num_experts:
                if type(module).__name__ in _GIVE_PROBABILITIES:
                    value = value.clamp_min(torch.finfo(value.dtype).tiny).log()
                logits[layer.name] = value.flatten(0, -2)
                return

    return collect
