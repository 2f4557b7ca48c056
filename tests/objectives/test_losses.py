"""Values and gradients of GSPO, GSPO-token and GRPO against the float64 derivation, and what they share."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo.objectives import LOSSES, Totals, gmpo_loss, grpo_loss, gspo_loss, gspo_token_loss
from tests.objectives import reference
from tests.objectives.cases import Case, from_ratios, random_case, run

seeds = st.integers(0, 10_000)
bands = st.sampled_from([(3e-4, 4e-4), (0.2, 0.27), (1.0, math.inf), (0.05, 0.01)])
spreads = st.sampled_from([1e-3, 0.05, 0.5])


def check(output, gradient, expected, atol: float = 1e-7) -> None:
    loss, grad = expected
    assert output.loss.item() == pytest.approx(loss, rel=2e-5, abs=2e-6)
    np.testing.assert_allclose(gradient.numpy(), grad, rtol=5e-5, atol=atol)


@given(seeds, bands, spreads)
def test_gspo_is_the_papers_in_value_and_gradient(seed: int, band, spread: float) -> None:
    case = random_case(seed, spread=spread)
    output, gradient = run(gspo_loss, case, clip_low=band[0], clip_high=band[1])
    check(output, gradient, reference.gspo(*case.arrays(), *band))


@given(seeds, bands, spreads, st.booleans())
def test_gspo_token_is_the_papers_in_value_and_gradient(seed: int, band, spread: float, with_spans: bool) -> None:
    case = random_case(seed, spread=spread, token_advantages=True)
    spans = torch.randint(-1, 3, case.mask.shape, generator=torch.Generator().manual_seed(seed))
    options = {"spans": spans} if with_spans else {}
    output, gradient = run(gspo_token_loss, case, clip_low=band[0], clip_high=band[1], **options)
    expected = reference.gspo_token(*case.arrays(), *band, spans=spans.numpy() if with_spans else None)
    check(output, gradient, expected)


@given(seeds, bands, spreads, st.sampled_from([None, 1.5]))
def test_grpo_value_and_gradient_with_and_without_dual_clip(seed: int, band, spread: float, dual) -> None:
    case = random_case(seed, spread=spread)
    dual = dual if band[1] < 0.5 else None
    output, gradient = run(grpo_loss, case, clip_low=band[0], clip_high=band[1], dual_clip=dual)
    check(output, gradient, reference.grpo(*case.per_token().arrays(), *band, dual=dual))


@given(seeds, bands, st.sampled_from([0.0, 1.0, 60.0]))
def test_gspo_token_with_equal_advantages_is_gspo(seed: int, band, drift: float) -> None:
    case = random_case(seed, drift=drift)
    one, grad_one = run(gspo_loss, case, clip_low=band[0], clip_high=band[1])
    for other_case in (case, case.per_token()):
        two, grad_two = run(gspo_token_loss, other_case, clip_low=band[0], clip_high=band[1])
        torch.testing.assert_close(two.loss, one.loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grad_two, grad_one, rtol=1e-5, atol=1e-9)
        assert two.stats.as_floats() == one.stats.as_floats()
        torch.testing.assert_close(two.log_ratios, one.log_ratios)


def test_the_gradient_is_one_weight_a_response() -> None:
    case = from_ratios([[1.05, 0.98, 1.02, 1.40, 0.95]], [1.0])
    output, gradient = run(gspo_loss, case, clip_low=0.2, clip_high=0.27)
    s = (1.05 * 0.98 * 1.02 * 1.40 * 0.95) ** 0.2
    assert output.loss.item() == pytest.approx(-s, rel=1e-6)
    np.testing.assert_allclose(gradient, [[-s / 5] * 5], rtol=1e-6)
    clipped, none = run(gspo_loss, case)
    assert clipped.loss.item() == pytest.approx(-1.0004, rel=1e-6)
    assert not none.any()


def test_mixed_signs_are_decided_token_by_token_on_the_shared_ratio() -> None:
    case = from_ratios([[1.5, 1.5, 1.5]], [[0.7, -0.3, 0.0]])
    output, gradient = run(gspo_token_loss, case, clip_low=0.2, clip_high=0.27)
    np.testing.assert_allclose(gradient, [[0.0, 1.5 * 0.3 / 3, 0.0]], rtol=1e-6)
    assert output.loss.item() == pytest.approx(-(1.27 * 0.7 - 1.5 * 0.3) / 3, rel=1e-6)
    below, gradient = run(gspo_token_loss, replace(case, logprobs=2 * case.old - case.logprobs), clip_low=0.2)
    np.testing.assert_allclose(gradient[:, 2], [0.0])
    np.testing.assert_allclose(gradient[:, :2], [[-0.7 / 1.5 / 3, 0.0]], rtol=1e-6)
    assert below.loss.item() == pytest.approx(-(0.7 / 1.5 - 0.8 * 0.3) / 3, rel=1e-6)


def test_dual_clip_bounds_large_ratios_at_negative_advantages() -> None:
    case = from_ratios([[4.0], [4.0], [2.5]], [-1.0, 1.0, -1.0])
    output, gradient = run(gspo_loss, case, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert output.loss.item() == pytest.approx((3.0 - 1.2 + 2.5) / 3, rel=1e-6)
    np.testing.assert_allclose(gradient, [[0], [0], [2.5 / 3]], rtol=1e-6)
    removed = output.stats.by_sequence.removed.tolist()
    assert removed == [[0, 0, 0, 0], [1, 0, 1, 0]]
    token, token_gradient = run(gspo_token_loss, case, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    torch.testing.assert_close(token.loss, output.loss)
    torch.testing.assert_close(token_gradient, gradient)


ALL = list(LOSSES.values())
CLIPPED = [gspo_loss, gspo_token_loss, grpo_loss]


@pytest.mark.parametrize("loss", ALL)
@given(seeds, st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_any_split_into_micro_batches_adds_up(loss, seed: int, place: list[int]) -> None:
    """Any rows in any of four micro-batches, some empty, some without a trainable token, each padded to its longest."""
    case = random_case(seed)
    case.mask[seed % 6] = False
    totals = Totals(6, int(case.mask.sum()))
    whole, gradient = run(loss, case, totals=totals)
    outputs, found = [], torch.zeros_like(gradient)
    for number in range(4):
        rows = [row for row, at in enumerate(place) if at == number]
        part = case.rows(rows)
        width = int(part.mask.any(0).nonzero().max()) + 1 if part.mask.any() else 0
        cut = Case(part.logprobs[:, :width], part.old[:, :width], part.advantages, part.mask[:, :width])
        output, part_gradient = run(loss, cut, totals=totals)
        outputs.append(output)
        found[rows, :width] = part_gradient
    torch.testing.assert_close(sum(o.loss for o in outputs), whole.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-9)
    stats = outputs[0].stats + outputs[1].stats + outputs[2].stats + outputs[3].stats
    assert stats.as_floats() == pytest.approx(whole.stats.as_floats(), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("loss", ALL)
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan, 1e4])
def test_whatever_stands_at_masked_positions_changes_nothing(loss, poison: float) -> None:
    case = random_case(3)
    case.mask[2] = False
    clean, gradient = run(loss, case)
    poisoned = Case(
        torch.where(case.mask, case.logprobs, poison),
        torch.where(case.mask, case.old, -poison),
        torch.where(case.mask.any(1), case.advantages, poison),
        case.mask,
    )
    found, poisoned_gradient = run(loss, poisoned)
    assert found.loss.item() == clean.loss.item()
    assert torch.equal(poisoned_gradient, gradient)
    assert not poisoned_gradient[~case.mask].any()
    assert found.stats.as_floats() == clean.stats.as_floats()
    if loss not in (gspo_loss, gmpo_loss):
        token = replace(poisoned, advantages=torch.where(case.mask, case.advantages[:, None], poison))
        assert torch.equal(run(loss, token)[1], gradient)


@pytest.mark.parametrize("loss", ALL)
def test_without_totals_rows_without_a_trainable_token_do_not_count(loss) -> None:
    case = random_case(4)
    padded = Case(
        torch.cat([case.logprobs, torch.zeros(2, 9)]),
        torch.cat([case.old, torch.zeros(2, 9)]),
        torch.cat([case.advantages, torch.ones(2)]),
        torch.cat([case.mask, torch.zeros(2, 9, dtype=torch.bool)]),
    )
    torch.testing.assert_close(run(loss, padded)[0].loss, run(loss, case)[0].loss)
    half = run(loss, case, totals=Totals(2 * len(case.mask), 2 * int(case.mask.sum())))[0]
    torch.testing.assert_close(2 * half.loss, run(loss, case)[0].loss)


@pytest.mark.parametrize("loss", ALL)
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (3, 5)])
def test_no_rows_no_tokens_and_nothing_trainable_give_zero(loss, shape: tuple[int, int]) -> None:
    case = Case(torch.zeros(shape), torch.zeros(shape), torch.ones(shape[0]), torch.zeros(shape, dtype=torch.bool))
    for options in ({}, {"totals": Totals(4, 20)}, {"totals": Totals(0, 0)}):
        output, gradient = run(loss, case, **options)
        assert output.loss.item() == 0
        assert not gradient.any()
        assert output.stats.tokens.item() == output.stats.sequences.item() == output.stats.units.item() == 0


@pytest.mark.parametrize("loss", CLIPPED)
@pytest.mark.parametrize("drift", [200.0, -200.0])
def test_saturated_units_stay_finite_keep_their_weight_and_are_counted(loss, drift: float) -> None:
    case = from_ratios([[1.0] * 4, [1.0] * 3], [-1.0 if drift > 0 else 1.0, 0.5])
    case.logprobs[0] += drift
    output, gradient = run(loss, case)
    s = math.exp(math.copysign(20, drift))
    sign = 1 if drift > 0 else -1
    np.testing.assert_allclose(gradient[0], [sign * s / 4 / 2] * 4, rtol=1e-5)
    assert output.loss.item() == pytest.approx((sign * s - 0.5) / 2, rel=1e-6)
    assert output.stats.saturated.item() == (4 if loss is grpo_loss else 1)
    assert output.log_ratios.abs().max().item() == pytest.approx(200)


@pytest.mark.parametrize("loss", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_computed_in_float32(loss, dtype: torch.dtype) -> None:
    case = random_case(5)
    half = replace(case, logprobs=case.logprobs.to(dtype), old=case.old.to(dtype))
    full = replace(case, logprobs=half.logprobs.float(), old=half.old.float())
    output, gradient = run(loss, half)
    expected, expected_gradient = run(loss, full)
    assert output.loss.dtype == output.log_ratios.dtype == torch.float32
    assert torch.equal(output.loss, expected.loss)
    assert torch.equal(gradient, expected_gradient.to(dtype))


@pytest.mark.parametrize("loss", ALL)
def test_old_log_probs_and_advantages_are_constants(loss) -> None:
    case = random_case(6)
    old, advantages = case.old.requires_grad_(), case.advantages.requires_grad_()
    run(loss, case)
    assert old.grad is None
    assert advantages.grad is None


@pytest.mark.parametrize("loss", ALL)
def test_nothing_waits_for_the_device(loss) -> None:
    """On `meta` there are no values: anything that asks for one raises."""
    case = random_case(7)
    on_meta = Case(*(x.to("meta") for x in (case.logprobs, case.old, case.advantages, case.mask)))
    output = loss(on_meta.logprobs.requires_grad_(), on_meta.old, on_meta.advantages, on_meta.mask)
    output.loss.backward()
    assert output.stats.saturated.is_meta
    if loss is gspo_token_loss:
        spans = torch.zeros_like(on_meta.mask, dtype=torch.int64)
        assert loss(*(on_meta.logprobs, on_meta.old, on_meta.advantages, on_meta.mask), spans=spans).loss.is_meta


@pytest.mark.parametrize("loss", ALL)
def test_wrong_shapes_and_ranges_are_refused(loss) -> None:
    case = random_case(8)
    good = (case.logprobs, case.old, case.advantages, case.mask)
    for bad in (
        (case.logprobs, case.old[:, :-1], case.advantages, case.mask),
        (case.logprobs, case.old, case.advantages[:-1], case.mask),
        (case.logprobs, case.old, case.advantages, case.mask.int()),
    ):
        # Unwrapped, since users have no type checker that would speak first.
        with pytest.raises(ValueError, match="must"):
            inspect.unwrap(loss)(*bad)
    for options in ({"clip_low": -0.1}, {"clip_low": 1.1}, {"clip_high": -1.0}, {"clip_high": math.nan}):
        with pytest.raises(ValueError, match="clip_"):
            loss(*good, **options)


def test_spans_of_another_shape_are_refused() -> None:
    case = random_case(8)
    spans = torch.zeros_like(case.mask[:, :1], dtype=torch.int64)
    with pytest.raises(ValueError, match=r"spans must be \[B, T\]"):
        inspect.unwrap(gspo_token_loss)(case.logprobs, case.old, case.advantages, case.mask, spans=spans)


@pytest.mark.parametrize("loss", CLIPPED)
def test_a_dual_clip_inside_the_band_is_refused(loss) -> None:
    case = random_case(8)
    with pytest.raises(ValueError, match="dual_clip"):
        loss(case.logprobs, case.old, case.advantages, case.mask, clip_high=0.5, dual_clip=1.2)


@pytest.mark.parametrize("loss", ALL)
def test_arithmetic_is_in_float32_at_least(loss) -> None:
    case = random_case(8)
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        output = loss(case.logprobs.to(dtype), case.old.to(dtype), case.advantages.to(dtype), case.mask)
        assert output.loss.dtype == output.log_ratios.dtype == expected


@pytest.mark.parametrize("loss", ALL)
@pytest.mark.parametrize("drift", [200.0, -200.0])
def test_any_drift_gives_a_finite_loss_and_gradient(loss, drift: float) -> None:
    case = random_case(9)
    case.logprobs[:3] += drift
    case.advantages[:3] = -math.copysign(1.0, drift)
    output, gradient = run(loss, case)
    assert output.loss.isfinite()
    assert gradient.isfinite().all()
    assert output.stats.saturated.item() > 0
