"""The objectives that GSPO is compared with: values, gradients, and where they coincide."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo.objectives import (
    CLIP_RANGES,
    LOSSES,
    Totals,
    cispo_loss,
    dapo_loss,
    dr_grpo_loss,
    gmpo_loss,
    grpo_loss,
    gspo_loss,
    sapo_loss,
)
from tests.objectives import reference
from tests.objectives.cases import from_ratios, random_case, run
from tests.objectives.test_losses import check

seeds = st.integers(0, 10_000)
spreads = st.sampled_from([0.05, 0.5, 1.5])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gspo", (3e-4, 4e-4)),
        ("gspo_token", (3e-4, 4e-4)),
        ("grpo", (0.2, 0.27)),
        ("dr_grpo", (0.2, 0.2)),
        ("dapo", (0.2, 0.28)),
        ("cispo", (1.0, 4.0)),
        ("gmpo", (1 - math.exp(-0.4), math.exp(0.4) - 1)),
        ("sapo", (1.0, math.inf)),
    ],
)
def test_default_clip_ranges_by_name(name: str, expected: tuple[float, float]) -> None:
    assert CLIP_RANGES[name] == pytest.approx(expected)
    assert CLIP_RANGES.keys() == LOSSES.keys()


@given(seeds, spreads)
def test_dr_grpo(seed: int, spread: float) -> None:
    case = random_case(seed, spread=spread)
    output, gradient = run(dr_grpo_loss, case, length=7.0)
    check(output, gradient, reference.dr_grpo(*case.per_token().arrays(), 0.2, 0.2, length=7.0))
    check(*run(dr_grpo_loss, case), reference.dr_grpo(*case.per_token().arrays(), 0.2, 0.2))


@given(seeds, spreads)
def test_dapo_is_a_mean_over_tokens_with_0_2_and_0_28(seed: int, spread: float) -> None:
    case = random_case(seed, spread=spread, token_advantages=True)
    check(*run(dapo_loss, case), reference.dapo(*case.arrays(), 0.2, 0.28))
    check(*run(dapo_loss, case, totals=Totals(6, 100)), reference.dapo(*case.arrays(), 0.2, 0.28, tokens=100))


@given(seeds, spreads, st.sampled_from([(1.0, 4.0), (0.2, 0.3)]))
def test_cispo_weighs_every_token_and_loses_none(seed: int, spread: float, band: tuple[float, float]) -> None:
    case = random_case(seed, spread=spread)
    output, gradient = run(cispo_loss, case, clip_low=band[0], clip_high=band[1])
    check(output, gradient, reference.cispo(*case.per_token().arrays(), *band))
    assert gradient[case.mask & (case.advantages != 0)[:, None]].ne(0).all()
    assert output.stats.by_token.removed.sum() == 0


@given(seeds, spreads, st.sampled_from([CLIP_RANGES["gmpo"], (0.1, 0.1)]))
def test_gmpo(seed: int, spread: float, band: tuple[float, float]) -> None:
    case = random_case(seed, spread=spread)
    output, gradient = run(gmpo_loss, case, clip_low=band[0], clip_high=band[1])
    check(output, gradient, reference.gmpo(*case.arrays(), *band))


@given(seeds, st.sampled_from([0.0, 1.0, 60.0]))
def test_gmpo_without_a_clip_is_gspo_without_one(seed: int, drift: float) -> None:
    case = random_case(seed, drift=drift)
    open_band = {"clip_low": 1.0, "clip_high": math.inf}
    one, gradient_one = run(gspo_loss, case, **open_band)
    two, gradient_two = run(gmpo_loss, case, **open_band)
    torch.testing.assert_close(two.loss, one.loss)
    torch.testing.assert_close(gradient_two, gradient_one)
    assert two.stats.as_floats() == one.stats.as_floats()


@given(seeds, spreads, st.sampled_from([(1.0, 1.05), (2.0, 5.0)]))
def test_sapo(seed: int, spread: float, tau: tuple[float, float]) -> None:
    case = random_case(seed, spread=spread)
    output, gradient = run(sapo_loss, case, temperature_positive=tau[0], temperature_negative=tau[1])
    check(output, gradient, reference.sapo(*case.per_token().arrays(), *tau), atol=1e-6)
    assert output.stats.by_token.outside.sum() == 0


@pytest.mark.parametrize("loss", [grpo_loss, gmpo_loss, sapo_loss])
def test_at_ratio_1_the_gradients_coincide(loss) -> None:
    case = random_case(0, spread=0.0)
    expected = -case.advantages[:, None] * case.mask / case.mask.sum(1, keepdim=True).clamp(min=1) / 6
    torch.testing.assert_close(run(gspo_loss, case, totals=Totals(6, 1))[1], expected)
    torch.testing.assert_close(run(loss, case, totals=Totals(6, 1))[1], expected)


def test_gmpo_counts_the_tokens_it_lets_go_of() -> None:
    case = from_ratios([[2.0, 1.0], [0.5, 2.0]], [1.0, -1.0])
    output, gradient = run(gmpo_loss, case)
    assert output.stats.by_token.removed.tolist() == [[1, 0, 0, 0], [0, 0, 1, 0]]
    assert output.stats.by_token.outside.tolist() == [[1, 0, 0, 0], [1, 0, 1, 0]]
    assert output.stats.by_sequence.removed.sum() == 0
    assert gradient.ne(0).tolist() == [[False, True], [False, True]]
