"""The objective's counts keep their denominators on the way to the metrics."""

import math

import pytest
import torch

from gspo.objectives import gspo_loss
from gspo.reporting.metrics import Ratio, as_record
from gspo.reporting.objective_metrics import objective_metrics


def test_counts_of_a_batch_worked_by_hand() -> None:
    # three responses of 2, 1 and 3 tokens; log-ratios +0.1, -0.1 and 0; advantages +1, +1 and -1
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]], dtype=torch.bool)
    old = torch.full((3, 3), -1.0)
    new = old + torch.tensor([0.1, -0.1, 0.0])[:, None]
    output = gspo_loss(new, old, torch.tensor([1.0, 1.0, -1.0]), mask, clip_low=0.05, clip_high=0.05)
    metrics = objective_metrics(output.stats, output.log_ratios)

    def ratio(name: str) -> tuple[float, float]:
        metric = metrics[name]
        assert isinstance(metric, Ratio)
        return metric.sum, metric.count

    assert ratio("clip/sequence_outside") == (2, 3)
    assert ratio("clip/token_outside") == (3, 6)
    # a ratio that is too low is still pulled up where the advantage is positive: only the high one loses its gradient
    assert ratio("clip/sequence_removed") == (1, 3)
    assert ratio("clip/token_removed_high_positive") == (2, 6)
    assert ratio("clip/token_removed_low") == (0, 6)
    assert ratio("ratio/saturated") == (0, 3)
    assert ratio("ratio/log_mean") == (pytest.approx(0.0, abs=1e-6), 3)
    assert metrics["ratio/log_max"] == pytest.approx(0.1, rel=1e-5)
    assert metrics["ratio/log_p50"] == pytest.approx(0.0, abs=1e-6)
    as_record(metrics)  # every name has a definition


def test_quantiles_agree_with_torch() -> None:
    values = torch.randn(997, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    stats = gspo_loss(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1, dtype=torch.bool)).stats
    metrics = objective_metrics(stats, values)
    for name, share in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99), ("min", 0.0), ("max", 1.0)):
        assert metrics[f"ratio/log_{name}"] == pytest.approx(float(values.quantile(share)), rel=1e-12)


def test_no_update_gives_no_quantile_and_no_nan() -> None:
    nothing = torch.zeros(0, 3)
    output = gspo_loss(nothing, nothing, torch.zeros(0), nothing.bool())
    record = as_record(objective_metrics(output.stats, output.log_ratios))
    assert "ratio/log_max" not in record
    assert not any(isinstance(value, float) and math.isnan(value) for value in record.values())
    assert record["clip/token_removed"] is None
