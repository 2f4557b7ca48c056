"""How the routing of a Mixture-of-Experts policy changes while it trains (paper, section 5.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gspo.config import Config
from gspo.distributed.world import World
from gspo.policy.model import Policy
from gspo.policy.moe import moe_layers
from gspo.policy.route_checks import Routes
from gspo.policy.routing import replay_routing
from gspo.policy.routing_figures import changed_experts, expert_counts, router_entropy, router_logits
from gspo.policy.sampled_routes import padding_rows
from gspo.reporting.metrics import Metric, Ratio
from gspo.training.minibatch import MicroBatch, MiniBatch

Moment = Literal["first", "last"]


@dataclass(frozen=True, slots=True)
class _Native:
    """A forward that the routers were free in: experts and entropies by layer, log-probs [B, T]."""

    routes: Routes
    logprobs: Tensor
    entropies: dict[str, Tensor]


class RoutingMetrics:
    """Measures one mini-batch before the updates of a step, after the first of them and after the last.

    What is counted are the positions that predict trainable tokens. No pass has gradients, and none changes what
    the updates do.
    """

    def __init__(self, policy: Policy, temperature: float, minibatch: MiniBatch, world: World) -> None:
        self.policy = policy
        self.temperature = temperature
        self.world = world
        self.micro_batches = [micro for micro in minibatch.micro_batches if len(micro.layout.source)]
        self._idle = minibatch.passes - len(self.micro_batches)
        self._experts = {name: layer.num_experts for name, layer in moe_layers(policy.model).items()}
        self._metrics: dict[str, Metric] = {}
        self._old = self._native()
        self._describe_old()

    def after(self, moment: Moment) -> None:
        """Compares with the old policy, after the first or the last update of the step."""
        new = self._native()
        changed = {name: Ratio(0.0, 0) for name in self._experts}
        for micro, before, now in zip(self.micro_batches, self._old, new, strict=True):
            rows = micro.layout.source
            for name, routes in before.routes.items():
                shares = changed_experts(routes[rows], now.routes[name][rows])
                changed[name] += Ratio(float(shares.double().sum()), len(shares))
        self._by_layer(f"routing/changed_{moment}", changed)
        self._spread(f"native_{moment}", [now.logprobs for now in new])
        self._spread(f"replayed_{moment}", self._replayed())

    def as_metrics(self) -> dict[str, Metric]:
        """Every figure by its name in `gspo.reporting.metrics.METRICS`."""
        return self._metrics

    def _native(self) -> list[_Native]:
        found = [self._native_pass(micro) for micro in self.micro_batches]
        self._take_part()
        return found

    def _native_pass(self, micro: MicroBatch) -> _Native:
        with router_logits(self.policy.model) as logits:
            scores = self.policy.score(micro.layout, temperature=self.temperature, entropy=False, record=True)
        assert scores.routes is not None
        rows = micro.layout.source
        return _Native(scores.routes, scores.logprobs, {n: router_entropy(x[rows]) for n, x in logits.items()})

    def _replayed(self) -> list[Float[Tensor, "B T"]]:
        pairs = zip(self.micro_batches, self._old, strict=True)
        found = [self._replayed_pass(micro, old) for micro, old in pairs]
        self._take_part()
        return found

    def _replayed_pass(self, micro: MicroBatch, old: _Native) -> Float[Tensor, "B T"]:
        # However far the policy has gone from the old one, measuring it must not end the run.
        with replay_routing(self.policy.model, old.routes, native_rows=padding_rows(micro.layout), min_agreement=None):
            return self.policy.score(micro.layout, temperature=self.temperature, entropy=False).logprobs

    def _take_part(self) -> None:
        """Makes up for the passes that other processes make over their parts of the mini-batch."""
        for _ in range(self._idle):
            self.policy.take_part()

    def _describe_old(self) -> None:
        """Entropy of the routers and load of the experts under the old policy."""
        entropy: dict[str, Ratio] = {}
        unused = Ratio(0, 0)
        for name, experts in self._experts.items():
            values = [old.entropies[name] for old in self._old]
            entropy[name] = Ratio(sum(float(part.double().sum()) for part in values), sum(map(len, values)))
            counts = torch.zeros(experts, device=self.policy.device)
            for micro, old in zip(self.micro_batches, self._old, strict=True):
                counts += expert_counts(old.routes[name][micro.layout.source], experts)
            self.world.add_up(counts)
            self._metrics[f"routing/load_max/{name}"] = float(counts.max() / counts.mean())
            unused += Ratio(int((counts == 0).sum()), experts)
        self._by_layer("routing/entropy", entropy)
        self._metrics["routing/unused"] = unused

    def _by_layer(self, name: str, found: dict[str, Ratio]) -> None:
        parts = self.world.gather([found])
        values = {layer: sum((part[layer] for part in parts), Ratio(0.0, 0)) for layer in found}
        self._metrics[name] = sum(values.values(), Ratio(0.0, 0))
        self._metrics |= {f"{name}/{layer}": value for layer, value in values.items()}

    def _spread(self, how: str, logprobs: list[Tensor]) -> None:
        """Standard deviations of token and sequence log-ratios against the old policy."""
        tokens, sequences = [], []
        for micro, old, new in zip(self.micro_batches, self._old, logprobs, strict=True):
            token, sequence = log_ratios(new, old.logprobs, micro.layout.mask)
            tokens.append(token)
            sequences.append(sequence)
        for unit, parts in (("token", tokens), ("sequence", sequences)):
            values = torch.cat(self.world.gather([part.cpu() for part in parts])).double()
            self._metrics[f"routing/{unit}_log_ratio_std_{how}"] = float(values.std(correction=0))


def log_ratios(
    new: Float[Tensor, "B T"], old: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> tuple[Float[Tensor, "M"], Float[Tensor, "S"]]:
    """Log-ratios of the M tokens in `mask`, and their means over each of the S rows that have any."""
    differences = (new - old).where(mask, 0.0)
    lengths = mask.sum(1)
    means = differences.sum(1) / lengths.clamp(min=1)
    return differences[mask], means[lengths > 0]


def routing_metrics(
    policy: Policy, config: Config, step: int, minibatches: Sequence[MiniBatch], world: World
) -> RoutingMetrics | None:
    """The old policy's figures over the step's last mini-batch; None where none are due or nothing is trained on.

    The last mini-batch is the one that the most updates separate from the policy that sampled it.
    """
    every = config.routing.figures_every
    scored = [m for m in minibatches if m.totals.tokens]
    if every == 0 or (step - 1) % every or not scored:
        return None
    return RoutingMetrics(policy, config.rollout.temperature, scored[-1], world)
