"""Plots are well-formed SVG whose points lie where they should."""

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.reporting.plots import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Curve, Point, curve_plot, linear, nice_ticks


def parsed(plot: str) -> ElementTree.Element:
    return ElementTree.fromstring(f"<div>{plot}</div>")


def polyline(plot: str) -> list[tuple[float, float]]:
    points = parsed(plot).find("svg/polyline").get("points").split()
    return [tuple(map(float, point.split(","))) for point in points]


def test_a_scale_maps_the_ends() -> None:
    scale = linear(2, 4, 100, 0)
    assert (scale(2), scale(3), scale(4)) == (100, 50, 0)
    assert linear(2, 2, 100, 0)(2) == 100


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.5, 1]),
        (0, 10, [0, 5, 10]),
        (-0.003, 0.004, [-0.002, 0, 0.002, 0.004]),
        (1, 1000, [500, 1000]),
        (0, 0.8, [0, 0.2, 0.4, 0.6, 0.8]),
        (3, 3, [3]),
    ],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high) == ticks


def test_points_lie_on_the_scale() -> None:
    """Values 0 to 1 with a margin of .04 on either side: 0 lies .04 / 1.08 of the height above the bottom."""
    plot = curve_plot([Curve("a", [Point(1, 0.0), Point(3, 1.0)])], "step", "reward")
    height = HEIGHT - BOTTOM - TOP
    (x0, y0), (x1, y1) = polyline(plot)
    assert (x0, x1) == (LEFT, WIDTH - RIGHT)
    assert y0 == pytest.approx(HEIGHT - BOTTOM - 0.04 / 1.08 * height, abs=0.06)
    assert y1 == pytest.approx(TOP + 0.04 / 1.08 * height, abs=0.06)


def test_a_logarithmic_axis_leaves_out_what_it_cannot_show() -> None:
    plot = curve_plot(
        [Curve("a", [Point(1, 1.0), Point(2, 0.0), Point(3, 10.0), Point(4, 100.0)])], "step", "norm", logarithmic=True
    )
    heights = [y for _, y in polyline(plot)]
    assert heights == [HEIGHT - BOTTOM, pytest.approx((HEIGHT - BOTTOM + TOP) / 2), TOP]
    assert curve_plot([Curve("a", [Point(1, 0.0)])], "step", "norm", logarithmic=True) == ""


def test_intervals_are_bands_or_whiskers() -> None:
    points = [Point(0, 0.5, 0.4, 0.6), Point(1, 0.7, 0.6, 0.8)]
    band = parsed(curve_plot([Curve("a", points)], "step", "accuracy"))
    assert len(band.find("svg/polygon").get("points").split()) == 4
    whiskers = parsed(curve_plot([Curve("a", points, whiskers=True)], "step", "accuracy"))
    assert whiskers.find("svg/polygon") is None
    assert len(whiskers.findall("svg/circle")) == 2


def test_one_point_is_seen_and_nothing_is_no_plot() -> None:
    assert parsed(curve_plot([Curve("a", [Point(5, 0.5)])], "step", "y")).find("svg/circle") is not None
    assert curve_plot([], "step", "y") == curve_plot([Curve("a", [])], "step", "y") == ""


def test_a_level_is_drawn_where_the_curves_reach() -> None:
    curves = [Curve("a", [Point(1, -1.0), Point(2, 1.0)])]
    plot = curve_plot(curves, "step", "y", lines=[("inside", 0.5), ("far away", 90.0)])
    assert ">inside</text>" in plot
    assert "far away" not in plot


def test_names_are_text() -> None:
    hostile = '</svg><script>alert("1")</script>'
    plot = curve_plot([Curve(hostile, [Point(1, 1.0)])], hostile, hostile, lines=[(hostile, 1.0)])
    assert "<script" not in plot
    parsed(plot)


@given(
    st.lists(
        st.tuples(st.floats(-1e12, 1e12), st.none() | st.tuples(st.floats(-1e12, 1e12), st.floats(-1e12, 1e12))),
        min_size=1,
        max_size=5,
    ),
    st.booleans(),
)
def test_whatever_the_values_everything_lies_inside_the_frame(values, logarithmic) -> None:
    points = [Point(k, y, *(sorted((*ends, y))[::2] if ends else ())) for k, (y, ends) in enumerate(values)]
    plot = curve_plot([Curve("a", points)], "step", "y", logarithmic=logarithmic)
    if plot:
        parsed(plot)
    for text in re.findall(r'points="([^"]*)"', plot):
        for place in text.split():
            x, y = map(float, place.split(","))
            assert LEFT <= x <= WIDTH - RIGHT
            assert TOP - 0.1 <= y <= HEIGHT - BOTTOM + 0.1
            assert math.isfinite(y)
