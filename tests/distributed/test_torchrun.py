"""`torchrun -m gspo train`: the run of one process, by two; and how a job ends when one of them fails."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from gspo.reporting.journal import read_rollouts
from tests.distributed.processes import REPOSITORY, environment
from tests.policy.tiny import save_tiny

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


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torchrun")
    path = folder / "tiny.toml"
    path.write_text(CONFIG.format(model=save_tiny(folder / "model", scale=2.0), runs=folder / "runs"))
    return path


def launch(*arguments, processes=2):
    """A job, not waited for; it has its own process group, so that Ctrl-C can be sent to it alone."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    clean = {k: v for k, v in environment().items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    return subprocess.Popen(
        [*start, "-m", "gspo", "train", *map(str, arguments)],
        env=clean,
        cwd=REPOSITORY,
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


@pytest.fixture(scope="module")
def one(config):
    """The run of one process."""
    status, _, _, errors = finish(launch(config, "--run.name", "one", processes=1))
    assert status == 0, errors
    return config.parent / "runs" / "one"


@pytest.mark.parametrize("shard", ["none", "full"])
def test_two_processes_make_the_run_of_one(config, one, shard):
    two = config.parent / "runs" / f"two-{shard}"
    status, said, _, errors = finish(launch(config, "--run.name", two.name, "--distributed.shard", shard))
    assert status == 0, errors
    for file in sorted((one / "rollouts").glob("*.zst")) + sorted((one / "evaluations").glob("*.zst")):
        expected, found = read_rollouts(file), read_rollouts(two / file.relative_to(one))
        assert [(r.slot, r.sample, r.response_ids) for r in found] == [
            (r.slot, r.sample, r.response_ids) for r in expected
        ]
        assert [r.reward for r in found] == [r.reward for r in expected]
    for a, b in zip(lines(one / "metrics.jsonl"), lines(two / "metrics.jsonl"), strict=True):
        assert a.keys() == b.keys()
        assert {n: c for n, (_, c) in a["sums"].items()} == {n: c for n, (_, c) in b["sums"].items()}
        for metric, value in a.items():
            if isinstance(value, float):
                assert b[metric] == pytest.approx(value, rel=1e-3, abs=1e-5), metric
    assert [e["accuracy"] for e in lines(one / "evaluations.jsonl")] == [
        e["accuracy"] for e in lines(two / "evaluations.jsonl")
    ]
    for step in (1, 2, 3):
        assert said.count(f"step {step}/3 ") == 1, "one process speaks"
    part = {"none": "the whole", "full": "a slice of the"}[shard]
    assert f"processes: 2, each with {part} policy and its share of the rollouts" in said


def test_a_bad_setting_is_told_once(config):
    status, _, said, errors = finish(launch(config, "--training.minibatches", 3))
    assert status != 0
    assert len(said) == 1, errors
    assert said[0].startswith("gspo: ")
    assert "training.minibatches = 3 does not divide rollout.prompts = 4" in said[0]
    assert errors.count("exitcode  : 2") >= 1


def test_the_error_of_one_process_is_the_cause_that_is_told(config):
    start = time.monotonic()
    function = "tests.distributed.failures:rows_but_not_for_the_second"
    status, _, said, errors = finish(launch(config, "--run.name", "lost-data", "--task.function", function))
    assert status != 0
    assert len(said) == 1, errors
    assert "the second process has lost its data" in said[0]
    assert time.monotonic() - start < SECONDS


def test_a_process_that_is_killed_ends_the_job(config):
    reward = '[{function = "tests.distributed.failures:kills_the_second_process"}]'
    job = launch(config, "--run.name", "killed", "--reward.functions", reward)
    status, _, said, errors = finish(job)
    assert status != 0
    assert "SIGKILL" in errors
    assert len(said) <= 1, errors
    assert not [line for line in said if "another process of the job ended" not in line]
    rollouts = config.parent / "runs" / "killed" / "rollouts"
    assert not list(rollouts.iterdir()), "a step that was not finished is not on disk"


def test_ctrl_c_ends_the_job_and_the_run_goes_on_from_there(config):
    reward = '[{function = "tests.distributed.failures:slow_early_words"}]'
    job = launch(config, "--run.name", "stopped", "--reward.functions", reward, "--training.steps", 40)
    metrics = config.parent / "runs" / "stopped" / "metrics.jsonl"
    deadline = time.monotonic() + SECONDS
    while not (metrics.exists() and lines(metrics)):
        assert job.poll() is None, job.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(job.pid, signal.SIGINT)
    status, _, said, errors = finish(job)
    assert status != 0
    assert len(said) == 1, errors
    assert said[0].startswith("gspo: interrupted; go on with: gspo train --resume ")
    done = len(lines(metrics))
    status, output, _, errors = finish(launch("--resume", metrics.parent, "--training.steps", done + 1))
    assert status == 0, errors
    assert [record["step"] for record in lines(metrics)] == list(range(1, done + 2))
    assert "resumed after step" in output
