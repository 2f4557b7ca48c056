"""The plots of a run report: which figures are drawn together, and how."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from gspo.config import ObjectiveConfig
from gspo.reporting.curves import Line, Records, accuracy_curve, curve
from gspo.reporting.plots import Curve, Point, curve_plot
from gspo.reporting.run_records import Record, RunRecords

# The ranges that objectives take when the config gives none, of those whose log-ratios are clipped at 1 -+ the range.
# A test holds them against `gspo.objectives.CLIP_RANGES`, which cannot be read without torch.
_OWN_RANGES = {
    "gspo": (3e-4, 4e-4),
    "gspo_token": (3e-4, 4e-4),
    "grpo": (0.2, 0.27),
    "dr_grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
}


@dataclass(frozen=True, slots=True)
class Panel:
    """Figures (name, label) that share a plot; `explained` stands under its title."""

    title: str
    y_name: str
    figures: tuple[tuple[str, str], ...]
    explained: str = ""
    logarithmic: bool = False


PANELS = (
    Panel("Response length", "tokens", (("response/length", "mean"), ("response/length_max", "longest"))),
    Panel(
        "How responses end",
        "share of rollouts",
        (("response/truncated", "cut at rollout.max_tokens"), ("reward/dropped", "dropped")),
        "The others ended by themselves.",
    ),
    Panel("Groups without signal", "share of groups", (("group/without_signal", "all rewards equal"),)),
    Panel(
        "Clipped",
        "share",
        (
            ("clip/sequence_removed", "sequences, gradient removed"),
            ("clip/token_removed", "tokens, gradient removed"),
            ("clip/sequence_outside", "sequences outside the range"),
            ("clip/token_outside", "tokens outside the range"),
        ),
    ),
    Panel(
        "Spread of the ratios",
        "log-ratio (nats)",
        (
            ("ratio/log_p50", "median"),
            ("ratio/log_p01", "1 %"),
            ("ratio/log_p99", "99 %"),
        ),
        "Current policy over old, per unit of the objective, over all updates of a step.",
    ),
    Panel("Extremes of the ratios", "log-ratio (nats)", (("ratio/log_min", "smallest"), ("ratio/log_max", "largest"))),
    Panel("Entropy of the policy", "nats a token", (("policy/entropy", "entropy"),)),
    Panel("Gradient norm", "norm before clipping", (("optimizer/gradient_norm", "gradient norm"),), logarithmic=True),
    Panel("KL to the starting policy", "nats a token", (("policy/kl", "KL"),)),
    Panel(
        "Inference engine against training engine",
        "|difference| (nats)",
        (
            ("mismatch/token", "token, mean"),
            ("mismatch/token_max", "token, largest"),
            ("mismatch/sequence", "response mean"),
        ),
        "At the weights that sampled, before any update.",
        logarithmic=True,
    ),
    Panel(
        "Experts",
        "share",
        (
            ("routing/changed_last", "changed after the step's last update"),
            ("routing/agreement", "forced and chosen anyway"),
            ("routing/unused", "unused"),
        ),
    ),
)


def plots(lines: Sequence[Line]) -> Iterator[str]:
    """Each plot of which there is something to show, as HTML."""
    accuracy = [
        Curve(_label("held out", line, lines), points, colour=i, whiskers=True)
        for i, line in enumerate(lines)
        if (points := accuracy_curve(line))
    ]
    yield _figure("Held-out accuracy", curve_plot(accuracy, "step", "accuracy"), "With 95 % intervals.")
    yield _of(_reward_panel(lines), lines, _metrics)
    for panel in PANELS:
        yield _of(panel, lines, _metrics)
    stages = _names(lines, _timings, "seconds/")
    seconds = tuple((name, name.removeprefix("seconds/")) for name in stages)
    yield _of(Panel("Time by stage", "seconds a step", seconds), lines, _timings)
    speeds = tuple((name, name.partition("/")[2]) for name in _names(lines, _timings, "tokens_per_second/"))
    yield _of(Panel("Speed by stage", "tokens a second", speeds, logarithmic=True), lines, _timings)


def clip_bounds(objective: ObjectiveConfig) -> tuple[float, float] | None:
    """(clip_low, clip_high) of a run; None where its objective gives the two another meaning."""
    own = _OWN_RANGES.get(objective.name)
    if own is None:
        return None
    low, high = objective.clip_low, objective.clip_high
    return own[0] if low is None else low, own[1] if high is None else high


def _of(panel: Panel, lines: Sequence[Line], records: Records) -> str:
    """One run: a colour per figure. Several: a colour per run, a dash per figure."""
    curves = []
    for i, line in enumerate(lines):
        for k, (figure, label) in enumerate(panel.figures):
            points: list[Point] = curve(line, figure, records)
            if points:
                colour, dash = (k, 0) if len(lines) == 1 else (i, k)
                curves.append(Curve(_label(label, line, lines), points, colour, dash))
    levels = _clip_levels(lines) if panel.y_name.startswith("log-ratio") else []
    drawn = curve_plot(curves, "step", panel.y_name, lines=levels, logarithmic=panel.logarithmic)
    return _figure(panel.title, drawn, panel.explained)


def _figure(title: str, drawn: str, explained: str) -> str:
    return f"<h3>{escape(title)}</h3><p>{escape(explained)}</p>{drawn}" if drawn else ""


def _label(label: str, line: Line, lines: Sequence[Line]) -> str:
    return label if len(lines) == 1 else f"{line.name}: {label}"


def _reward_panel(lines: Sequence[Line]) -> Panel:
    functions = _names(lines, _metrics, "reward/function/")
    each = tuple((name, name.removeprefix("reward/function/")) for name in functions) if len(functions) > 1 else ()
    return Panel("Reward", "reward", (("reward/mean", "mean"), ("reward/accuracy", "share correct, as sampled"), *each))


def _clip_levels(lines: Sequence[Line]) -> list[tuple[str, float]]:
    """The clip range as log-ratios, where all runs have the same."""
    found = {None if run.config is None else clip_bounds(run.config.objective) for line in lines for run in line.runs}
    bounds = found.pop()
    if found or bounds is None:
        return []
    low, high = bounds
    levels = [(f"1 + {high:g}", math.log1p(high))]
    return [(f"1 - {low:g}", math.log1p(-low)), *levels] if low < 1 else levels


def _names(lines: Sequence[Line], records: Records, prefix: str) -> list[str]:
    """Figures that begin so, in the order in which they first appear."""
    return list(
        dict.fromkeys(
            name for line in lines for run in line.runs for r in records(run) for name in r if name.startswith(prefix)
        )
    )


def _metrics(run: RunRecords) -> Sequence[Record]:
    return run.metrics


def _timings(run: RunRecords) -> Sequence[Record]:
    return run.timings
