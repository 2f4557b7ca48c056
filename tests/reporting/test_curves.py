"""What a curve shows: exact joins over steps, seeds as a mean with its interval."""

import math
from pathlib import Path

import pytest

from gspo.reporting.curves import _T, MOST_POINTS, accuracy_curve, curve, lines_of, mean_interval
from gspo.reporting.metrics import Ratio
from gspo.reporting.plots import Point
from gspo.reporting.run_records import read_runs
from tests.reporting.run_folders import make_run, settings


def metrics(run):
    return run.metrics


def rewards(*values, count=10):
    return [{"reward/mean": Ratio(value * count, count)} for value in values]


def test_a_short_run_is_shown_step_by_step(tmp_path: Path) -> None:
    (line,) = lines_of(read_runs([make_run(tmp_path / "r", rewards(0.1, 0.3))]))
    assert curve(line, "reward/mean", metrics) == [Point(1, 0.1), Point(2, 0.3)]


def test_a_long_run_is_joined_by_sums_with_its_extremes(tmp_path: Path) -> None:
    """401 steps, three to a point; the second has three times the count, so the first point is (0 + 3 + 0) / 5."""
    steps = [{"reward/mean": Ratio(0.0, 1)} for _ in range(401)]
    steps[1] = {"reward/mean": Ratio(3.0, 3)}
    (line,) = lines_of(read_runs([make_run(tmp_path / "r", steps)]))
    points = curve(line, "reward/mean", metrics)
    assert len(points) == 134 <= MOST_POINTS
    assert points[0] == Point(2, 0.6, 0.0, 1.0)
    assert points[1] == Point(5, 0.0, 0.0, 0.0)
    assert points[-1] == Point(400.5, 0.0, 0.0, 0.0)


def test_steps_without_the_figure_are_left_out(tmp_path: Path) -> None:
    steps = [*rewards(0.5), {"reward/mean": Ratio(0.0, 0)}, {"reward/mean": Ratio(math.nan, 4)}, *rewards(0.7)]
    (line,) = lines_of(read_runs([make_run(tmp_path / "r", steps)]))
    assert [p.x for p in curve(line, "reward/mean", metrics)] == [1, 4]
    assert curve(line, "policy/kl", metrics) == []


def seeds(tmp_path: Path, *of_seeds, **changes):
    return [
        make_run(
            tmp_path / f"s{seed}",
            rewards(*values),
            config=settings(3, run={"seed": seed, "name": f"s{seed}"}, **changes),
            accuracy={0: (values[0], 0.0, 1.0)},
        )
        for seed, values in enumerate(of_seeds)
    ]


def test_seeds_are_joined_over_the_steps_that_all_made(tmp_path: Path) -> None:
    """Values .1, .2, .3: mean .2, s = .1, t(2) = 4.303, so the interval reaches 4.303 * .1 / sqrt(3) = .24843."""
    (line,) = lines_of(read_runs(seeds(tmp_path, (0.1, 0.5), (0.2, 0.5, 0.9), (0.3, 0.5))))
    assert line.name == "s0 and 2 more seeds"
    first, second = curve(line, "reward/mean", metrics)
    assert (first.x, first.y) == (1, pytest.approx(0.2))
    assert (first.low, first.high) == pytest.approx((0.2 - 0.24843, 0.2 + 0.24843), abs=1e-5)
    assert (second.x, second.y, second.low, second.high) == (2, 0.5, 0.5, 0.5)
    assert accuracy_curve(line)[0].y == pytest.approx(0.2)


def test_other_settings_and_repeated_seeds_stay_apart(tmp_path: Path) -> None:
    runs = seeds(tmp_path / "a", (0.1,), (0.2,), (0.3,)) + seeds(
        tmp_path / "b", (0.3,), optimizer={"learning_rate": 1.0}
    )
    assert [len(line.runs) for line in lines_of(read_runs(runs))] == [3, 1]
    two = seeds(tmp_path / "e", (0.1,), (0.2,))
    assert [len(line.runs) for line in lines_of(read_runs(two))] == [1, 1]
    again = seeds(tmp_path / "c", (0.1,)) + seeds(tmp_path / "d", (0.1,))
    assert [len(line.runs) for line in lines_of(read_runs(again))] == [1, 1]


def test_accuracy_of_one_run_has_its_own_interval(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", accuracy={0: (0.1, 0.05, 0.2), 3: (0.5, 0.4, 0.6)})
    (line,) = lines_of(read_runs([folder]))
    assert accuracy_curve(line) == [Point(0, 0.1, 0.05, 0.2), Point(3, 0.5, 0.4, 0.6)]


@pytest.mark.parametrize("freedom", [1, 2, 3, 10, 30])
def test_quantiles_of_t_leave_two_and_a_half_percent_beyond(freedom: int) -> None:
    """Simpson's rule over the density; the table has three decimals."""
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))

    def density(x: float) -> float:
        return scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2)

    quantile, pieces = _T[freedom - 1], 2000
    weights = [1 if k in (0, pieces) else 4 if k % 2 else 2 for k in range(pieces + 1)]
    inside = sum(w * density(k * quantile / pieces) for k, w in enumerate(weights)) * quantile / pieces / 3
    assert 0.5 - inside == pytest.approx(0.025, abs=5.1e-4 * density(quantile))


def test_many_seeds_take_the_last_quantile() -> None:
    values = [0.0, 1.0] * 25
    mean, low, high = mean_interval(values)
    reach = 2.042 * math.sqrt(50 * 0.25 / 49) / math.sqrt(50)
    assert (mean, low, high) == pytest.approx((0.5, 0.5 - reach, 0.5 + reach))
