"""What the studies share: a mean over seeds with its interval, as numbers, as text and as a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gspo.reporting.curves import mean_interval


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean over seeds and half of its 95 % interval (Student's t); of one seed there is no interval (nan)."""
    if len(values) < 2:
        return values[0], math.nan
    mean, _, high = mean_interval(values)
    return mean, high - mean


def plus_minus(values: Sequence[float], digits: int = 3) -> str:
    """The same as text.

    >>> plus_minus([0.5, 0.6, 0.7])
    '0.600 ± 0.248'
    """
    mean, half = interval(values)
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot: by name the values of each seed [seeds][places] at common places of x."""

    x: Sequence[float]
    curves: Mapping[str, Sequence[Sequence[float]]]
    x_name: str
    y_name: str
    logarithmic: bool = False


def draw(panels: Sequence[Panel], path: Path) -> None:
    """The panels side by side: means over seeds with 95 % bands. The same input gives the same file.

    On a logarithmic axis, where an interval may reach below 0, the band spans the seeds instead.
    """
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "gspo"
    from matplotlib import pyplot as plt

    figure, plots = plt.subplots(ncols=len(panels), figsize=(7 if len(panels) == 1 else 5 * len(panels), 4))
    for panel, axes in zip(panels, [plots] if len(panels) == 1 else plots, strict=True):
        for name, of_seeds in panel.curves.items():
            places = list(zip(*of_seeds, strict=True))
            low, high = zip(*(_band(values, panel.logarithmic) for values in places), strict=True)
            axes.plot(panel.x, [interval(values)[0] for values in places], label=name)
            axes.fill_between(panel.x, low, high, alpha=0.2)
        axes.set_xlabel(panel.x_name)
        axes.set_ylabel(panel.y_name)
        if panel.logarithmic:
            axes.set_yscale("log")
    (plots if len(panels) == 1 else plots[0]).legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _band(values: Sequence[float], logarithmic: bool) -> tuple[float, float]:
    if logarithmic:
        return min(values), max(values)
    mean, half = interval(values)
    return mean - half, mean + half
