"""The counts of the objective as metrics, each with the denominator it was counted over."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.objectives.stats import SIDES, SIGNS, ClipCounts, ObjectiveStats
from gspo.reporting.metrics import Metric, Ratio

_QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


def objective_metrics(stats: ObjectiveStats, log_ratios: Tensor) -> dict[str, Metric]:
    """What the updates of a step did to the ratios, summed over them.

    `log_ratios` [n] are those of every unit of every update (in nats, detached, masked units taken out).
    """
    metrics: dict[str, Metric] = {
        "ratio/log_mean": Ratio(float(stats.log_ratio_sum), int(stats.sequences)),
        "ratio/saturated": Ratio(int(stats.saturated), int(stats.units)),
    }
    if log_ratios.numel():
        values = log_ratios.detach().double().flatten().sort().values.cpu()
        metrics["ratio/log_min"], metrics["ratio/log_max"] = float(values[0]), float(values[-1])
        for name, share in _QUANTILES.items():
            metrics[f"ratio/log_{name}"] = _quantile(values, share)
    metrics |= _clip_metrics("sequence", stats.by_sequence)
    metrics |= _clip_metrics("token", stats.by_token)
    return metrics


def _quantile(ordered: Tensor, share: float) -> float:
    """Linear interpolation between neighbours; `torch.quantile` refuses more than 16 million values."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return float(torch.lerp(ordered[low], ordered[high], place - low))


def _clip_metrics(level: str, counts: ClipCounts) -> dict[str, Metric]:
    whole = int(counts.total.sum())
    metrics: dict[str, Metric] = {}
    for what, table in (("outside", counts.outside), ("removed", counts.removed)):
        cells = table.tolist()
        name = f"clip/{level}_{what}"
        metrics[name] = Ratio(sum(map(sum, cells)), whole)
        for side, row in zip(SIDES, cells, strict=True):
            metrics[f"{name}_{side}"] = Ratio(sum(row), whole)
            for sign, count in zip(SIGNS, row, strict=True):
                metrics[f"{name}_{side}_{sign}"] = Ratio(count, whole)
    return metrics
