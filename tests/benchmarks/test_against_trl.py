"""Both sides of the comparisons with TRL, whole, on a tiny random model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is an extra of the benchmarks")
pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *arguments: str, json_file: Path) -> Any:
    command = [sys.executable, str(FOLDER / script), "--model", "tiny", "--threads", "1", "--json", str(json_file)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(json_file.read_text())


def test_an_update_has_trls_gradient(tmp_path: Path) -> None:
    (row,) = run("update.py", "--row", "2", "12", "4", "16", "--repeats", "1", json_file=tmp_path / "rows.json")
    assert (row["model"], row["prompt_length"], row["group_size"], row["response_max"]) == ("tiny", 12, 4, 16)
    assert row["gradient_cosine"] >= 1 - 1e-6
    assert row["gradient_norm_ratio"] == pytest.approx(1, abs=1e-4)
    for side in ("ours", "trl"):
        assert row[side]["response_tokens_per_s"] == pytest.approx(row["response_tokens"] / row[side]["seconds"])
        assert row[side]["peak_rss_mb"] > 100
    assert row["ours"]["attention"] == "tiles: not an NVIDIA GPU"
    assert row["speedup"] == pytest.approx(row["trl"]["seconds"] / row["ours"]["seconds"])
    assert row["memory_ratio"] == pytest.approx(row["ours"]["peak_rss_mb"] / row["trl"]["peak_rss_mb"])


def test_a_step_is_timed_on_both_sides(tmp_path: Path) -> None:
    sizes = ["--prompts", "2", "--group-size", "4", "--max-tokens", "6", "--minibatches", "2", "--steps", "2"]
    found = run("step.py", *sizes, json_file=tmp_path / "step.json")
    assert found["speedup"] == pytest.approx(
        found["ours"]["response_tokens_per_s"] / found["trl"]["response_tokens_per_s"]
    )
    assert found["speedup_cpu"] == pytest.approx(
        found["ours"]["response_tokens_per_cpu_s"] / found["trl"]["response_tokens_per_cpu_s"]
    )
    assert {"rollout", "score", "update"} <= found["ours"]["stages"].keys()
    assert found["trl"]["stages"].keys() == {"rollout", "reward", "score", "update"}
    for side in ("ours", "trl"):
        # The one step that counts: its stages are all of it.
        assert sum(found[side]["stages"].values()) == pytest.approx(found[side]["seconds"], rel=1e-6)
        assert 0 < found[side]["cpu_seconds"] < 60
        assert 8 <= found[side]["response_tokens"] <= 2 * 4 * 6
