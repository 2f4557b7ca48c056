"""What the updates of one rollout batch report, as sums with their denominators."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from gspo.distributed.world import World
from gspo.objectives import Correction, ObjectiveOutput, ObjectiveStats, clip_range_below_noise, engine_differences
from gspo.objectives.guidance import EngineDifferences
from gspo.reporting.metrics import Metric, Ratio
from gspo.reporting.objective_metrics import objective_metrics
from gspo.types import Batch, Scores


@dataclass(slots=True)
class _Collected:
    """Figures with an entry for each forward pass, on the device; those of several processes are joined end to end.

    A summary is float64 [3]: the sum, the number and the largest of some values.
    """

    stats: list[ObjectiveStats] = field(default_factory=list)
    differences: list[EngineDifferences] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    ratios: list[Tensor] = field(default_factory=list)
    balance: list[Tensor] = field(default_factory=list)
    agreement: list[tuple[float, int]] = field(default_factory=list)
    entropy: list[Tensor] = field(default_factory=list)
    kl: list[Tensor] = field(default_factory=list)
    token_mismatch: list[Tensor] = field(default_factory=list)
    sequence_mismatch: list[Tensor] = field(default_factory=list)
    correction_weights: list[Tensor] = field(default_factory=list)
    correction_changes: list[Tensor] = field(default_factory=list)

    def on_host(self) -> _Collected:
        return _Collected(**{f.name: [_on_host(entry) for entry in getattr(self, f.name)] for f in fields(self)})

    def __add__(self, other: _Collected) -> _Collected:
        return _Collected(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


class UpdateMetrics:
    """Collects figures on the device; `as_metrics` waits for it once."""

    def __init__(self) -> None:
        self.skipped = 0
        self.learning_rate: float | None = None
        self.warning: str | None = None
        self.routing: dict[str, Metric] = {}
        self._norms: list[float] = []
        self._found = _Collected()

    def mismatch(self, scores: Scores, batch: Batch) -> None:
        """Sampler against training engine, at the weights that sampled.

        Where the sampler's log-probs stand in the ratio, this is how far ratios are from 1 before any update.
        """
        if batch.old_logprobs is not None:
            self._found.differences.append(engine_differences(scores.logprobs, batch.old_logprobs, batch.mask))
        difference = (batch.sampler_logprobs - scores.logprobs.detach()).where(batch.mask, 0.0)
        self._found.token_mismatch.append(_summary(difference.abs()[batch.mask]))
        means = difference.sum(1) / batch.mask.sum(1).clamp(min=1)
        self._found.sequence_mismatch.append(_summary(means.abs()[batch.mask.any(1)]))

    def judge_clip_range(self, clip_low: float, clip_high: float) -> None:
        """Sets `warning` if ratios leave the clip range by the engines' noise alone."""
        if self._found.differences:
            differences = _total(self._found.differences)
            self.warning = clip_range_below_noise(differences, clip_low=clip_low, clip_high=clip_high)

    def micro_batch(self, output: ObjectiveOutput, loss: Tensor, scores: Scores, batch: Batch) -> None:
        """One forward pass of an update; `loss` is its share of the mini-batch's loss, the KL included."""
        self._found.stats.append(output.stats)
        self._found.losses.append(loss.detach())
        units = batch.mask if output.log_ratios.ndim == 2 else batch.mask.any(1)
        self._found.ratios.append(output.log_ratios[units])
        self._found.entropy.append(_summary(scores.entropy[batch.mask]))

    def kl(self, per_token: Tensor, batch: Batch) -> None:
        """The KL estimate [B, T] of one forward pass."""
        self._found.kl.append(_summary(per_token[batch.mask]))

    def correction(self, found: Correction) -> None:
        """The weights of one forward pass's rollouts for what the engines disagree by."""
        self._found.correction_weights.append(_summary(found.weights.flatten()))
        self._found.correction_changes.append(torch.stack([found.changed, found.units]))

    def load_balancing(self, part: Tensor, weight: float) -> None:
        """One forward pass's part of the auxiliary loss, which the mini-batch's loss has `weight` times."""
        self._found.balance.append(part.detach())
        self._found.losses.append(weight * part.detach())

    def replayed(self, scores: Scores, tokens: int) -> None:
        """One forward pass of an update that is over; `tokens` were fed."""
        self._found.agreement += [(share, tokens) for share in (scores.agreement or {}).values()]

    def update(self, gradient_norm: float, learning_rate: float) -> None:
        """One optimizer update, with the gradient's norm before it was scaled down."""
        self._norms.append(gradient_norm)
        self.learning_rate = learning_rate

    def merge(self, world: World) -> None:
        """Takes in what the forward passes of the other processes found; all have the same figures afterwards."""
        if world.size > 1:
            self._found = _total(world.gather([self._found.on_host()]))

    def as_metrics(self) -> dict[str, Metric]:
        """Every figure by its name in `gspo.reporting.metrics.METRICS`."""
        found, updates = self._found, len(self._norms)
        finite = [norm for norm in self._norms if math.isfinite(norm)]
        metrics: dict[str, Metric] = {
            "optimizer/updates": updates,
            "optimizer/skipped": self.skipped,
            "optimizer/non_finite": updates - len(finite),
            "optimizer/gradient_norm": Ratio(sum(finite), len(finite)),
            "objective/loss": Ratio(sum(float(loss) for loss in found.losses), updates),
            "policy/entropy": _mean(found.entropy),
            "mismatch/token": _mean(found.token_mismatch),
            "mismatch/sequence": _mean(found.sequence_mismatch),
        }
        if self.learning_rate is not None:
            metrics["optimizer/learning_rate"] = self.learning_rate
        if _mean(found.token_mismatch).count:
            metrics["mismatch/token_max"] = float(torch.stack(found.token_mismatch)[:, 2].max())
        if found.kl:
            metrics["policy/kl"] = _mean(found.kl)
        if found.agreement:
            agreeing, fed = (sum(a * n for a, n in found.agreement), sum(n for _, n in found.agreement))
            metrics["routing/agreement"] = Ratio(agreeing, fed)
            metrics["routing/agreement_min"] = min(share for share, _ in found.agreement)
        if found.correction_weights:
            changed, units = _total(found.correction_changes).tolist()
            metrics["correction/weight"] = Ratio(_mean(found.correction_weights).sum, units)
            metrics["correction/changed"] = Ratio(changed, units)
        if found.balance:
            metrics["routing/load_balancing"] = Ratio(sum(float(part) for part in found.balance), updates)
        metrics |= self.routing
        if found.stats:
            metrics |= objective_metrics(_total(found.stats), torch.cat(found.ratios))
        return metrics


def _summary(values: Tensor) -> Tensor:
    found = values.detach().double()
    largest = found.max() if len(found) else found.new_zeros(())
    return torch.stack([found.sum(), found.new_tensor(len(found)), largest])


def _mean(summaries: list[Tensor]) -> Ratio:
    if not summaries:
        return Ratio(0.0, 0)
    total, count, _ = _total(summaries).tolist()
    return Ratio(total, int(count))


def _total(parts: list[Any]) -> Any:
    return sum(parts[1:], parts[0])


def _on_host(entry: Any) -> Any:
    if isinstance(entry, Tensor):
        return entry.cpu()
    if isinstance(entry, ObjectiveStats):
        return entry.map(Tensor.cpu)
    if isinstance(entry, EngineDifferences):
        return EngineDifferences(entry.lengths.cpu(), entry.means.cpu(), entry.squares.cpu())
    return entry
