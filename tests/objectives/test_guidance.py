"""The clip range that noise calls for, against simulation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo.objectives import (
    EngineNoise,
    clip_range_below_noise,
    engine_differences,
    measure_noise,
    noise_outside,
    suggest_clip_range,
)


def simulate(noise: EngineNoise, lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    rows, width = len(lengths), max(lengths)
    shared = noise.response_std * torch.randn(rows, 1, generator=g)
    delta = noise.bias + shared + noise.token_std * torch.randn(rows, width, generator=g)
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    old = torch.full((rows, width), -1.0)
    return torch.where(mask, old + delta, math.nan), old, mask


def measured(*data: torch.Tensor) -> EngineNoise:
    return measure_noise(engine_differences(*data))


def check(*data: torch.Tensor, clip_low: float, clip_high: float) -> str | None:
    return clip_range_below_noise(engine_differences(*data), clip_low=clip_low, clip_high=clip_high)


def test_measured_noise_is_the_simulated_one() -> None:
    noise = EngineNoise(bias=-0.003, response_std=0.01, token_std=0.04)
    found = measured(*simulate(noise, [40, 80, 160, 20] * 500))
    assert found.bias == pytest.approx(noise.bias, abs=5e-4)
    assert found.response_std == pytest.approx(noise.response_std, rel=0.1)
    assert found.token_std == pytest.approx(noise.token_std, rel=0.02)


def test_independent_token_noise_leaves_no_response_noise() -> None:
    found = measured(*simulate(EngineNoise(0.0, 0.0, 0.04), [100] * 400))
    assert found.response_std < 0.002
    assert found.std_of_mean(100) == pytest.approx(0.004, rel=0.15)


@pytest.mark.parametrize(("length", "expected"), [(100, 0.42), (1_000, 0.26), (4_000, 0.10), (16_000, 0.006)])
def test_share_above_the_papers_range_by_length(length: int, expected: float) -> None:
    noise = EngineNoise(0.0, 0.0, 0.02)
    above = noise_outside(noise, [length], clip_low=1.0, clip_high=4e-4)
    assert above == pytest.approx(expected, abs=0.006)


@given(
    st.floats(-1e-3, 1e-3),
    st.floats(0, 5e-3),
    st.floats(1e-4, 0.1),
    st.lists(st.integers(1, 5000), min_size=1, max_size=5),
    st.floats(0.01, 0.5),
)
def test_suggested_range_leaves_out_no_more_than_the_share(bias, response, token, lengths, share) -> None:
    noise = EngineNoise(bias, response, token)
    low, high = suggest_clip_range(noise, lengths, share=share)
    assert 0 <= low < 1
    assert high >= 0
    found = noise_outside(noise, lengths, clip_low=low, clip_high=high)
    assert found <= share * (1 + 1e-6)
    if low > 0 and high > 0:
        assert found == pytest.approx(share, rel=1e-3)


def test_suggestion_holds_in_simulation() -> None:
    noise, lengths = EngineNoise(-0.001, 0.002, 0.04), [30, 90, 200] * 700
    low, high = suggest_clip_range(noise, lengths, share=0.1)
    logprobs, old, mask = simulate(noise, lengths, seed=1)
    ratio = ((logprobs - old).nan_to_num() * mask).sum(1).div(mask.sum(1)).exp()
    outside = ((ratio < 1 - low) | (ratio > 1 + high)).double().mean().item()
    assert outside == pytest.approx(0.1, abs=0.02)


def test_engines_that_agree_need_no_range() -> None:
    silent = EngineNoise(0.0, 0.0, 0.0)
    assert suggest_clip_range(silent, [10]) == (0.0, 0.0)
    assert noise_outside(silent, [10], clip_low=3e-4, clip_high=4e-4) == 0
    assert suggest_clip_range(EngineNoise(1e-3, 0.0, 0.0), [10]).clip_high == pytest.approx(1e-3, rel=1e-3)


def test_a_range_below_the_noise_is_reported_with_its_figures() -> None:
    noise, lengths = EngineNoise(0.0, 0.0, 0.04), [90] * 256
    warning = check(*simulate(noise, lengths), clip_low=3e-4, clip_high=4e-4)
    assert warning is not None
    assert "\n" not in warning
    for part in ("below the numerical noise", "256 responses", "[1 - 0.0003, 1 + 0.0004]", "90 tokens", "clip_low = "):
        assert part in warning
    low, high = suggest_clip_range(measured(*simulate(noise, lengths)), lengths)
    assert f"clip_low = {low:.2g} and clip_high = {high:.2g}" in warning


def test_a_range_above_the_noise_is_not() -> None:
    data = simulate(EngineNoise(0.0, 0.0, 0.04), [90] * 256)
    assert check(*data, clip_low=0.02, clip_high=0.02) is None
    logprobs, old, mask = data
    assert check(old, old, mask, clip_low=3e-4, clip_high=4e-4) is None
    assert check(logprobs, old, torch.zeros_like(mask), clip_low=0.0, clip_high=0.0) is None


def test_what_cannot_be_computed_is_refused() -> None:
    noise = EngineNoise(0.0, 0.0, 0.1)
    for lengths, share in (([], 0.1), ([0, 3], 0.1), ([5], 0.0), ([5], 1.0)):
        with pytest.raises(ValueError, match=r"lengths|share"):
            suggest_clip_range(noise, lengths, share=share)
    logprobs, old, mask = simulate(noise, [3])
    with pytest.raises(ValueError, match="no trainable token"):
        measured(logprobs, old, torch.zeros_like(mask))


def test_differences_do_not_wait_for_the_device() -> None:
    logprobs = torch.zeros(2, 3, device="meta")
    assert engine_differences(logprobs, logprobs, logprobs > 0).means.is_meta


def test_differences_of_micro_batches_add_up() -> None:
    logprobs, old, mask = simulate(EngineNoise(1e-3, 2e-3, 0.04), [30, 7, 90, 12])
    mask[1] = False
    whole = engine_differences(logprobs, old, mask)
    parts = engine_differences(logprobs[:2, :30], old[:2, :30], mask[:2, :30]) + engine_differences(
        logprobs[2:], old[2:], mask[2:]
    )
    assert measure_noise(parts) == measure_noise(whole)
    delta = (logprobs - old).double()
    means = [delta[i, :n].mean().item() for i, n in ((0, 30), (2, 90), (3, 12))]
    within = sum(delta[i, :n].var().item() * (n - 1) for i, n in ((0, 30), (2, 90), (3, 12))) / (132 - 3)
    assert measure_noise(whole).bias == pytest.approx(sum(means) / 3)
    assert measure_noise(whole).token_std == pytest.approx(math.sqrt(within))
