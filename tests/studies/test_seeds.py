"""Intervals over seeds against numbers computed by hand, and the figure they are drawn in."""

import math

import pytest
from seeds import Panel, draw, interval, plus_minus


@pytest.mark.parametrize(
    ("values", "mean", "half"),
    [
        ([0.5, 0.6, 0.7], 0.6, 4.303 * 0.1 / math.sqrt(3)),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 3.0, 2.776 * math.sqrt(2.5) / math.sqrt(5)),
        ([0.25, 0.75], 0.5, 12.706 * 0.25),
    ],
)
def test_the_interval_is_students(values, mean, half):
    assert interval(values) == pytest.approx((mean, half), rel=1e-6)


def test_one_seed_has_no_interval():
    mean, half = interval([0.4])
    assert mean == 0.4
    assert math.isnan(half)


def test_text_has_as_many_digits_as_asked_for():
    assert plus_minus([0.25, 0.75], 1) == "0.5 ± 3.2"


def test_a_figure_has_every_name_and_is_the_same_each_time(tmp_path):
    pytest.importorskip("matplotlib")
    curves = {"one arm": [[0.1, 0.2], [0.3, 0.4]], "another": [[0.5, 0.5], [0.5, 0.5]]}
    panels = [Panel([1, 2], curves, "step", "reward"), Panel([1, 2], curves, "step", "share", logarithmic=True)]
    files = [tmp_path / name for name in ("a.svg", "b.svg")]
    for file in files:
        draw(panels, file)
    first, second = (file.read_text() for file in files)
    assert first == second
    for name in ("one arm", "another", "reward", "share"):
        assert f"<!-- {name} -->" in first
