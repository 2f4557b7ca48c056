"""Plots as inline SVG: no script, no other file, every text escaped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from gspo.reporting.console import printable

WIDTH, HEIGHT = 620, 260
LEFT, RIGHT, TOP, BOTTOM = 70, 12, 12, 42

Scale = Callable[[float | int], float]

_COLOURS = ("#3b78c2", "#d1702a", "#4a9a5b", "#8a5bb5", "#b58a1c", "#2a9d9d", "#c2457b", "#7a7a7a")
_DASHES = ("none", "7 3", "2 3", "9 3 2 3", "1 6")


@dataclass(frozen=True, slots=True)
class Point:
    """A value at `x`; `low` and `high` bound an interval where there is one."""

    x: float | int
    y: float | int
    low: float | int | None = None
    high: float | int | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """Points in the order of x under a name; `colour` and `dash` count through the palette from 0.

    With `whiskers` intervals are drawn point by point, else as a band.
    """

    name: str
    points: Sequence[Point]
    colour: int = 0
    dash: int = 0
    whiskers: bool = False


def curve_plot(
    curves: Sequence[Curve],
    x_name: str,
    y_name: str,
    *,
    lines: Sequence[tuple[str, float | int]] = (),
    logarithmic: bool = False,
) -> str:
    """Curves over a common x with a legend below; `lines` are named levels of y, drawn where the curves reach.

    On a logarithmic axis values that are not positive are left out.
    """
    shown = [(c, [p for p in c.points if p.y > 0 or not logarithmic]) for c in curves]
    points = [p for _, of_one in shown for p in of_one]
    if not points:
        return ""
    first, last = min(p.x for p in points), max(p.x for p in points)
    values = [v for p in points for v in (p.low, p.y, p.high) if v is not None and (v > 0 or not logarithmic)]
    y, ticks = (_log_axis if logarithmic else _linear_axis)(min(values), max(values))
    x = linear(first, last, LEFT, WIDTH - RIGHT)
    ordered = sorted(lines, key=lambda line: line[1])
    shapes = [shape for k, (name, level) in enumerate(ordered) for shape in _level(name, y(level), below=k == 0)]
    for curve, of_one in shown:
        shapes += _drawn(curve, [_placed(p, x, y, logarithmic) for p in of_one])
    axis = [(x(value), f"{value:g}") for value in nice_ticks(first, last) if value == round(value)] or [
        (x(first), f"{first:g}")
    ]
    return svg(shapes, axis, ticks, x_name, y_name) + _legend(curves)


def linear(low: float | int, high: float | int, start: int, end: int) -> Scale:
    """Maps [low, high] to [start, end]."""
    return lambda value: start + (end - start) * (value - low) / ((high - low) or 1.0)


def nice_ticks(low: float | int, high: float | int) -> list[float]:
    """About five round values inside [low, high].

    >>> nice_ticks(1, 16)
    [5.0, 10.0, 15.0]
    """
    if high <= low:
        return [float(low)]
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{k * step:.12g}") for k in range(first, last + 1)]


def svg(
    shapes: Sequence[str],
    axis: Sequence[tuple[float, str]],
    ticks: Sequence[tuple[float, str]],
    x_name: str,
    y_name: str,
) -> str:
    """Shapes in a frame, with labels at places of the x axis (`axis`) and of the y axis (`ticks`)."""
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    frame = f'<path d="M{LEFT},{TOP} V{bottom} H{right}" class="axis"/>'
    labels = [f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{_text(t)}</text>' for x, t in axis]
    labels += [f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_text(t)}</text>' for y, t in ticks]
    middle = (TOP + bottom) / 2
    labels.append(f'<text x="{(LEFT + right) / 2:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{_text(x_name)}</text>')
    turned = f'transform="rotate(-90 14 {middle:.1f})"'
    labels.append(f'<text x="14" y="{middle:.1f}" text-anchor="middle" {turned}>{_text(y_name)}</text>')
    inside = "".join([*shapes, frame, *labels])
    name = _text(f"{y_name} against {x_name}")
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">{inside}</svg>'


def _linear_axis(low: float | int, high: float | int) -> tuple[Scale, list[tuple[float, str]]]:
    margin = 0.04 * (high - low) or 0.5 * abs(high) or 0.5
    y = linear(low - margin, high + margin, HEIGHT - BOTTOM, TOP)
    return y, [(y(value), f"{value:.4g}") for value in nice_ticks(low - margin, high + margin)]


def _log_axis(low: float | int, high: float | int) -> tuple[Scale, list[tuple[float, str]]]:
    bottom, top = math.floor(math.log10(low)), math.ceil(math.log10(high))
    top = max(top, bottom + 1)
    of_power = linear(bottom, top, HEIGHT - BOTTOM, TOP)
    every = 1 + (top - bottom) // 7
    ticks = [(of_power(power), f"1e{power}") for power in range(bottom, top + 1, every)]
    return lambda value: of_power(math.log10(value)), ticks


def _placed(point: Point, x: Scale, y: Scale, logarithmic: bool) -> tuple[float, float, float, float]:
    """A point's place on the page: x, y and the two ends of its interval (y again where it has none)."""
    low = point.y if point.low is None or (logarithmic and point.low <= 0) else point.low
    high = point.y if point.high is None else point.high
    return x(point.x), y(point.y), y(low), y(high)


def _drawn(curve: Curve, places: Sequence[tuple[float, float, float, float]]) -> Iterator[str]:
    if not places:
        return
    colour = _COLOURS[curve.colour % len(_COLOURS)]
    dash = _DASHES[curve.dash % len(_DASHES)]
    if any(low != high for _, _, low, high in places):
        if curve.whiskers:
            for x, _, low, high in places:
                yield f'<path d="M{x:.1f},{low:.1f} V{high:.1f}" stroke="{colour}"/>'
        else:
            edge = [f"{x:.1f},{high:.1f}" for x, _, _, high in places]
            edge += [f"{x:.1f},{low:.1f}" for x, _, low, _ in reversed(places)]
            yield f'<polygon points="{" ".join(edge)}" fill="{colour}" fill-opacity=".18"/>'
    if curve.whiskers or len(places) == 1:
        for x, y, _, _ in places:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in places)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5" stroke-dasharray="{dash}"/>'


def _level(name: str, y: float | int, *, below: bool) -> list[str]:
    if not TOP <= y <= HEIGHT - BOTTOM:
        return []
    return [
        f'<path d="M{LEFT},{y:.1f} H{WIDTH - RIGHT}" class="band"/>',
        f'<text x="{WIDTH - RIGHT}" y="{y + (12 if below else -3):.1f}" text-anchor="end">{_text(name)}</text>',
    ]


def _text(text: str) -> str:
    return escape(printable(text))


def _legend(curves: Sequence[Curve]) -> str:
    items = [
        f'<span><svg viewBox="0 0 24 8"><path d="M0,4 H24" stroke="{_COLOURS[c.colour % len(_COLOURS)]}" '
        f'stroke-width="2" stroke-dasharray="{_DASHES[c.dash % len(_DASHES)]}"/></svg>{_text(c.name)}</span>'
        for c in curves
    ]
    return f'<p class="legend">{"".join(items)}</p>'
