"""Run folders made by hand: settings, figures and rollouts as a run writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo.config import Config, build_config
from gspo.reporting.journal import write_rollouts
from gspo.reporting.metrics import Metric, Ratio, as_record
from gspo.reporting.run_folder import RunFolder
from gspo.reporting.warning_log import WarningLog
from gspo.types import Rollout

CALM: Mapping[str, Metric] = {
    "reward/mean": Ratio(8.0, 16),
    "reward/accuracy": Ratio(8, 16),
    "reward/dropped": Ratio(0, 16),
    "group/without_signal": Ratio(1, 4),
    "response/length": Ratio(160, 16),
    "response/length_max": 12,
    "response/truncated": Ratio(1, 16),
    "policy/entropy": Ratio(80.0, 160),
    "mismatch/token": Ratio(1.6e-4, 160),
    "mismatch/token_max": 1e-5,
    "mismatch/sequence": Ratio(1.6e-5, 16),
    "ratio/log_p01": -1e-3,
    "ratio/log_p50": 0.0,
    "ratio/log_p99": 1e-3,
    "ratio/saturated": Ratio(0, 16),
    "clip/sequence_removed": Ratio(2, 16),
    "clip/token_removed": Ratio(24, 160),
    "optimizer/gradient_norm": Ratio(2.0, 4),
    "optimizer/non_finite": 0,
}
"""The figures of a step in which nothing stands out."""


def settings(steps: int = 12, **sections: Mapping[str, Any]) -> Config:
    base: dict[str, Any] = {
        "model": {"path": "m"},
        "task": {"kind": "jsonl", "path": "rows.jsonl"},
        "training": {"steps": steps},
    }
    return build_config({**base, **{name: {**base.get(name, {}), **part} for name, part in sections.items()}})


def make_run(
    folder: Path,
    metrics: Sequence[Mapping[str, Metric]] = (),
    *,
    config: Config | None = None,
    accuracy: Mapping[int, tuple[float, float, float]] | None = None,
    rollouts: Mapping[int, Sequence[Rollout]] | None = None,
    held_out: Mapping[int, Sequence[Rollout]] | None = None,
    warnings: Mapping[int, str] | None = None,
) -> Path:
    """A run whose steps, from 1 on, have these figures (over those of `CALM`)."""
    run = RunFolder(folder)
    run.make(config if config is not None else settings(max(1, len(metrics))))
    lines = [{"step": step, **as_record({**CALM, **figures})} for step, figures in enumerate(metrics, 1)]
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    timing = {
        "seconds": {"rollout": 2.0, "update": 6.0},
        "tokens": {"rollout": 100, "update": 100},
        "tokens_per_second": {"rollout": 50.0, "update": 100 / 6},
    }
    run.timings_file.write_text("".join(json.dumps({"step": line["step"], **timing}) + "\n" for line in lines))
    evaluations = [
        {"step": step, "accuracy": {"value": value, "low": low, "high": high, "n": 50}}
        for step, (value, low, high) in (accuracy or {}).items()
    ]
    run.evaluations_file.write_text("".join(json.dumps(line) + "\n" for line in evaluations))
    for step, text in (warnings or {}).items():
        WarningLog(run.warnings_file).add(step, "settings", text, once=False)
    for step, of_step in (rollouts or {}).items():
        write_rollouts(run.rollout_file(step), of_step)
    for step, of_step in (held_out or {}).items():
        write_rollouts(run.evaluation_file(step), of_step)
    return folder
