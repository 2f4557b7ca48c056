"""One rollout batch in, several optimizer updates out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gspo.config import Config
from gspo.distributed.gradients import sum_gradients
from gspo.distributed.world import World
from gspo.objectives import LOSSES, Totals, kl_k3, token_mean
from gspo.policy.layout import LayoutKind
from gspo.policy.model import Policy
from gspo.policy.routing_probe import why_unobservable
from gspo.policy.sampled_routes import prompt_routes_agree, sampled_routes
from gspo.training.clip_range import clip_range
from gspo.training.correction import corrected, correction_of
from gspo.training.division import divide
from gspo.training.load_balancing import load_balancing, observed
from gspo.training.minibatch import MicroBatch, MiniBatch
from gspo.training.optimizer import clip_gradients, learning_rate, make_optimizer
from gspo.training.routing_metrics import routing_metrics
from gspo.training.update_metrics import UpdateMetrics
from gspo.types import Batch, Scores


class Learner:
    """The policy, its optimizer, and the update (paper, eq. 5).

    `version` counts the optimizer updates made so far. An update with a non-finite gradient is not made; it is
    counted in the metrics.
    """

    def __init__(self, policy: Policy, config: Config, *, world: World) -> None:
        self.policy = policy
        self.config = config
        self.world = world
        self.version = 0
        self._parameters = [parameter for _, parameter in policy.trainable_parameters()]
        self.optimizer = make_optimizer(policy.trainable_parameters(), config.optimizer)
        self._objective = LOSSES[config.objective.name]
        self._records = config.routing.replay == "old"
        self._measures_routing = config.routing.figures_every > 0 and why_unobservable(policy.model) is None
        self.clip_low, self.clip_high = clip_range(config.objective)
        self._options = {} if config.objective.dual_clip is None else {"dual_clip": config.objective.dual_clip}

    def prepare(self, batch: Batch, metrics: UpdateMetrics) -> list[MiniBatch]:
        """Cuts the batch, drops mini-batches that cannot move the policy, and scores the rest before any update.

        The first mini-batch is updated at the very weights that define its old policy, so its old log-probs are
        those of its own update pass and it is not scored here.
        """
        minibatches = [m for m in self.cut(batch) if self._has_effect(m)]
        metrics.skipped = self.config.training.minibatches - len(minibatches)
        if self.config.likelihoods.old == "recompute":
            for micro in _micro_batches(minibatches[1:]):
                scores = self.policy.score(
                    micro.layout,
                    temperature=self.config.rollout.temperature,
                    entropy=False,
                    routes=micro.routes,
                    record=self._records,
                )
                micro.routes = scores.routes or micro.routes
                self._recomputed(micro.batch, scores, metrics)
                metrics.mismatch(scores, micro.batch)
            self._take_part(minibatches[1:])
        else:
            for micro in _micro_batches(minibatches):
                micro.batch.old_logprobs = micro.batch.sampler_logprobs
        if self.config.objective.kl_weight > 0:
            for micro in _micro_batches(minibatches):
                reference = self.policy.reference(micro.layout, temperature=self.config.rollout.temperature)
                micro.batch.reference_logprobs = reference.logprobs
            self._take_part(minibatches, reference=True)
        return minibatches

    def update(self, step: int, minibatches: list[MiniBatch], metrics: UpdateMetrics) -> None:
        """One optimizer update per mini-batch and epoch; `step` counts rollout batches from 1."""
        training = self.config.training
        total = training.steps * training.epochs * training.minibatches
        unmoved = self.version == 0  # a weak policy may have steps without any signal before its first update
        routing = None
        if self._measures_routing:
            routing = routing_metrics(self.policy, self.config, step, minibatches, self.world)
        for epoch in range(training.epochs):
            for minibatch in minibatches:
                place = ((step - 1) * training.epochs + epoch) * training.minibatches + minibatch.number
                rate = learning_rate(self.config.optimizer, place, total)
                fresh = epoch == 0 and minibatch is minibatches[0]
                self._apply(minibatch, rate, fresh, metrics)
                if fresh and routing is not None:
                    routing.after("first")
        metrics.merge(self.world)
        if unmoved and self.config.objective.name in ("gspo", "gspo_token"):
            metrics.judge_clip_range(self.clip_low, self.clip_high)
        if routing is not None:
            routing.after("last")
            metrics.routing = routing.as_metrics()

    def cut(self, batch: Batch) -> Iterable[MiniBatch]:
        """The batch's mini-batches, of whole groups: this process's part of each, cut into what one pass holds."""
        size = self.config.rollout.prompts // self.config.training.minibatches
        kind = self._layout_kind(batch)
        for number in range(self.config.training.minibatches):
            rows = ((batch.group_ids >= number * size) & (batch.group_ids < (number + 1) * size)).nonzero()[:, 0]
            part = batch.select(rows.tolist())
            shares = divide(part.rollouts, self.world.size, kind)
            cuts = [self._cut_share(part, share, kind) for share in shares]
            yield MiniBatch(
                number=number,
                micro_batches=[self._micro_batch(part.select(indices), kind) for indices in cuts[self.world.rank]],
                totals=Totals(sequences=len(part), tokens=int(part.mask.sum())),
                passes=max(map(len, cuts)),
                response_tokens=sum(len(rollout.response_ids) for rollout in part.rollouts),
                has_signal=bool((_by_token(part.advantages, part.mask) != 0).any()),
            )

    def _cut_share(self, part: Batch, share: list[int], kind: LayoutKind) -> list[list[int]]:
        """The rows of each of one process's forward passes."""
        rollouts = [part.rollouts[row] for row in share]
        chosen = self.policy.micro_batches(rollouts, self.config.training.micro_batch_tokens, kind=kind)
        return [[share[index] for index in indices] for indices in chosen]

    def _micro_batch(self, batch: Batch, kind: LayoutKind) -> MicroBatch:
        layout = self.policy.layout(batch.rollouts, kind=kind)
        replayed = self.config.routing.replay == "sampler"
        routes = sampled_routes(layout, batch.rollouts) if replayed else None
        return MicroBatch(batch.to(self.policy.device), layout, routes)

    def _layout_kind(self, batch: Batch) -> LayoutKind:
        """The policy's layout; a prompt that an engine routed differently for each response cannot be shared."""
        kind = self.policy.layout_kind
        if kind == "shared" and self.config.routing.replay == "sampler" and not prompt_routes_agree(batch.rollouts):
            return "packed"
        return kind

    def _has_effect(self, minibatch: MiniBatch) -> bool:
        return minibatch.has_signal or (self._has_other_terms() and minibatch.totals.tokens > 0)

    def _has_other_terms(self) -> bool:
        """Whether the loss has terms that need no advantage."""
        return self.config.objective.kl_weight > 0 or self.config.routing.load_balancing_weight > 0

    def _all_rejected(self, minibatch: MiniBatch) -> bool:
        """Whether the correction left no advantage, and nothing else moves the policy.

        Of the first mini-batch that is known only after its own pass.
        """
        if self.config.likelihoods.correction != "mask" or self._has_other_terms():
            return False
        left = [bool((micro.batch.advantages != 0).any()) for micro in minibatch.micro_batches]
        return not any(self.world.gather(left))

    def _apply(self, minibatch: MiniBatch, rate: float, fresh: bool, metrics: UpdateMetrics) -> None:
        """One optimizer update. `fresh`: the weights are still those that define the old policy."""
        self.optimizer.zero_grad(set_to_none=True)
        balance = load_balancing(self.policy, minibatch, self.config, self.world)
        for micro in minibatch.micro_batches:
            with (
                observed(self.policy, micro.layout, balance) as logits,
                self.policy.forward(
                    micro.layout,
                    temperature=self.config.rollout.temperature,
                    routes=micro.routes,
                    record=self._records and micro.routes is None,
                ) as scores,
            ):
                if micro.batch.old_logprobs is None:
                    self._recomputed(micro.batch, scores, metrics)
                loss = self._loss(scores, micro.batch, minibatch.totals, metrics)
                if balance is not None and logits is not None:
                    part = balance.part(logits, micro.layout)
                    loss = loss + balance.weight * part
                    metrics.load_balancing(part, balance.weight)
                torch.autograd.backward(loss)
            micro.routes = scores.routes or micro.routes
            metrics.replayed(scores, micro.layout.fed_tokens)
            if fresh:
                metrics.mismatch(scores, micro.batch)
        self._take_part([minibatch], backward=True)
        if self.policy.scorer.shards is not None:
            self.policy.scorer.shards.leave_unused(self.world)
        else:
            sum_gradients(self._parameters, self.world)
        if self._all_rejected(minibatch):
            metrics.skipped += 1
            return
        norm = clip_gradients(self._parameters, self.config.optimizer.max_grad_norm)
        metrics.update(norm, rate)
        if not math.isfinite(norm):
            return
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.version += 1

    def _take_part(self, minibatches: Sequence[MiniBatch], *, backward: bool = False, reference: bool = False) -> None:
        """Makes up for the passes over these mini-batches that other processes make and this one does not."""
        for _ in range(sum(minibatch.passes - len(minibatch.micro_batches) for minibatch in minibatches)):
            self.policy.take_part(backward=backward, reference=reference)

    def _recomputed(self, batch: Batch, scores: Scores, metrics: UpdateMetrics) -> None:
        """Takes the old log-probs from the training engine, and corrects for those that the responses came from."""
        batch.old_logprobs = scores.logprobs.detach()
        correction = correction_of(batch, self.config.likelihoods)
        if correction is not None:
            batch.advantages = corrected(batch.advantages, correction.weights)
            metrics.correction(correction)

    def _loss(self, scores: Scores, batch: Batch, totals: Totals, metrics: UpdateMetrics) -> Tensor:
        """This micro-batch's share of the mini-batch's loss."""
        assert batch.old_logprobs is not None
        spans: dict[str, Any] = {} if batch.spans is None else {"spans": batch.spans}
        output = self._objective(
            scores.logprobs,
            batch.old_logprobs,
            batch.advantages,
            batch.mask,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            totals=totals,
            **self._options,
            **spans,
        )
        loss = output.loss
        if batch.reference_logprobs is not None:
            kl = kl_k3(scores.logprobs, batch.reference_logprobs, batch.mask)
            loss = loss + self.config.objective.kl_weight * token_mean(kl, batch.mask, totals)
            metrics.kl(kl, batch)
        metrics.micro_batch(output, loss, scores, batch)
        return loss


def _micro_batches(minibatches: Iterable[MiniBatch]) -> Iterable[MicroBatch]:
    return (micro for minibatch in minibatches for micro in minibatch.micro_batches)


def _by_token(advantages: Tensor, mask: Tensor) -> Tensor:
    per_token = advantages if advantages.ndim == 2 else advantages[:, None]
    return torch.where(mask, per_token, 0.0)
