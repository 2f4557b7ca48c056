"""From records to the curves of a report: long runs joined step by step, seeds as a mean with its interval."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gspo.reporting.plots import Point
from gspo.reporting.run_records import Record, RunRecords, joined

MOST_POINTS = 200
"""Points of a curve at most; in a longer run a point joins several steps."""

# 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom; beyond, the last is taken, a little too wide.
# fmt: off
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)
# fmt: on

Records = Callable[[RunRecords], Sequence[Record]]
"""Which records of a run a figure is in: its metrics or its timings."""


@dataclass(frozen=True, slots=True)
class Line:
    """What is drawn as one: a run, or three or more runs that differ in nothing but `run.seed`."""

    name: str
    runs: tuple[RunRecords, ...]


def lines_of(runs: Sequence[RunRecords]) -> list[Line]:
    """The runs in their order, three or more that differ only in their seed joined: an interval of two says little."""
    families: dict[str, list[RunRecords]] = {}
    for run in runs:
        families.setdefault(_family(run), []).append(run)
    lines = []
    for family in families.values():
        seeds = {run.config.run.seed for run in family if run.config is not None}
        if 2 < len(family) == len(seeds):
            lines.append(Line(f"{family[0].name} and {len(family) - 1} more seeds", tuple(family)))
        else:
            lines += [Line(run.name, (run,)) for run in family]
    return lines


def _family(run: RunRecords) -> str:
    """The settings that decide what a run does, its seed apart; a run without a config or a step is its own family."""
    if run.config is None or not run.metrics:
        return run.name
    settings = run.config.model_dump(mode="json")
    return json.dumps({name: part for name, part in settings.items() if name not in ("run", "tracking")})


def curve(line: Line, figure: str, records: Records) -> list[Point]:
    """A figure by step.

    Of one run, an interval spans the smallest and largest step that a point joins. Of several seeds it is the 95 %
    interval of their mean, at the steps that all of them made.
    """
    by_step = [{r["step"]: r for r in records(run) if r.get(figure) is not None} for run in line.runs]
    steps = sorted(set.intersection(*map(set, by_step)))
    size = max(1, math.ceil(len(steps) / MOST_POINTS))
    bins = [steps[start : start + size] for start in range(0, len(steps), size)]
    points = (_point(figure, [[of_run[step] for step in chosen] for of_run in by_step]) for chosen in bins)
    return [point for point in points if point is not None]


def _point(figure: str, records: Sequence[Sequence[Record]]) -> Point | None:
    """One point from the records [runs][steps] that it joins."""
    values = [joined(of_run, figure) for of_run in records]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    x = (records[0][0]["step"] + records[0][-1]["step"]) / 2
    if len(known) > 1:
        return Point(x, *mean_interval(known))
    single = [v for record in records[0] if (v := joined([record], figure)) is not None]
    return Point(x, known[0], min(single), max(single)) if len(single) > 1 else Point(x, known[0])


def accuracy_curve(line: Line) -> list[Point]:
    """Held-out accuracy by step: with its own interval of one run, with that of the mean of several seeds."""
    by_step = [
        {r["step"]: r["accuracy"] for r in run.evaluations if r["accuracy"]["value"] is not None} for run in line.runs
    ]
    steps = sorted(set.intersection(*map(set, by_step)))
    if len(by_step) > 1:
        return [Point(step, *mean_interval([of_run[step]["value"] for of_run in by_step])) for step in steps]
    estimates = [(step, by_step[0][step]) for step in steps]
    return [Point(step, found["value"], found["low"], found["high"]) for step, found in estimates]


def mean_interval(values: Sequence[float | int]) -> tuple[float, float, float]:
    """The mean of two or more values and its 95 % interval, mean -+ t s / sqrt(n)."""
    mean = statistics.fmean(values)
    reach = _T[min(len(values) - 1, len(_T)) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - reach, mean + reach
