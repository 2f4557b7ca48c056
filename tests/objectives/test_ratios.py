"""Ratios: the paper's numbers, and what must not change them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo.objectives import kl_k3, sequence_log_ratio, token_log_ratio
from gspo.objectives.ratios import dense_ids, saturate
from tests.objectives.cases import from_ratios, random_case

ratios = st.lists(st.floats(0.5, 2.0), min_size=1, max_size=12)


def s_of(values: list[float]) -> float:
    case = from_ratios([values], [1.0])
    return sequence_log_ratio(case.logprobs, case.old, case.mask).exp().item()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.05, 0.98, 1.02, 1.40, 0.95], 1.0690),
        ([1.20, 0.80, 1.15, 0.90], 0.9984),
        ([1.0, 1.0], 1.0),
        ([4.0, 0.25], 1.0),
    ],
)
def test_geometric_mean_of_hand_computed_cases(values: list[float], expected: float) -> None:
    assert s_of(values) == pytest.approx(expected, abs=5e-5)
    assert s_of(values) == pytest.approx(math.prod(values) ** (1 / len(values)), rel=1e-6)


@given(ratios)
def test_never_above_the_mean_token_ratio(values: list[float]) -> None:
    assert s_of(values) <= np.mean(values) * (1 + 1e-6)


@given(ratios, st.randoms(use_true_random=False), st.integers(0, 5))
def test_order_padding_and_doubling_change_nothing(values: list[float], random, padding: int) -> None:
    shuffled = random.sample(values, len(values))
    expected = pytest.approx(s_of(values), rel=1e-6)
    assert s_of(shuffled) == expected
    assert s_of(values + values) == expected
    case = from_ratios([values, [1.0] * (len(values) + padding)], [1.0, 1.0])
    assert sequence_log_ratio(case.logprobs, case.old, case.mask).exp()[0].item() == expected


def test_token_ratio_is_the_difference_and_zero_where_masked() -> None:
    case = random_case(0)
    expected = np.where(case.mask.numpy(), case.logprobs.numpy() - case.old.numpy(), 0)
    np.testing.assert_array_equal(token_log_ratio(case.logprobs, case.old, case.mask).numpy(), expected)


def test_old_log_probs_get_no_gradient() -> None:
    case = random_case(1)
    new, old = case.logprobs.requires_grad_(), case.old.requires_grad_()
    sequence_log_ratio(new, old, case.mask).sum().backward()
    assert old.grad is None
    lengths = case.mask.sum(1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(new.grad, case.mask / lengths)


def test_spans_take_their_own_mean_whatever_their_numbers() -> None:
    case = from_ratios([[2.0, 4.0, 8.0, 1.0], [1.0, 3.0, 3.0, 1.0]], [1.0, 1.0])
    spans = torch.tensor([[7, 7, -2, 7], [0, 1, 1, 0]])
    mask = torch.tensor([[True, True, True, False], [True, True, True, True]])
    found = sequence_log_ratio(case.logprobs, case.old, mask, spans=spans).exp()
    expected = [[math.sqrt(8), math.sqrt(8), 8, 1], [1, 3, 3, 1]]
    torch.testing.assert_close(found, torch.tensor(expected))


@given(st.lists(st.integers(-5, 5), max_size=20))
def test_dense_ids_keep_equality_and_leave_no_gap(ids: list[int]) -> None:
    found = dense_ids(torch.tensor(ids, dtype=torch.int64)).tolist()
    assert sorted(set(found)) == list(range(len(set(ids))))
    assert all((a == b) == (x == y) for a, x in zip(ids, found, strict=True) for b, y in zip(ids, found, strict=True))


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=8))
def test_saturation_clamps_the_value_and_passes_the_gradient(values: list[float]) -> None:
    x = torch.tensor(values).requires_grad_()
    y = saturate(x)
    y.sum().backward()
    torch.testing.assert_close(y.detach(), torch.tensor([min(max(v, -20.0), 20.0) for v in values]), rtol=0, atol=0)
    assert x.grad.tolist() == [1.0] * len(values)


def test_an_infinite_log_prob_at_a_trainable_token_is_not_hidden() -> None:
    assert saturate(torch.tensor([math.inf, -math.inf, math.nan])).isnan().all()


@given(st.floats(-6, 6))
def test_k3_value_and_gradient(delta: float) -> None:
    logprobs = torch.tensor([[-1.0 + delta, -math.inf]]).requires_grad_()
    kl = kl_k3(logprobs, torch.tensor([[-1.0, math.nan]]), torch.tensor([[True, False]]))
    kl.sum().backward()
    exact = float(logprobs.detach()[0, 0]) + 1.0
    assert kl[0, 0].item() == pytest.approx(math.exp(-exact) - 1 + exact, rel=1e-4, abs=1e-6)
    assert logprobs.grad[0, 0].item() == pytest.approx(1 - math.exp(-exact), rel=1e-5, abs=1e-6)
    assert kl[0, 1].item() == 0
    assert logprobs.grad[0, 1].item() == 0


def test_k3_stays_finite_and_keeps_pulling_when_far_off() -> None:
    logprobs = torch.tensor([[-300.0, 300.0]]).requires_grad_()
    kl = kl_k3(logprobs, torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool))
    kl.sum().backward()
    torch.testing.assert_close(kl[0].detach(), torch.tensor([math.exp(20) - 21, 19.0]))
    torch.testing.assert_close(logprobs.grad[0], torch.tensor([1 - math.exp(20), 1.0]))
