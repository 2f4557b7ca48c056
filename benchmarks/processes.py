"""One side of a comparison in a process of its own, so that its peak memory is its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from gspo.reporting.timing import peak_memory_bytes

# A waiting thread spins for a fraction of a millisecond: longer would cost a busy machine most of its time, and without
# any each small product waits for a thread that sleeps.
QUIET = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20000", "TOKENIZERS_PARALLELISM": "false"}


def run_side(script: str, side: str, settings: dict[str, Any], folder: Path, *, threads: int | None = None) -> Any:
    """Runs `script --side SIDE FOLDER` and returns the figures that it left; `settings` lie in the folder too.

    Exits with the end of what the process said if it failed.
    """
    (folder / "settings.json").write_text(json.dumps(settings))
    limits = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, script, "--side", side, str(folder)]
    done = subprocess.run(command, env=QUIET | os.environ | limits, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{side} ended with status {done.returncode} (-9: out of memory)\n{done.stderr[-3000:]}")
    return json.loads((folder / f"{side}.json").read_text())


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings that `run_side` wrote."""
    found: dict[str, Any] = json.loads((folder / "settings.json").read_text())
    return found


def write_figures(side: str, figures: dict[str, Any], folder: Path) -> None:
    """Leaves a side's figures where `run_side` looks for them."""
    (folder / f"{side}.json").write_text(json.dumps(figures))


def peak_rss_bytes() -> int:
    """Most memory that this process held; `ru_maxrss` would count what its parent held when it started it."""
    status = Path("/proc/self/status")
    if not status.exists():
        return peak_memory_bytes()
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
