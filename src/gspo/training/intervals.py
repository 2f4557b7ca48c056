"""A mean over prompts and how far it can be trusted, also where every prompt came out the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 10_000
_TAIL = 0.025
_ROUNDING = 1e-9  # a sum of shares that is a whole number is one, whatever the last digit says


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over `n` prompts with its 95 % interval; None, three times, when there is no prompt."""

    value: float | None
    low: float | None
    high: float | None
    n: int


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one value per prompt, each between 0 and 1, with its 95 % interval.

    Prompts are the independent pieces of evidence, however many responses stand behind a value. Values that are all
    0 or 1 have an exact interval (`exact_interval`). Values between, shares of several responses, have that of a
    bootstrap over prompts; but where all are the same, their spread says nothing, and each prompt is taken for one
    success or failure, the sum rounded outward: the exact interval of the most that n prompts can differ.
    """
    n = len(values)
    if n == 0:
        return Estimate(None, None, None, 0)
    total = math.fsum(values)
    if min(values) < max(values) and not set(values) <= {0.0, 1.0}:
        return Estimate(total / n, *bootstrap(values), n)
    low, _ = exact_interval(math.floor(total + _ROUNDING), n)
    _, high = exact_interval(math.ceil(total - _ROUNDING), n)
    return Estimate(total / n, low, high, n)


def exact_interval(successes: int, n: int) -> tuple[float, float]:
    """The 95 % interval of a probability after `successes` in n >= 1 independent tries.

    Its ends are where as few, or as many, successes have a chance of 2.5 % (Clopper and Pearson 1934,
    Biometrika 26): it covers the true probability in at least 95 % of all cases, whatever that is.

    >>> exact_interval(0, 10)[1] == 1 - 0.025 ** 0.1
    True
    """
    return 1.0 - _highest(n - successes, n), _highest(successes, n)


def _highest(successes: int, n: int) -> float:
    """The probability at which at most so many successes have a chance of 2.5 %."""
    if successes == n:
        return 1.0
    if successes == 0:
        return 1.0 - math.pow(_TAIL, 1 / n)
    k = np.arange(successes + 1)
    factorial = np.array([math.lgamma(i + 1) for i in range(n + 1)])
    ways = factorial[n] - factorial[k] - factorial[n - k]
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        chance = np.exp(ways + k * math.log(middle) + (n - k) * math.log1p(-middle)).sum()
        low, high = (middle, high) if chance > _TAIL else (low, middle)
    return high


def bootstrap(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of the mean of one value per prompt, by drawing prompts with replacement (percentiles)."""
    array = np.asarray(values, dtype=np.float64)
    n = len(values)
    generator = np.random.default_rng(seed)
    rows = max(1, 2_000_000 // n)  # bounds the memory of one draw to 16 MB
    means = [
        array[generator.integers(n, size=(min(rows, _RESAMPLES - start), n))].mean(axis=1)
        for start in range(0, _RESAMPLES, rows)
    ]
    low, high = np.quantile(np.concatenate(means), [_TAIL, 1 - _TAIL])
    return float(low), float(high)
