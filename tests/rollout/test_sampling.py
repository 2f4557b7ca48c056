from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.rollout.sampling import draw, truncate, uniforms
from gspo.types import Sampling


def test_noise_is_keyed_by_its_arguments_alone() -> None:
    base = uniforms(1, 2, 3, 4, 5)
    assert np.array_equal(base, uniforms(1, 2, 3, 4, 9)[:5])
    others = [uniforms(*key, 5) for key in ((0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0), (2, 1, 3, 4))]
    assert all(not np.array_equal(base, other) for other in others)
    assert ((base >= 0) & (base < 1)).all()


def test_log_probs_are_those_of_the_tempered_softmax() -> None:
    logits = torch.tensor([[0.0, math.log(2.0), math.log(4.0), -torch.inf]])
    # exp(logits / 0.5) = 1, 4, 16: the cumulated shares end at 1/21, 5/21, 1.
    for noise, token, prob in ((0.0, 0, 1 / 21), (0.04, 0, 1 / 21), (0.05, 1, 4 / 21), (0.99, 2, 16 / 21)):
        drawn, logprob, _ = draw(logits, torch.tensor([noise], dtype=torch.float64), Sampling(1, temperature=0.5))
        assert drawn.item() == token
        assert logprob.item() == pytest.approx(math.log(prob), abs=1e-6)


def test_greedy_takes_the_peak_and_reports_the_models_own_log_prob() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)]])
    token, logprob, _ = draw(logits, torch.tensor([0.1], dtype=torch.float64), Sampling(1, temperature=0.0))
    assert token.item() == 1
    assert logprob.item() == pytest.approx(math.log(3 / 4), abs=1e-6)


@settings(max_examples=60)
@given(
    size=st.integers(1, 700),
    noise=st.floats(0, 1, exclude_max=True),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.0, 1.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_draw_inverts_the_cumulated_distribution(
    size: int, noise: float, seed: int, spread: float, dtype: torch.dtype
) -> None:
    logits = (torch.randn(3, size, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)
    logits[1, : size // 2] = -torch.inf
    tokens, logprobs, _ = draw(logits, torch.full((3,), noise, dtype=torch.float64), Sampling(1))
    expected = logits.double().log_softmax(-1)
    ends = expected.exp().cumsum(-1)
    for row, token in enumerate(tokens.tolist()):
        assert logprobs[row].item() == pytest.approx(expected[row, token].item(), abs=1e-5)
        before = ends[row, token - 1].item() if token else 0.0
        assert before - 1e-6 <= noise <= ends[row, token].item() + 1e-6
        assert expected[row, token] > -torch.inf


def test_noise_at_the_very_end_never_draws_an_impossible_token() -> None:
    logits = torch.full((1, 600), -torch.inf)
    logits[0, 100:103] = 0.0
    last = float(np.nextafter(1.0, 0.0))
    token, logprob, _ = draw(logits, torch.tensor([last], dtype=torch.float64), Sampling(1))
    assert token.item() == 102
    assert logprob.item() == pytest.approx(-math.log(3), abs=1e-6)


def test_drawn_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    noise = torch.from_numpy(uniforms(0, 0, 0, 0, 20000))
    tokens, _, _ = draw(logits.expand(20000, -1), noise, Sampling(1))
    counts = torch.bincount(tokens, minlength=4) / 20000
    assert torch.allclose(counts, torch.tensor([0.1, 0.2, 0.3, 0.4]), atol=0.012)  # 3.5 standard errors


@pytest.mark.parametrize(
    ("setting", "kept"),
    [
        ({"top_k": 2}, [0, 2]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.5}, [0, 2]),  # .4 is not yet .5, so the token of .3 is kept too
        ({"top_p": 0.39}, [0]),
        ({"top_p": 1e-9}, [0]),
        ({"min_p": 0.5}, [0, 1, 2]),
        ({"min_p": 0.6}, [0, 2]),
        ({"top_k": 3, "top_p": 0.75}, [0, 2]),  # shares after top-k: 4/9, 3/9, 2/9; 7/9 is past .75
    ],
)
def test_truncation_keeps_the_right_support_and_renormalises(setting: dict[str, Any], kept: list[int]) -> None:
    probs = torch.tensor([[0.4, 0.2, 0.3, 0.1]])
    sampling = Sampling(1, **setting)
    assert torch.isfinite(truncate(probs.log(), sampling))[0].nonzero()[:, 0].tolist() == kept
    noise = torch.from_numpy(uniforms(0, 0, 0, 0, 200))
    tokens, logprobs, support = draw(probs.log().expand(200, -1), noise, sampling)
    assert set(tokens.tolist()) == set(kept)
    assert support is not None
    assert all(row.nonzero()[:, 0].tolist() == kept for row in support)
    expected = (probs[0] / probs[0, kept].sum()).log()[tokens]
    assert torch.allclose(logprobs, expected, atol=1e-6)


def test_non_finite_logits_show_in_the_log_prob_of_their_row_only() -> None:
    logits = torch.zeros(3, 5)
    logits[0, 3], logits[2, 1] = torch.nan, torch.inf
    _, logprobs, _ = draw(logits, torch.full((3,), 0.5, dtype=torch.float64), Sampling(1))
    assert torch.isfinite(logprobs).tolist() == [False, True, False]


def test_each_turn_has_noise_of_its_own_and_the_first_that_of_a_single_response() -> None:
    streams = {turn: tuple(uniforms(1, 2, 3, 4, 5, turn=turn)) for turn in range(4)}
    assert streams[0] == tuple(uniforms(1, 2, 3, 4, 5))
    assert len({values[0] for values in streams.values()}) == 4
    assert streams[1] != tuple(uniforms(1, 2, 3, 5, 5, turn=0))


@given(
    size=st.integers(1, 300),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.0, 1.0, 5.0, 60.0]),
    top_p=st.floats(0.01, 0.999),
    coarse=st.booleans(),
)
def test_the_nucleus_is_the_shortest_run_of_likeliest_tokens_of_enough_mass(
    size: int, seed: int, spread: float, top_p: float, coarse: bool
) -> None:
    logits = torch.randn(3, size, generator=torch.Generator().manual_seed(seed)) * spread
    if coarse:  # many equals
        logits = logits.round()
    kept = truncate(logits, Sampling(1, top_p=top_p)) > -torch.inf
    exact = logits.double().softmax(-1)
    for row in range(3):
        order = exact[row].sort(descending=True, stable=True).indices
        count = int(kept[row].sum())
        assert count >= 1
        assert kept[row, order[:count]].all()
        masses = exact[row, order].cumsum(0)
        assert masses[count - 1] >= top_p - 1e-5
        assert count == 1 or masses[count - 2] < top_p + 1e-5


def test_a_nucleus_of_five_tokens_by_hand() -> None:
    """Shares .4 .3 .15 .1 .05 and top-p .8: .4 and .7 are not enough, .85 is; the drawn one has .3 / .85."""
    logits = torch.tensor([[0.05, 0.4, 0.15, 0.3, 0.1]]).log() * 2 + 3
    sampling = Sampling(1, temperature=2.0, top_p=0.8)
    token, logprob, kept = draw(logits, torch.tensor([0.7], dtype=torch.float64), sampling)
    assert kept is not None
    assert kept[0].tolist() == [False, True, True, True, False]
    assert token.item() == 3  # by id the shares end at .4 / .85 = .47, .55 / .85 = .65, 1
    assert logprob.item() == pytest.approx(math.log(0.3 / 0.85), abs=1e-6)
