"""Whole runs by several processes: their config, how they are waited for, and what must be equal in two of them."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from gspo.reporting.journal import read_rollouts
from tests.distributed.processes import REPOSITORY, environment

CONFIG = """
[model]
path = "{model}"
device = "cpu"

[run]
dir = "{runs}"

[task]
kind = "function"
function = "tests.training.tiny_task:rows"
held_out = 5

[[reward.functions]]
function = "tests.training.tiny_task:early_words"

[reward]
correct_at = 0.5

[rollout]
prompts = 4
group_size = 4
max_tokens = 6
resample_without_signal = 1

[objective]
clip_low = 0.05
clip_high = 0.05

[optimizer]
learning_rate = 1e-3

[training]
steps = 3
minibatches = 2

[evaluation]
every = 2

[checkpoint]
every = 1
"""
SECONDS = 200


def start(*command, folder=REPOSITORY, **variables):
    """A job, not waited for; it has its own process group, so that Ctrl-C can be sent to it alone."""
    clean = {k: v for k, v in environment().items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=clean | variables,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(job, seconds=SECONDS):
    """Its exit status, what it said on standard output, and the `gspo:` lines of standard error."""
    try:
        output, errors = job.communicate(timeout=seconds)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    return job.returncode, output, [line for line in errors.splitlines() if line.startswith("gspo: ")], errors


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def interrupt_after_a_step(job, metrics):
    """Sends Ctrl-C as soon as the first line is in the run's metrics file."""
    deadline = time.monotonic() + SECONDS
    while not (metrics.exists() and lines(metrics)):
        assert job.poll() is None, job.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(job.pid, signal.SIGINT)


def assert_same_run(one, other):
    """The responses of two run folders are equal, and so are the metrics to rounding."""
    files = sorted((one / "rollouts").glob("*.zst")) + sorted((one / "evaluations").glob("*.zst"))
    assert files
    for file in files:
        expected, found = read_rollouts(file), read_rollouts(other / file.relative_to(one))
        assert [(r.slot, r.sample, r.response_ids) for r in found] == [
            (r.slot, r.sample, r.response_ids) for r in expected
        ]
        assert [r.reward for r in found] == [r.reward for r in expected]
    for a, b in zip(lines(one / "metrics.jsonl"), lines(other / "metrics.jsonl"), strict=True):
        assert a.keys() == b.keys()
        assert {n: c for n, (_, c) in a["sums"].items()} == {n: c for n, (_, c) in b["sums"].items()}
        for metric, value in a.items():
            if isinstance(value, float):
                assert b[metric] == pytest.approx(value, rel=1e-3, abs=1e-5), metric
    assert [e["accuracy"] for e in lines(one / "evaluations.jsonl")] == [
        e["accuracy"] for e in lines(other / "evaluations.jsonl")
    ]
