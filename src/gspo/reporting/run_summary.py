"""A run in a few rows: what came out, how it trained, where the time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from gspo.config import Config
from gspo.reporting.console import clock_time, print_estimates, say
from gspo.reporting.files import read_lines
from gspo.reporting.findings import WINDOW, short_reason
from gspo.reporting.run_folder import RunFolder
from gspo.reporting.run_records import RunRecords, joined, total
from gspo.reporting.tables import Rows


def summary(runs: Sequence[RunRecords], reasons: Sequence[Counter[str]]) -> Rows:
    """A column per run; `reasons` are why each dropped rollouts."""
    columns = [_column(run, why) for run, why in zip(runs, reasons, strict=True)]
    names = list(dict.fromkeys(name for column in columns for name in column))
    return [["", *(run.name for run in runs)], *([name, *(c.get(name, "-") for c in columns)] for name in names)]


def print_result(console: Console, run: RunFolder, config: Config) -> None:
    """What a run has come to: held-out accuracy before and after, and where to look."""
    file = run.evaluations_file
    records = read_lines(file) if file.exists() else []
    if records:
        rows = [(f"after step {record['step']}", record["accuracy"]) for record in (records[0], records[-1])]
        rows[0] = ("before" if records[0]["step"] == 0 else rows[0][0], rows[0][1])
        how = "greedy" if config.evaluation.temperature == 0 else f"temperature {config.evaluation.temperature:g}"
        print_estimates(console, f"held-out accuracy ({how})", rows if len(records) > 1 else rows[:1])
    there = run.report_file.exists()
    say(console, f"curves and rollouts: {run.report_file if there else f'gspo report {run.path}'}")
    say(console, f"run: {run.path}")


def _column(run: RunRecords, reasons: Counter[str]) -> dict[str, str]:
    recent = run.metrics[-WINDOW:]
    of_recent = f"(last {len(recent)} steps)" if len(recent) > 1 else "(last step)"
    rows = {"steps": _progress(run), **_accuracies(run)}
    figures = {
        "reward": "reward/mean",
        "clipped sequences": "clip/sequence_removed",
        "clipped tokens": "clip/token_removed",
        "groups without signal": "group/without_signal",
        "responses cut at the limit": "response/truncated",
        "response length": "response/length",
    }
    shares = ("clip/", "group/", "response/truncated")
    for label, name in figures.items():
        value = joined(recent, name)
        text = "-" if value is None else f"{value:.1%}" if name.startswith(shares) else f"{value:.3g}"
        rows[f"{label} {of_recent}"] = text
    rows["reward, last step"] = _short(joined(run.metrics[-1:], "reward/mean"))
    rows["entropy, first to last step (nats)"] = " to ".join(
        _short(joined(part, "policy/entropy")) for part in (run.metrics[:1], run.metrics[-1:])
    )
    rows["tokens a second"] = _speeds(run)
    rows["time in steps"] = _time(run)
    rows["rollouts dropped"] = _dropped(run, reasons)
    rows["warnings"] = str(len(run.warnings))
    return rows


def _progress(run: RunRecords) -> str:
    done, planned = run.last_step, run.planned_steps
    if planned is None or done >= planned:
        return str(done)
    written = run.written
    when = f", last written {written:%Y-%m-%d %H:%M}" if written is not None else ""
    return f"{done} of {planned}{when}"


def _accuracies(run: RunRecords) -> dict[str, str]:
    known = [record for record in run.evaluations if record["accuracy"]["value"] is not None]
    if not known:
        return {"held-out accuracy": "not measured"}
    rows = {}
    if known[0]["step"] == 0:
        rows["held-out accuracy before"] = estimate(known[0]["accuracy"])
    if known[-1]["step"] > 0:
        rows["held-out accuracy, latest"] = f"{estimate(known[-1]['accuracy'])} after step {known[-1]['step']}"
    return rows


def estimate(found: Mapping[str, Any]) -> str:
    """A value with its 95 % interval.

    >>> estimate({"value": 0.5, "low": 0.25, "high": 0.75, "n": 8})
    '0.500 [0.250, 0.750], n = 8'
    """
    return f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}], n = {found['n']}"


def _time(run: RunRecords) -> str:
    """Seconds in all, and the stages that took most."""
    stages = {name: total(run.timings, name)[0] for name in _stages(run)}
    whole = sum(stages.values())
    if not whole:
        return "-"
    longest = sorted(stages.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name.removeprefix('seconds/')} {value / whole:.0%}" for name, value in longest)
    return f"{clock_time(whole)}: {shares}"


def _speeds(run: RunRecords) -> str:
    found = []
    for name in _stages(run):
        stage = name.removeprefix("seconds/")
        seconds, tokens = total(run.timings, name)[0], total(run.timings, f"tokens/{stage}")[0]
        if seconds and tokens:
            speed = tokens / seconds
            found.append(f"{stage} {speed:,.0f}" if speed >= 100 else f"{stage} {speed:.3g}")
    return ", ".join(found) or "-"


def _stages(run: RunRecords) -> list[str]:
    return list(dict.fromkeys(name for record in run.timings for name in record if name.startswith("seconds/")))


def _dropped(run: RunRecords, reasons: Counter[str]) -> str:
    dropped, sampled = total(run.metrics, "reward/dropped")
    text = f"{dropped:.0f} of {sampled:.0f}"
    causes = "; ".join(f"{n} x {short_reason(reason)}" for reason, n in reasons.most_common(3))
    return f"{text} ({causes})" if causes else text


def _short(value: float | int | None) -> str:
    return "-" if value is None else f"{value:.3g}"
