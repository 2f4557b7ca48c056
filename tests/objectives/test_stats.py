"""Clip accounting: by sequence and by token, outside the band and gradient removed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo.objectives import grpo_loss, gspo_loss, gspo_token_loss
from tests.objectives.cases import from_ratios, random_case, run

BAND = {"clip_low": 0.2, "clip_high": 0.27}


def test_a_clipped_response_of_1000_tokens_counts_once_and_1000_times() -> None:
    case = from_ratios([[1.5] * 1000, [1.0] * 10], [1.0, 1.0])
    figures = run(gspo_loss, case)[0].stats.as_floats()
    assert figures["sequences"] == 2
    assert figures["tokens"] == 1010
    assert figures["sequence_removed"] == figures["sequence_removed_high_positive"] == 1 / 2
    assert figures["token_removed"] == figures["token_removed_high_positive"] == 1000 / 1010


def test_outside_the_band_is_not_gradient_removed() -> None:
    rows = [[1.5], [1.5, 1.5], [0.5, 0.5, 0.5], [0.5], [1.0], [1.5]]
    stats = run(gspo_loss, from_ratios(rows, [1.0, -1.0, 1.0, -1.0, 1.0, 0.0]), **BAND)[0].stats
    columns = {"negative": 0, "zero": 1, "positive": 2}
    assert stats.by_sequence.total.tolist() == [2, 1, 3, 0]
    assert stats.by_sequence.outside.tolist() == [[1, 0, 1, 0], [1, 1, 1, 0]]
    assert stats.by_sequence.removed.tolist() == [[1, 0, 0, 0], [0, 0, 1, 0]]
    assert stats.by_token.total.tolist() == [3, 1, 5, 0]
    assert stats.by_token.outside[0, columns["positive"]].item() == 3
    assert stats.by_token.outside[1].tolist() == [2, 1, 1, 0]
    assert stats.by_token.removed.tolist() == [[1, 0, 0, 0], [0, 0, 1, 0]]


def test_masked_rows_are_in_neither_numerator_nor_denominator() -> None:
    case = from_ratios([[1.5, 1.5], [1.5, 1.5]], [1.0, 1.0])
    case.mask[1] = False
    stats = run(gspo_loss, case, **BAND)[0].stats
    assert (stats.sequences.item(), stats.tokens.item(), stats.units.item()) == (1, 2, 1)
    assert stats.by_sequence.removed.sum().item() == 1
    assert stats.as_floats()["token_removed"] == 1


def test_token_objective_counts_a_sequence_when_all_its_tokens_are() -> None:
    case = from_ratios([[1.5, 1.5], [1.5, 1.0]], [1.0, 1.0])
    stats = run(grpo_loss, case, **BAND)[0].stats
    assert stats.by_token.removed[1, 2].item() == 3
    assert stats.by_sequence.removed[1, 2].item() == 1
    assert (stats.units.item(), stats.saturated.item()) == (4, 0)


def test_mixed_signs_have_a_column_of_their_own() -> None:
    case = from_ratios([[1.5, 1.5], [1.5, 1.5]], [[0.7, -0.3], [0.7, 0.3]])
    stats = run(gspo_token_loss, case, **BAND)[0].stats
    assert stats.by_sequence.total.tolist() == [0, 0, 1, 1]
    assert stats.by_sequence.outside.tolist() == [[0, 0, 0, 0], [0, 0, 1, 1]]
    assert stats.by_sequence.removed.tolist() == [[0, 0, 0, 0], [0, 0, 1, 0]]
    assert stats.by_token.outside[1].tolist() == [1, 0, 3, 0]
    assert stats.by_token.removed[1].tolist() == [0, 0, 3, 0]


def test_spans_are_counted_one_by_one() -> None:
    case = from_ratios([[1.5, 1.5, 1.0, 0.5], [1.5, 1.5, 1.5, 1.5]], [[1.0, 1.0, 1.0, -1.0], [1.0, -1.0, 1.0, 1.0]])
    spans = torch.tensor([[0, 0, 1, 2], [0, 0, 1, 1]])
    stats = run(gspo_token_loss, case, spans=spans, **BAND)[0].stats
    assert (stats.sequences.item(), stats.units.item()) == (2, 5)
    assert stats.by_sequence.total.tolist() == [1, 0, 3, 1]
    assert stats.by_sequence.outside.tolist() == [[1, 0, 0, 0], [0, 0, 2, 1]]
    assert stats.by_sequence.removed.tolist() == [[1, 0, 0, 0], [0, 0, 2, 0]]
    assert stats.by_token.removed.tolist() == [[1, 0, 0, 0], [0, 0, 5, 0]]


def test_saturated_spans_are_counted() -> None:
    case = from_ratios([[1.0, 1.0, 1.0]], [1.0])
    case.logprobs[0, 2] += 200
    stats = run(gspo_token_loss, case, spans=torch.tensor([[0, 0, 1]]))[0].stats
    assert (stats.units.item(), stats.saturated.item()) == (2, 1)


@given(st.integers(0, 10_000), st.integers(0, 6), st.sampled_from([gspo_loss, gspo_token_loss, grpo_loss]))
def test_adding_two_records_is_exact(seed: int, cut: int, loss) -> None:
    case = random_case(seed, spread=0.5)
    whole = run(loss, case, **BAND)[0].stats
    halves = [run(loss, case.rows(rows), **BAND)[0].stats for rows in (slice(0, cut), slice(cut, 6))]
    both = halves[0] + halves[1]
    for level in ("by_sequence", "by_token"):
        for table in ("total", "outside", "removed"):
            assert torch.equal(getattr(getattr(both, level), table), getattr(getattr(whole, level), table))
    assert both.log_ratio_sum.item() == pytest.approx(whole.log_ratio_sum.item(), rel=1e-6, abs=1e-6)
    assert (both.sequences.item(), both.tokens.item()) == (whole.sequences.item(), whole.tokens.item())


def test_as_floats_is_the_mean_log_ratio_and_shares_that_add_up() -> None:
    case = from_ratios([[1.5, 1.5], [0.5, 0.5, 0.5]], [1.0, -1.0])
    figures = run(gspo_loss, case, **BAND)[0].stats.as_floats()
    assert figures["log_ratio_mean"] == pytest.approx((torch.tensor([1.5, 0.5]).log().sum() / 2).item())
    for level in ("sequence", "token"):
        for what in ("outside", "removed"):
            name = f"{level}_{what}"
            assert figures[name] == pytest.approx(figures[f"{name}_low"] + figures[f"{name}_high"])
            assert figures[name] == 1


def test_map_reaches_every_tensor() -> None:
    stats = run(gspo_loss, random_case(0))[0].stats
    doubled = stats.map(lambda tensor: tensor * 2)
    both = (stats + stats).as_floats()
    assert doubled.as_floats() == both
