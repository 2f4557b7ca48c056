"""Routing Replay: record which experts a Mixture-of-Experts model uses, and force them again.

GRPO needs it to train MoE policies (paper section 5.3): between two updates the router picks other experts
for the same token, and the token's likelihood ratio jumps. Replay forces the recorded expert *indices*; the
gate *weights* are still computed by the current router, over the forced experts, so it keeps its gradients.

No router's mathematics is repeated here. A block's own forward runs unchanged, except that its `topk` over
the experts is answered with the forced indices and the values found there. What the experts module then
receives is compared with the routes: that is the proof, and it is on whenever replay is.

Rows are the tokens of one forward in flattened order; this module knows neither packing nor adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from gspo.policy.moe import MoeLayer, cannot_replay, expert_indices, in_backward, require_moe_layers, route_dtype
from gspo.policy.route_checks import (
    ROWS_TO_JUDGE,
    Routes,
    RoutingError,
    agreement,
    check_alignment,
    check_routes,
    check_shape,
)

MIN_AGREEMENT = 0.4
"""Routes of other tokens or layers agree with a router less than this, beyond chance; its own far more."""


@contextmanager
def record_routing(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Fill a dict with the experts that each MoE layer uses: layer name -> [N, K], uint8 or int16.

    The indices are those that the experts module receives, so what is recorded is what runs. A later forward
    inside the same context replaces the rows of the one before it; an activation checkpoint's recompute does
    not. Raises BadInputError for a model without MoE layers or with experts that take no indices, and
    RoutingError when the context ends and a layer was never entered.
    """
    layers = require_moe_layers(model)
    routes: dict[str, Tensor] = {}

    def recorder(layer: MoeLayer) -> Callable[..., None]:
        def record(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not in_backward():
                indices = expert_indices(layer, args, kwargs)
                routes[layer.name] = indices.detach().to(route_dtype(layer.num_experts), copy=True)

        return record

    handles = [_hook_experts(layer, recorder(layer)) for layer in layers.values()]
    try:
        yield routes
    finally:
        for handle in handles:
            handle.remove()
    missing = [name for name in layers if name not in routes]
    if missing:
        raise RoutingError(f"routing: no forward entered the experts of {missing[0]}, so there is no record")


@dataclass(slots=True)
class ReplayProof:
    """What a replay did; complete once its context has ended.

    `rows` and `native_rows` are the tokens of one forward that were forced and that were left to the router;
    `forwards` and `recomputes` count each layer's entries (a recompute is an activation checkpoint's second
    run, inside backward); `agreement` is, per layer, the share of the forced choices that the current router
    would have made by itself, empty when alignment is not checked.
    """

    rows: int
    native_rows: int
    forwards: dict[str, int]
    recomputes: dict[str, int]
    agreement: dict[str, float]


@contextmanager
def replay_routing(
    model: nn.Module,
    routes: Routes,
    *,
    native_rows: Bool[Tensor, "N"] | None = None,
    min_agreement: float | None = MIN_AGREEMENT,
) -> Iterator[ReplayProof]:
    """Force `routes` on every MoE layer of `model` in every forward inside the context.

    Args:
        model: the module whose forward is called, or a parent of it.
        routes: layer name -> [N, K], any integer dtype, rows in the flattened order of the forward.
        native_rows: True for rows that route natively (padding); their entries in `routes` are not read.
        min_agreement: least agreement beyond chance (Cohen's kappa) between forced and native choices in a
            layer; routes that belong to other tokens or layers fall below it. None leaves it unchecked.

    With activation checkpointing `backward()` must run inside the context: the recompute enters the routers
    again, and a backward after the end raises. Raises RoutingError for a missing or unknown layer, a wrong
    shape, an index out of range or twice in a token's set, an override that did not reach the experts, a
    layer that a forward did not enter, and misaligned routes; BadInputError, by class, for a router that
    chooses its experts in a way that cannot be forced.
    """
    replay = _Replay(model, routes, native_rows, compare=min_agreement is not None)
    with ExitStack() as undo:
        for layer in replay.layers.values():
            undo.enter_context(_forward_replaced(layer.block, replay.block_forward(layer)))
            undo.callback(_hook_experts(layer, replay.experts_hook(layer)).remove)
        undo.callback(replay.close)
        yield replay.proof
    replay.confirm(min_agreement)


class _Replay:
    """The state of one replay context."""

    def __init__(self, model: nn.Module, routes: Routes, native_rows: Tensor | None, *, compare: bool) -> None:
        self.layers = require_moe_layers(model)
        self.routes, self.native_rows, self.compare = routes, native_rows, compare
        rows = check_routes(self.layers, routes, native_rows)
        native = 0 if native_rows is None else int(native_rows.sum())
        self.proof = ReplayProof(
            rows - native, native, dict.fromkeys(self.layers, 0), dict.fromkeys(self.layers, 0), {}
        )
        self.checkpointed = any(
            module.training and getattr(module, "gradient_checkpointing", False) for module in model.modules()
        )
        self.closed = False
        self.entries: dict[str, list[_ForcedTopk]] = {name: [] for name in self.layers}
        self.reached: dict[str, list[Tensor]] = {name: [] for name in self.layers}
        self.agreements: dict[str, list[Tensor]] = {name: [] for name in self.layers}

    def close(self) -> None:
        self.closed = True

    def block_forward(self, layer: MoeLayer) -> Callable[..., Any]:
        """The block's forward with its expert choice answered from the routes."""
        original = layer.block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            mode = _ForcedTopk(self, layer)
            self.entries[layer.name].append(mode)
            try:
                with mode:
                    output = original(*args, **kwargs)
            finally:
                self.entries[layer.name].pop()
            if self.checkpointed:
                self._guard_backward(layer, output if isinstance(output, tuple) else (output,))
            return output

        return forward

    def experts_hook(self, layer: MoeLayer) -> Callable[..., None]:
        """Compares what the experts receive with what was forced."""

        def check(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            received = expert_indices(layer, args, kwargs)
            check_shape(layer, self.routes, *received.shape)
            forced = self.entries[layer.name][-1].forced if self.entries[layer.name] else None
            if layer.fixed:
                forced = self.fixed_routes(layer, received)
            elif forced is None:
                raise cannot_replay(layer.block, layer.name, "it chooses experts without a topk over all of them")
            self.reached[layer.name].append((received == forced.view_as(received)).all())
            counts = self.proof.recomputes if in_backward() else self.proof.forwards
            counts[layer.name] += 1

        return check

    def _guard_backward(self, layer: MoeLayer, outputs: tuple[Any, ...]) -> None:
        """Make a backward after the context fail, before the checkpoint's recompute can route natively."""

        def check(gradient: Tensor) -> Tensor:
            if self.closed:
                raise RoutingError(
                    f"routing.replay: backward entered {layer.name} after the replay had ended; with "
                    "activation checkpointing, call backward() inside replay_routing"
                )
            return gradient

        for value in outputs:
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(check)  # type: ignore[no-untyped-call]

    def fixed_routes(self, layer: MoeLayer, received: Tensor) -> Tensor:
        """What a layer without a choice must receive: its routes, except in native rows."""
        expected = self.routes[layer.name].to(received.device, received.dtype)
        if self.native_rows is None:
            return expected
        return torch.where(self.native_rows.to(received.device)[:, None], received, expected)

    def answer(self, layer: MoeLayer, scores: Tensor, k: int) -> Int[Tensor, "... K"]:
        """The indices that stand in for those of `topk(scores, k)`."""
        tokens = scores[..., 0].numel()
        check_shape(layer, self.routes, tokens, k)
        forced = self.routes[layer.name].to(scores.device, torch.long)
        if self.compare or self.native_rows is not None:
            natively = None if self.native_rows is None else self.native_rows.to(scores.device)
            native = scores.detach().topk(k, dim=-1).indices.view(tokens, k)
            if self.compare and not in_backward():
                keep = None if natively is None else ~natively
                self.agreements[layer.name].append(agreement(native, forced, scores.shape[-1], keep))
            if natively is not None:
                forced = torch.where(natively[:, None], native, forced)
        return forced.view(*scores.shape[:-1], k)

    def confirm(self, min_agreement: float | None) -> None:
        """The checks that need every forward of the context to be over."""
        most = max(self.proof.forwards.values())
        for name, count in self.proof.forwards.items():
            if count == 0 or count != most:
                raise RoutingError(
                    f"routing.replay: the experts of {name} were entered by {count} forwards, those of other "
                    f"layers by {most}; every forward inside the replay must enter every MoE layer"
                )
        for name, flags in self.reached.items():
            if not bool(torch.stack(flags).all()):
                raise RoutingError(f"routing.replay: the experts of {name} ran with other indices than its routes")
        if min_agreement is None or self.proof.rows == 0:
            return
        for name, parts in self.agreements.items():
            if self.layers[name].fixed:
                continue
            share, chance = torch.stack(parts).mean(0).tolist()
            self.proof.agreement[name] = share
            if self.proof.rows >= ROWS_TO_JUDGE:
                check_alignment(name, share, chance, min_agreement)


class _ForcedTopk(TorchFunctionMode):
    """Answers a block's `topk` over its experts with forced indices and the values at them."""

    def __init__(self, replay: _Replay, layer: MoeLayer) -> None:
        super().__init__()
        self.replay, self.layer = replay, layer
        self.forced: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.topk or func is torch.Tensor.topk:
            return self._topk(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _topk(self, input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        # Group-limited routers also take a topk over groups of experts: fewer columns than there are experts.
        over_experts = dim in (-1, input.ndim - 1) and input.shape[-1] == self.layer.num_experts
        if not (over_experts and largest and k == self.replay.routes[self.layer.name].shape[1]):
            return torch.topk(input, k, dim, largest, sorted)
        self.forced = self.replay.answer(self.layer, input, k)
        return torch.return_types.topk((input.gather(-1, self.forced), self.forced))


def _hook_experts(layer: MoeLayer, hook: Callable[..., None]) -> RemovableHandle:
    return layer.experts.register_forward_pre_hook(hook, with_kwargs=True)


@contextmanager
def _forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own
