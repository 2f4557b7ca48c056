"""The cost benchmark compares the same numbers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from gspo.objectives import LOSSES

PATH = Path(__file__).parents[2] / "benchmarks" / "objective.py"
spec = importlib.util.spec_from_file_location("objective_benchmark", PATH)
benchmark = importlib.util.module_from_spec(spec)
spec.loader.exec_module(benchmark)


@pytest.mark.parametrize("name", benchmark.NAIVE)
def test_naive_and_ours_are_the_same_formula(name: str) -> None:
    logprobs, old, advantages, mask = benchmark.inputs(8, 64, "cpu")
    naive = benchmark.NAIVE[name](logprobs, old, advantages, mask)
    ours = LOSSES[name](logprobs, old, advantages, mask).loss
    torch.testing.assert_close(ours, naive)
    gradients = [torch.autograd.grad(value, logprobs, retain_graph=True)[0] for value in (ours, naive)]
    torch.testing.assert_close(*gradients)


def test_a_measurement_reports_time_and_loss() -> None:
    for variant in ("naive", "ours"):
        found = benchmark.measure("gspo", variant, 4, 32, "cpu", 2)
        assert found["ms_min"] > 0
        assert found["peak_mib"] >= 0
        assert found["loss"] == pytest.approx(benchmark.measure("gspo", "naive", 4, 32, "cpu", 1)["loss"], rel=1e-5)
