"""Importance weights between the engine that sampled and the engine that trains."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo.objectives import (
    grpo_loss,
    gspo_loss,
    masked_importance_weights,
    truncated_importance_weights,
)
from tests.objectives.cases import Case, from_ratios, random_case, run


def test_by_token_hand_computed() -> None:
    case = from_ratios([[3.0, 1.5, 0.25], [1.0, 0.6]], [1.0, 1.0])
    cut = truncated_importance_weights(case.logprobs, case.old, case.mask)
    torch.testing.assert_close(cut.weights, torch.tensor([[2.0, 1.5, 0.25], [1.0, 0.6, 0.0]]))
    assert (cut.changed.item(), cut.units.item()) == (1, 5)
    kept = masked_importance_weights(case.logprobs, case.old, case.mask)
    torch.testing.assert_close(kept.weights, torch.tensor([[0.0, 1.5, 0.0], [1.0, 0.6, 0.0]]))
    assert (kept.changed.item(), kept.units.item()) == (2, 5)


def test_by_sequence_is_the_geometric_mean_and_keeps_long_responses() -> None:
    case = from_ratios([[1.01] * 2000, [8.0, 1.0], [0.1]], [1.0, 1.0, 1.0])
    cut = truncated_importance_weights(case.logprobs, case.old, case.mask, level="sequence")
    torch.testing.assert_close(cut.weights, torch.tensor([1.01, 2.0, 0.1]))
    assert (cut.changed.item(), cut.units.item()) == (1, 3)
    kept = masked_importance_weights(case.logprobs, case.old, case.mask, level="sequence")
    torch.testing.assert_close(kept.weights, torch.tensor([1.01, 0.0, 0.0]))


@given(st.integers(0, 1000), st.sampled_from([0.1, 1.0]))
def test_multiplied_advantages_multiply_the_terms(seed: int, spread: float) -> None:
    """The loss of weighted advantages is the weighted loss, clip decisions unchanged."""
    case, engine = random_case(seed), random_case(seed + 1, spread=spread)
    weights = truncated_importance_weights(case.old, case.old + engine.logprobs - engine.old, case.mask).weights
    weighted = Case(case.logprobs, case.old, weights * case.advantages[:, None], case.mask)
    plain_output, plain = run(grpo_loss, case)
    output, gradient = run(grpo_loss, weighted)
    torch.testing.assert_close(gradient, plain * weights)
    assert torch.equal(output.stats.by_token.removed, plain_output.stats.by_token.removed)
    assert np.isfinite(output.loss.item())


def test_constants_and_masked_positions() -> None:
    case = random_case(2)
    case.mask[1] = False
    case.logprobs[~case.mask] = math.nan
    leaf = case.logprobs.clone().requires_grad_()
    for level, units in (("token", int(case.mask.sum())), ("sequence", int(case.mask.any(1).sum()))):
        for correct in (truncated_importance_weights, masked_importance_weights):
            found = correct(leaf, case.old, case.mask, level=level)
            assert not found.weights.requires_grad
            assert found.weights.isfinite().all()
            assert not found.weights[1].any()
            assert found.units.item() == units


def test_sequence_weights_fit_the_sequence_loss() -> None:
    case = from_ratios([[1.1, 1.1], [0.9]], [1.0, -1.0])
    weights = masked_importance_weights(
        case.old, torch.tensor([[-1.0, -1.0], [-3.0, 0.0]]), case.mask, level="sequence"
    ).weights
    torch.testing.assert_close(weights, torch.tensor([1.0, 0.0]))
    weighted = Case(case.logprobs, case.old, weights * case.advantages, case.mask)
    output, gradient = run(gspo_loss, weighted, clip_low=0.2, clip_high=0.2)
    assert output.loss.item() == pytest.approx(-1.1 / 2)
    assert not gradient[1].any()


@pytest.mark.parametrize("bounds", [{"low": 1.2}, {"low": -0.1}, {"high": 1.0}])
def test_bounds_must_enclose_1(bounds: dict[str, float]) -> None:
    case = random_case(3)
    with pytest.raises(ValueError, match="low"):
        masked_importance_weights(case.logprobs, case.old, case.mask, **bounds)


def test_unknown_level_is_refused() -> None:
    case = random_case(3)
    with pytest.raises(Exception, match="level"):
        truncated_importance_weights(case.logprobs, case.old, case.mask, level="turn")
