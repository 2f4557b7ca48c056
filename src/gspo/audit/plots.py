"""Three plots as inline SVG: no script, no other file, every text escaped."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from gspo.audit.measure import Differences

_WIDTH, _HEIGHT = 620, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 12, 12, 42

Scale = Callable[[float], float]


def histogram(found: Differences) -> str:
    """Token differences; bars on a log scale, so that rare large ones are seen."""
    edges, counts = found.edges, found.histogram
    x = _linear(edges[0], edges[-1], _LEFT, _WIDTH - _RIGHT)
    top = math.log10(max(counts) + 1)
    y = _linear(0, top, _HEIGHT - _BOTTOM, _TOP)
    bars = [
        f'<rect x="{x(left):.1f}" y="{y(math.log10(n + 1)):.1f}" width="{x(right) - x(left):.1f}" '
        f'height="{_HEIGHT - _BOTTOM - y(math.log10(n + 1)):.1f}" class="bar"/>'
        for left, right, n in zip(edges, edges[1:], counts, strict=False)
        if n
    ]
    powers = [10**k for k in range(int(math.log10(max(counts))) + 1)]
    ticks = [(y(math.log10(n + 1)), str(n)) for n in powers]
    axis = [(x(value), f"{value:.2g}") for value in (edges[0], 0.0, edges[-1])]
    return _svg(bars, axis, ticks, "difference of a token's log-probs (nats)", "tokens")


def by_length(found: Differences, bands: Sequence[tuple[str, float, float]]) -> str:
    """log s of each response against its length, with 95 % of the modelled noise and clip ranges (name, low, high)."""
    longest, noise = max(found.lengths), found.noise
    reach = 1.1 * max([*(abs(v) for v in found.log_ratios), 1.96 * noise.std_of_mean(min(found.lengths)), 1e-9])
    x = _linear(0, longest, _LEFT, _WIDTH - _RIGHT)
    y = _linear(-reach, reach, _HEIGHT - _BOTTOM, _TOP)
    shapes = []
    for name, low, high in bands:
        bounds = [
            value for value in (math.log1p(-low) if low < 1 else -math.inf, math.log1p(high)) if abs(value) < reach
        ]
        shapes += [
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(b):.1f}" y2="{y(b):.1f}" class="band"/>' for b in bounds
        ]
        if bounds:
            shapes.append(
                f'<text x="{_WIDTH - _RIGHT}" y="{y(bounds[-1]) - 3:.1f}" text-anchor="end">{escape(name)}</text>'
            )
    for side in (-1, 1):
        steps = [max(1.0, longest * i / 60) for i in range(61)]
        curve = [
            (x(t), y(noise.bias + side * 1.96 * math.hypot(noise.response_std, noise.token_std / t**0.5)))
            for t in steps
        ]
        shown = " ".join(f"{a:.1f},{b:.1f}" for a, b in curve if _TOP <= b <= _HEIGHT - _BOTTOM)
        shapes.append(f'<polyline points="{shown}" class="model"/>')
    shapes += [
        f'<circle cx="{x(length):.1f}" cy="{y(value):.1f}" r="2.5" class="dot"/>'
        for length, value in zip(found.lengths, found.log_ratios, strict=True)
    ]
    axis = [(x(value), f"{value:.0f}") for value in (0, longest / 2, longest)]
    ticks = [(y(value), f"{value:.1g}") for value in (-reach, 0.0, reach)]
    return _svg(shapes, axis, ticks, "trainable tokens of the response", "log s before any update")


def autocorrelation(found: Differences) -> str:
    """Correlation of differences k tokens apart; what lies between the dashed lines (95 %) is compatible with none."""
    values = found.autocorrelation
    slot = (_WIDTH - _LEFT - _RIGHT) / len(values)
    y = _linear(-1, 1, _HEIGHT - _BOTTOM, _TOP)
    margin = min(1.0, 1.96 / math.sqrt(found.tokens.count))
    shapes = [
        f'<rect x="{_LEFT + slot * (k + 0.25):.1f}" y="{min(y(r), y(0)):.1f}" width="{slot / 2:.1f}" '
        f'height="{abs(y(r) - y(0)):.1f}" class="bar"/>'
        for k, r in enumerate(values)
        if r is not None
    ]
    shapes += [
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(m):.1f}" y2="{y(m):.1f}" class="band"/>'
        for m in (-margin, margin)
    ]
    axis = [(_LEFT + slot * (k + 0.5), str(k + 1)) for k in range(len(values))]
    return _svg(shapes, axis, [(y(v), f"{v:g}") for v in (-1, 0, 1)], "tokens apart", "autocorrelation")


def _linear(low: float | int, high: float | int, start: int, end: int) -> Scale:
    return lambda value: start + (end - start) * (value - low) / ((high - low) or 1.0)


def _svg(
    shapes: Sequence[str],
    axis: Sequence[tuple[float, str]],
    ticks: Sequence[tuple[float, str]],
    x_name: str,
    y_name: str,
) -> str:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    frame = f'<path d="M{_LEFT},{_TOP} V{bottom} H{right}" class="axis"/>'
    labels = [f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{escape(t)}</text>' for x, t in axis]
    labels += [f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(t)}</text>' for y, t in ticks]
    middle = (_TOP + bottom) / 2
    labels.append(f'<text x="{(_LEFT + right) / 2:.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x_name)}</text>')
    turned = f'transform="rotate(-90 14 {middle:.1f})"'
    labels.append(f'<text x="14" y="{middle:.1f}" text-anchor="middle" {turned}>{escape(y_name)}</text>')
    inside = "".join([*shapes, frame, *labels])
    name = escape(f"{y_name} against {x_name}", quote=True)
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name}">{inside}</svg>'
