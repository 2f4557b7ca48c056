"""Intervals that are honest: exact where they can be, over prompts, never without a width."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.training.intervals import Estimate, bootstrap, estimate, exact_interval


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (0, 10, 0.0, 1 - 0.025**0.1),  # none of ten: (1 - p)^10 = 0.025
        (10, 10, 0.025**0.1, 1.0),
        (0, 1, 0.0, 0.975),
        (1, 2, 1 - math.sqrt(0.975), math.sqrt(0.975)),  # at most one of two: 1 - p^2 = 0.025
        (5, 10, 0.18708603, 0.81291397),  # tables of Clopper and Pearson
        (1, 20, 1 - 0.975**0.05, 0.24873276),
    ],
)
def test_the_exact_interval_by_hand(successes: int, n: int, low: float, high: float) -> None:
    assert exact_interval(successes, n) == pytest.approx((low, high), abs=1e-8)


def tail(p: float, n: int, counts: range) -> Fraction:
    """P(number of successes in `counts`), in exact arithmetic."""
    exact = Fraction(p)
    return sum((math.comb(n, k) * exact**k * (1 - exact) ** (n - k) for k in counts), Fraction(0))


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_at_its_ends_the_rarer_outcomes_have_a_chance_of_a_fortieth(case: tuple[int, int]) -> None:
    successes, n = case
    low, high = exact_interval(successes, n)
    assert low < successes / n < high or successes in (0, n)
    if successes < n:
        assert float(tail(high, n, range(successes + 1))) == pytest.approx(0.025, rel=1e-9)
    if successes > 0:
        assert float(tail(low, n, range(successes, n + 1))) == pytest.approx(0.025, rel=1e-9)


@given(st.integers(1, 30), st.floats(0, 1))
def test_whatever_the_probability_is_it_is_covered_often_enough(n: int, p: float) -> None:
    covered = Fraction(0)
    for successes in range(n + 1):
        found = estimate([1.0] * successes + [0.0] * (n - successes))
        if found.low is not None and found.high is not None and found.low <= p <= found.high:
            covered += tail(p, n, range(successes, successes + 1))
    assert covered >= 0.95


def test_thousands_of_prompts_have_the_width_of_theory() -> None:
    found = estimate([1.0] * 3000 + [0.0] * 7000)
    half = 1.96 * math.sqrt(0.3 * 0.7 / 10_000)
    assert found.value == 0.3
    assert found.low == pytest.approx(0.3 - half, abs=3e-4)
    assert found.high == pytest.approx(0.3 + half, abs=3e-4)


def test_several_responses_to_a_prompt_are_one_piece_of_evidence() -> None:
    """A tenth of the prompts is always solved, the others never; of 30 none is seen to be in 4 % of all evaluations.

    That is more than the 2.5 % that a bound may miss: 8 responses each taken for independent would bound the
    accuracy at 1.5 %.
    """
    share, n, responses = 0.1, 30, 8
    assert (1 - share) ** n > 0.025
    assert exact_interval(0, n * responses)[1] < 0.016
    found = estimate([0 / responses] * n)
    assert found.high == 1 - 0.025 ** (1 / n)
    assert found.high > share


def test_equal_shares_have_a_width_too() -> None:
    """Their spread says nothing of the prompts that were not asked; 2.5 of 5 lies in what 2 and 3 of 5 span."""
    assert estimate([0.5] * 5) == Estimate(0.5, exact_interval(2, 5)[0], exact_interval(3, 5)[1], 5)
    assert estimate([0.5] * 4) == Estimate(0.5, *exact_interval(2, 4), 4)
    assert estimate([0.1] * 10) == Estimate(0.1, *exact_interval(1, 10), 10)
    assert estimate([]) == Estimate(None, None, None, 0)


def test_unequal_shares_are_drawn_again_with_their_prompts() -> None:
    """The bootstrap's width is that of theory for one value a prompt, and does not change from call to call."""
    values = ([0.0, 0.5, 1.0, 0.25] * 50)[:-1]
    found = estimate(values)
    assert (found.low, found.high) == bootstrap(values)
    half = 1.96 * float(np.std(values)) / math.sqrt(len(values))
    mean = float(np.mean(values))
    assert found.value == pytest.approx(mean)
    assert found.low == pytest.approx(mean - half, abs=0.006)
    assert found.high == pytest.approx(mean + half, abs=0.006)


def test_bootstrap_of_many_prompts_is_drawn_in_pieces() -> None:
    """At 1,000 prompts one piece is 2,000 resamples; the interval is that of an independent bootstrap."""
    generator = np.random.default_rng(0)
    values = generator.random(1000)
    means = np.array([generator.choice(values, 1000).mean() for _ in range(4_000)])
    expected = tuple(np.quantile(means, [0.025, 0.975]))
    assert bootstrap(values.tolist()) == pytest.approx(expected, abs=1e-3)
