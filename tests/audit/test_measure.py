"""Numbers that can be derived by hand: known noise goes in, counts and moments come out."""

import math

import pytest
import torch

from gspo.audit.measure import (
    Contender,
    Decisions,
    autocorrelation,
    clip_decisions,
    first_of_span,
    measure_differences,
    outside_before,
    span_lengths,
)

GSPO = Contender("gspo", 0.02, 0.03)
GRPO = Contender("grpo", 0.2, 0.27)


def padded(*rows):
    """Rows of unequal length as [B, T] with a mask; NaN where nothing may look."""
    width = max(map(len, rows))
    values = torch.full((len(rows), width), float("nan"))
    for i, row in enumerate(rows):
        values[i, : len(row)] = torch.tensor(row)
    return values, ~values.isnan()


def test_differences_of_two_responses_by_hand():
    d, mask = padded([0.1, -0.3, 0.2, 0.0], [0.5])
    training = torch.where(mask, -1.0, math.nan)
    found = measure_differences(training, training - d, mask)
    assert found.tokens.count == 5
    assert found.tokens.mean == pytest.approx(1.1 / 5, rel=1e-5)
    assert found.tokens.bias == pytest.approx(0.5 / 5, rel=1e-5)
    assert found.tokens.max == pytest.approx(0.5, rel=1e-5)
    assert found.tokens.p99 == pytest.approx(0.3 + 0.96 * 0.2, rel=1e-5)  # between the 4th and 5th of 5 sorted values
    assert found.identical == pytest.approx(1 / 5)
    assert found.identical_responses == 0
    assert (found.lengths, found.responses.count) == ((4, 1), 2)
    assert found.log_ratios == pytest.approx((0.0, 0.5), abs=1e-6)
    assert (found.responses.mean, found.responses.bias) == pytest.approx((0.25, 0.25), rel=1e-5)
    # Within the first response the squares around its mean 0 sum to .14, over 5 tokens - 2 responses.
    token_std = math.sqrt(0.14 / 3)
    assert found.noise.token_std == pytest.approx(token_std, rel=1e-5)
    one, four = found.by_length
    assert (one.shortest, one.longest, one.responses, one.mean) == (1, 1, 1, pytest.approx(0.5, rel=1e-5))
    assert four.expected_std == pytest.approx(token_std / 2, rel=1e-5)
    assert sum(found.histogram) == 5


def test_autocorrelation_by_hand_looks_at_neighbours_of_one_response_alone():
    # Mean 0; lag 1 pairs: 1*-1, -1*1 | 1*-1. Variance 1.
    delta, mask = padded([1.0, -1.0, 1.0], [1.0, -1.0, 5.0], [-1.0])
    mask[1, 2] = False
    assert autocorrelation(delta, mask, 1) == pytest.approx(-1.0)
    assert autocorrelation(delta, mask, 2) == pytest.approx(1.0)
    assert autocorrelation(delta, mask, 3) is None
    same = torch.ones(2, 4)
    assert autocorrelation(same, same.bool(), 1) is None


def test_independent_noise_has_no_autocorrelation_and_shared_noise_has():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(400, 12, generator=generator, dtype=torch.float64)
    mask = torch.ones(400, 12, dtype=torch.bool)
    assert autocorrelation(noise, mask, 1) == pytest.approx(0.0, abs=0.05)
    shared = noise + torch.randn(400, 1, generator=generator, dtype=torch.float64)
    assert autocorrelation(shared, mask, 3) == pytest.approx(0.5, abs=0.06)


def case():
    """Four responses of two tokens; (training, engine) log s is (.04, .01), (.01, .04), (-.03, -.01), (.04, .04)."""
    mask = torch.ones(4, 2, dtype=torch.bool)
    now = torch.full((4, 2), -1.0)
    training = now - torch.tensor([0.04, 0.01, -0.03, 0.04])[:, None]
    sampler = now - torch.tensor([0.01, 0.04, -0.01, 0.04])[:, None]
    return now, training, sampler, mask


def test_flips_of_sequences_by_hand():
    now, training, sampler, mask = case()
    # The clip takes high ratios at positive advantages (bound log 1.03 = .0296) and low ones at negative (-.0202).
    found = clip_decisions(GSPO, now, training, sampler, torch.tensor([1.0, 1.0, -1.0, 0.0]), mask)
    assert found == Decisions(units=3, removed_training=2, removed_engine=1, flipped=3)
    # With the other signs nothing is clipped in either case.
    assert clip_decisions(GSPO, now, training, sampler, torch.tensor([-1.0, -1.0, 1.0, -1.0]), mask) == Decisions(
        units=4
    )
    assert found + found == Decisions(6, 4, 2, 6)


def test_flips_of_tokens_by_hand():
    now = torch.full((1, 4), -1.0)
    mask = torch.tensor([[True, True, True, False]])
    training = now - torch.tensor([[0.3, 0.1, 0.3, 0.9]])  # bound log 1.27 = .239
    sampler = now - torch.tensor([[0.1, 0.3, 0.4, 0.0]])
    found = clip_decisions(GRPO, now, training, sampler, torch.tensor([2.0]), mask)
    assert found == Decisions(units=3, removed_training=2, removed_engine=2, flipped=2)


def test_a_response_with_an_advantage_per_token_is_decided_by_token():
    now, training, sampler, mask = case()
    advantages = torch.tensor([[1.0, -1.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    # Row 0: its positive token flips; row 1: its only one; row 3: both are clipped in either case.
    found = clip_decisions(GSPO, now, training, sampler, advantages, mask)
    assert found == Decisions(units=5, removed_training=3, removed_engine=3, flipped=2)


def test_ratios_outside_before_any_update_by_hand():
    _, training, _, mask = case()
    sampler = training - torch.tensor([[0.05, 0.0], [0.07, 0.0], [-0.05, 0.0], [0.5, -0.5]])
    mask = mask.clone()
    assert outside_before(GSPO, training, sampler, mask) == (2, 4)  # means .025, .035, -.025, 0
    assert outside_before(GRPO, training, sampler, mask) == (2, 8)
    mask[0] = False
    assert outside_before(GSPO, training, sampler, mask) == (2, 3)


def by_turn():
    """One response: turns of two tokens each, and a token of the environment, where nothing may look, between."""
    mask = torch.tensor([[True, True, False, True, True]])
    spans = torch.tensor([[0, 0, -1, 1, 1]])
    now = torch.tensor([[-1.0, -1.0, math.nan, -1.0, -1.0]])
    training = now - torch.tensor([[0.04, 0.0, 9.0, 0.08, 0.04]])  # log s of the turns .02 and .06, of the whole .04
    sampler = now - torch.tensor([[0.05, 0.03, 9.0, 0.06, 0.06]])  # .04 and .06, .05
    return now, training, sampler, mask, spans


def test_decisions_by_turn_by_hand():
    """The bound is log 1.03 = .0296: the first turn flips, where the whole response would not."""
    now, training, sampler, mask, spans = by_turn()
    gspo = Contender("gspo", 0.02, 0.03, by_turn=True)
    assert gspo.unit == "turn"
    found = clip_decisions(gspo, now, training, sampler, torch.tensor([1.0]), mask, spans)
    assert found == Decisions(units=2, removed_training=1, removed_engine=2, flipped=1)
    whole = clip_decisions(GSPO, now, training, sampler, torch.tensor([1.0]), mask)
    assert whole == Decisions(units=1, removed_training=1, removed_engine=1, flipped=0)
    # By token, each on its turn's ratio: the first flips, the second has no advantage, the third is never clipped.
    advantages = torch.tensor([[1.0, 0.0, 5.0, -1.0, 1.0]])
    found = clip_decisions(gspo, now, training, sampler, advantages, mask, spans)
    assert found == Decisions(units=3, removed_training=1, removed_engine=2, flipped=1)


def test_turns_outside_and_their_lengths_by_hand():
    _, training, _, mask, spans = by_turn()
    gspo = Contender("gspo", 0.02, 0.03, by_turn=True)
    sampler = training - torch.tensor([[0.05, 0.03, 0.0, -0.02, -0.02]])  # .04, and -.02 over log .98 = -.0202
    assert outside_before(gspo, training, sampler, mask, spans) == (1, 2)
    assert outside_before(GSPO, training, sampler, mask) == (0, 1)  # .01
    assert first_of_span(mask, spans).tolist() == [[True, False, False, True, False]]
    assert span_lengths(mask, spans) == [2, 2]
    late = mask & torch.tensor([[False, True, True, False, False]])
    assert first_of_span(late, spans).tolist() == [[False, True, False, False, False]]
    assert span_lengths(late, spans) == [1]
    assert outside_before(gspo, training, sampler, late, spans) == (1, 1)
