"""What the updates of one rollout batch report, as sums with their denominators."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gspo.objectives import Correction, ObjectiveOutput, ObjectiveStats, clip_range_below_noise, engine_differences
from gspo.objectives.guidance import EngineDifferences
from gspo.reporting.metrics import Metric, Ratio
from gspo.reporting.objective_metrics import objective_metrics
from gspo.types import Batch, Scores


class UpdateMetrics:
    """Collects figures on the device; `as_metrics` waits for it once."""

    def __init__(self) -> None:
        self.skipped = 0
        self.learning_rate: float | None = None
        self.warning: str | None = None
        self.routing: dict[str, Metric] = {}
        self._differences: EngineDifferences | None = None
        self._stats: ObjectiveStats | None = None
        self._losses: list[Tensor] = []
        self._norms: list[float] = []
        self._ratios: list[Tensor] = []
        self._entropy: list[Tensor] = []
        self._kl: list[Tensor] = []
        self._token_mismatch: list[Tensor] = []
        self._sequence_mismatch: list[Tensor] = []
        self._agreement: list[tuple[float, int]] = []
        self._corrections: list[Correction] = []
        self._balance: list[Tensor] = []

    def mismatch(self, scores: Scores, batch: Batch) -> None:
        """Sampler against training engine, at the weights that sampled.

        Where the sampler's log-probs stand in the ratio, this is how far ratios are from 1 before any update.
        """
        if batch.old_logprobs is not None:
            found = engine_differences(scores.logprobs, batch.old_logprobs, batch.mask)
            self._differences = found if self._differences is None else self._differences + found
        difference = (batch.sampler_logprobs - scores.logprobs.detach()).where(batch.mask, 0.0)
        self._token_mismatch.append(difference.abs()[batch.mask])
        means = difference.sum(1) / batch.mask.sum(1).clamp(min=1)
        self._sequence_mismatch.append(means.abs()[batch.mask.any(1)])

    def judge_clip_range(self, clip_low: float, clip_high: float) -> None:
        """Sets `warning` if ratios leave the clip range by the engines' noise alone."""
        if self._differences is not None:
            self.warning = clip_range_below_noise(self._differences, clip_low=clip_low, clip_high=clip_high)

    def micro_batch(self, output: ObjectiveOutput, loss: Tensor, scores: Scores, batch: Batch) -> None:
        """One forward pass of an update; `loss` is its share of the mini-batch's loss, the KL included."""
        self._stats = output.stats if self._stats is None else self._stats + output.stats
        self._losses.append(loss.detach())
        units = batch.mask if output.log_ratios.ndim == 2 else batch.mask.any(1)
        self._ratios.append(output.log_ratios[units])
        self._entropy.append(scores.entropy.detach()[batch.mask])

    def kl(self, per_token: Tensor, batch: Batch) -> None:
        """The KL estimate [B, T] of one forward pass."""
        self._kl.append(per_token.detach()[batch.mask])

    def correction(self, found: Correction) -> None:
        """The weights of one forward pass's rollouts for what the engines disagree by."""
        self._corrections.append(found)

    def load_balancing(self, part: Tensor, weight: float) -> None:
        """One forward pass's part of the auxiliary loss, which the mini-batch's loss has `weight` times."""
        self._balance.append(part.detach())
        self._losses.append(weight * part.detach())

    def replayed(self, scores: Scores, tokens: int) -> None:
        """One forward pass of an update that is over; `tokens` were fed."""
        self._agreement += [(share, tokens) for share in (scores.agreement or {}).values()]

    def update(self, gradient_norm: float, learning_rate: float) -> None:
        """One optimizer update, with the gradient's norm before it was scaled down."""
        self._norms.append(gradient_norm)
        self.learning_rate = learning_rate

    def as_metrics(self) -> dict[str, Metric]:
        """Every figure by its name in `gspo.reporting.metrics.METRICS`."""
        updates = len(self._norms)
        finite = [norm for norm in self._norms if math.isfinite(norm)]
        metrics: dict[str, Metric] = {
            "optimizer/updates": updates,
            "optimizer/skipped": self.skipped,
            "optimizer/non_finite": updates - len(finite),
            "optimizer/gradient_norm": Ratio(sum(finite), len(finite)),
            "objective/loss": Ratio(sum(float(loss) for loss in self._losses), updates),
            "policy/entropy": _mean(self._entropy),
            "mismatch/token": _mean(self._token_mismatch),
            "mismatch/sequence": _mean(self._sequence_mismatch),
        }
        if self.learning_rate is not None:
            metrics["optimizer/learning_rate"] = self.learning_rate
        if any(len(part) for part in self._token_mismatch):
            metrics["mismatch/token_max"] = float(torch.cat(self._token_mismatch).max())
        if self._kl:
            metrics["policy/kl"] = _mean(self._kl)
        if self._agreement:
            metrics["routing/agreement"] = Ratio(
                sum(share * tokens for share, tokens in self._agreement), sum(tokens for _, tokens in self._agreement)
            )
            metrics["routing/agreement_min"] = min(share for share, _ in self._agreement)
        if self._corrections:
            units = sum(int(c.units) for c in self._corrections)
            metrics["correction/weight"] = Ratio(sum(float(c.weights.double().sum()) for c in self._corrections), units)
            metrics["correction/changed"] = Ratio(sum(int(c.changed) for c in self._corrections), units)
        if self._balance:
            metrics["routing/load_balancing"] = Ratio(sum(float(part) for part in self._balance), updates)
        metrics |= self.routing
        if self._stats is not None:
            metrics |= objective_metrics(self._stats, torch.cat(self._ratios))
        return metrics


def _mean(parts: list[Tensor]) -> Ratio:
    return Ratio(float(sum(part.double().sum() for part in parts)), sum(len(part) for part in parts))
