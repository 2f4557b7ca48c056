"""The three plots of an audit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from gspo.audit.measure import Differences
from gspo.reporting.plots import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, linear, svg


def histogram(found: Differences) -> str:
    """Token differences; bars on a log scale, so that rare large ones are seen."""
    edges, counts = found.edges, found.histogram
    x = linear(edges[0], edges[-1], LEFT, WIDTH - RIGHT)
    top = math.log10(max(counts) + 1)
    y = linear(0, top, HEIGHT - BOTTOM, TOP)
    bars = [
        f'<rect x="{x(left):.1f}" y="{y(math.log10(n + 1)):.1f}" width="{x(right) - x(left):.1f}" '
        f'height="{HEIGHT - BOTTOM - y(math.log10(n + 1)):.1f}" class="bar"/>'
        for left, right, n in zip(edges, edges[1:], counts, strict=False)
        if n
    ]
    powers = [10**k for k in range(int(math.log10(max(counts))) + 1)]
    ticks = [(y(math.log10(n + 1)), str(n)) for n in powers]
    axis = [(x(value), f"{value:.2g}") for value in (edges[0], 0.0, edges[-1])]
    return svg(bars, axis, ticks, "difference of a token's log-probs (nats)", "tokens")


def by_length(found: Differences, bands: Sequence[tuple[str, float, float]]) -> str:
    """log s of each response against its length, with 95 % of the modelled noise and clip ranges (name, low, high)."""
    longest, noise = max(found.lengths), found.noise
    reach = 1.1 * max([*(abs(v) for v in found.log_ratios), 1.96 * noise.std_of_mean(min(found.lengths)), 1e-9])
    x = linear(0, longest, LEFT, WIDTH - RIGHT)
    y = linear(-reach, reach, HEIGHT - BOTTOM, TOP)
    shapes = []
    for name, low, high in bands:
        bounds = [
            value for value in (math.log1p(-low) if low < 1 else -math.inf, math.log1p(high)) if abs(value) < reach
        ]
        shapes += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(b):.1f}" y2="{y(b):.1f}" class="band"/>' for b in bounds
        ]
        if bounds:
            shapes.append(
                f'<text x="{WIDTH - RIGHT}" y="{y(bounds[-1]) - 3:.1f}" text-anchor="end">{escape(name)}</text>'
            )
    for side in (-1, 1):
        steps = [max(1.0, longest * i / 60) for i in range(61)]
        curve = [
            (x(t), y(noise.bias + side * 1.96 * math.hypot(noise.response_std, noise.token_std / t**0.5)))
            for t in steps
        ]
        shown = " ".join(f"{a:.1f},{b:.1f}" for a, b in curve if TOP <= b <= HEIGHT - BOTTOM)
        shapes.append(f'<polyline points="{shown}" class="model"/>')
    shapes += [
        f'<circle cx="{x(length):.1f}" cy="{y(value):.1f}" r="2.5" class="dot"/>'
        for length, value in zip(found.lengths, found.log_ratios, strict=True)
    ]
    axis = [(x(value), f"{value:.0f}") for value in (0, longest / 2, longest)]
    ticks = [(y(value), f"{value:.1g}") for value in (-reach, 0.0, reach)]
    return svg(shapes, axis, ticks, "trainable tokens of the response", "log s before any update")


def autocorrelation(found: Differences) -> str:
    """Correlation of differences k tokens apart; what lies between the dashed lines (95 %) is compatible with none."""
    values = found.autocorrelation
    slot = (WIDTH - LEFT - RIGHT) / len(values)
    y = linear(-1, 1, HEIGHT - BOTTOM, TOP)
    margin = min(1.0, 1.96 / math.sqrt(found.tokens.count))
    shapes = [
        f'<rect x="{LEFT + slot * (k + 0.25):.1f}" y="{min(y(r), y(0)):.1f}" width="{slot / 2:.1f}" '
        f'height="{abs(y(r) - y(0)):.1f}" class="bar"/>'
        for k, r in enumerate(values)
        if r is not None
    ]
    shapes += [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(m):.1f}" y2="{y(m):.1f}" class="band"/>'
        for m in (-margin, margin)
    ]
    axis = [(LEFT + slot * (k + 0.5), str(k + 1)) for k in range(len(values))]
    return svg(shapes, axis, [(y(v), f"{v:g}") for v in (-1, 0, 1)], "tokens apart", "autocorrelation")
