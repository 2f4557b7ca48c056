"""`torchrun -m gspo train`: the run of one process, by two; and how a job ends when one of them fails."""

import time

import pytest

from tests.distributed.jobs import CONFIG, SECONDS, assert_same_run, finish, interrupt_after_a_step, lines, start
from tests.policy.tiny import save_tiny


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torchrun")
    path = folder / "tiny.toml"
    path.write_text(CONFIG.format(model=save_tiny(folder / "model", scale=2.0), runs=folder / "runs"))
    return path


def launch(*arguments, processes=2):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
    return start(*torchrun, "-m", "gspo", "train", *arguments)


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
    assert_same_run(one, two)
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
    interrupt_after_a_step(job, metrics)
    status, _, said, errors = finish(job)
    assert status != 0
    assert len(said) == 1, errors
    assert said[0].startswith("gspo: interrupted; go on with: gspo train --resume ")
    done = len(lines(metrics))
    status, output, _, errors = finish(launch("--resume", metrics.parent, "--training.steps", done + 1))
    assert status == 0, errors
    assert [record["step"] for record in lines(metrics)] == list(range(1, done + 2))
    assert "resumed after step" in output
