"""`gspo.distributed.ray_launch`: the run of one process, by actors of a real Ray; and how a job ends when one fails."""

import os
import secrets
import subprocess
import sys
import tempfile
import time

import psutil
import pytest

from gspo.distributed.ray_actors import Place, variables
from gspo.distributed.ray_launch import main
from tests.distributed.jobs import CONFIG, assert_same_run, finish, interrupt_after_a_step, start
from tests.policy.tiny import save_tiny

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def temporary():
    """Where Ray keeps its sockets: their paths may not be long."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        yield folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a config, its model, and a module with the reward."""
    path = tmp_path_factory.mktemp("ray")
    text = CONFIG.format(model=save_tiny(path / "model", scale=2.0), runs=path / "runs")
    text = text.replace("steps = 3", "steps = 2").replace("tests.training.tiny_task:early_words", "my_reward:right")
    (path / "tiny.toml").write_text(text)
    (path / "my_reward.py").write_text("from tests.training.tiny_task import early_words as right\n")
    return path


@pytest.fixture(scope="module")
def cluster(temporary):
    """The variables under which a job finds a cluster of two machines with one CPU each, which it takes for its own."""
    variables = {
        "RAY_TMPDIR": temporary,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with subprocess.Popen(
        [sys.executable, "-m", "tests.distributed.ray_cluster"],
        env=os.environ | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        address = running.stdout.readline().strip()
        assert address
        yield variables | {"RAY_ADDRESS": address}
        running.stdin.close()
        running.wait(60)


def launch(folder, ray, *arguments, processes=2):
    command = ["-m", "gspo.distributed.ray_launch", "--processes", processes, "train", *arguments]
    return start(*command, folder=folder, **ray)


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_two_actors_of_a_local_ray_make_the_run_of_one(folder, temporary):
    alone = start("-m", "gspo", "train", "tiny.toml", "--run.name", "one", folder=folder)
    assert finish(alone)[0] == 0
    ray = {"RAY_TMPDIR": temporary, "HOME": str(folder)}
    status, said, _, errors = finish(launch(folder, ray, "tiny.toml", "--run.name", "two"))
    assert status == 0, errors
    assert errors == ""
    assert_same_run(folder / "runs" / "one", folder / "runs" / "two")
    assert "processes: 2, each with the whole policy and its share of the rollouts" in said
    for step in (1, 2):
        assert said.count(f"step {step}/2 ") == 1, "one process speaks"
    assert not (folder / ".ray").exists(), "no token is left in the home directory"
    wait_for(lambda: not [p for p in psutil.process_iter(["cmdline"]) if temporary in str(p.info["cmdline"])])


def test_the_error_of_one_process_is_the_cause_that_is_told(folder, cluster):
    function = "tests.distributed.failures:rows_but_not_for_the_second"
    status, _, said, errors = finish(
        launch(folder, cluster, "tiny.toml", "--run.name", "lost-data", "--task.function", function)
    )
    assert status == 2
    assert len(said) == 1, errors
    assert "the second process has lost its data" in said[0]


def test_an_actor_that_is_killed_ends_the_job(folder, cluster):
    reward = '[{function = "tests.distributed.failures:kills_the_second_actor"}]'
    job = launch(folder, cluster, "tiny.toml", "--run.name", "killed", "--reward.functions", reward)
    status, _, said, errors = finish(job)
    assert status == 1
    assert len(said) == 1, errors
    assert said[0].startswith("gspo: process 1 of 2, on ")
    assert "was lost with its Ray actor" in said[0]
    pid = int((folder / "second.pid").read_text())
    wait_for(lambda: not psutil.pid_exists(pid))
    assert not list((folder / "runs" / "killed" / "rollouts").iterdir()), "a step that was not finished is not on disk"


def test_ctrl_c_ends_the_job_after_what_is_being_written(folder, cluster):
    reward = '[{function = "tests.distributed.failures:slow_early_words"}]'
    words = ["--run.name", "stopped", "--reward.functions", reward, "--training.steps", 40]
    job = launch(folder, cluster, "tiny.toml", *words)
    metrics = folder / "runs" / "stopped" / "metrics.jsonl"
    interrupt_after_a_step(job, metrics)
    status, _, said, errors = finish(job)
    assert status == 130
    assert len(said) == 1, errors
    assert said[0].startswith("gspo: interrupted; go on with: gspo train --resume ")
    assert (metrics.parent / "checkpoints" / "step-000001").is_dir(), "what was finished is not lost"


@pytest.mark.parametrize(
    ("processes", "flags", "said"),
    [
        (3, [], "--processes 3: each asks for 1 CPU, and Ray has room for 2, with 2 CPU on 2 machine(s); lower"),
        (2, ["--model.device", "cuda"], "--processes 2: each asks for 1 CPU and 1 GPU, and Ray has room for 0, with"),
    ],
)
def test_what_the_cluster_has_no_room_for_is_refused_at_once(folder, cluster, processes, flags, said):
    status, _, told, errors = finish(launch(folder, cluster, "tiny.toml", *flags, processes=processes))
    assert status == 2
    assert len(told) == 1, errors
    assert told[0].startswith(f"gspo: {said}")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1", "nowhere.invalid:6379"])
def test_a_cluster_that_is_not_there_is_told(address, folder, capsys):
    assert main(["--processes", "2", "--address", address, "train", str(folder / "tiny.toml")]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"gspo: --address {address}: no Ray to connect to (")
    assert told.count("\n") == 1


def test_ranks_count_up_on_each_machine_and_see_the_gpus_of_all_there():
    places = [Place("a", "10.0.0.1", "3"), Place("a", "10.0.0.1", "0"), Place("b", "10.0.0.2", "GPU-7f")]
    found = variables(places, 4321)
    assert [(v["RANK"], v["LOCAL_RANK"], v["CUDA_VISIBLE_DEVICES"]) for v in found] == [
        ("0", "0", "3,0"),
        ("1", "1", "3,0"),
        ("2", "0", "GPU-7f"),
    ]
    for each in found:
        assert (each["WORLD_SIZE"], each["MASTER_ADDR"], each["MASTER_PORT"]) == ("3", "10.0.0.1", "4321")
    assert variables([Place("a", "10.0.0.1")], 0) == [{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--processes", "0", "train", "x.toml"], "--processes: found 0, should be 1 or more"),
        (["--processes", "2"], "nothing: on Ray runs gspo train"),
        (["--processes", "2", "eval", "model"], "eval: on Ray runs gspo train"),
        (["--processes", "2", "train", "missing.toml"], "missing.toml: no such file"),
        (["train", "x.toml"], "the following arguments are required: --processes; see "),
    ],
)
def test_what_cannot_work_is_told_before_ray_starts(words, said, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"gspo: {said}")


@pytest.mark.parametrize(
    ("ray", "flags", "said"),
    [
        (None, [], "--processes: needs Ray, which is not installed; pip install 'gspo[ray]'"),
        (
            "",
            ["--address", "ray://head:10001"],
            "--address ray://head:10001: a Ray client cannot start this; run",
        ),
    ],
)
def test_what_ray_cannot_do_is_told(ray, flags, said, folder, capsys, monkeypatch):
    if ray is None:
        monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["--processes", "2", *flags, "train", str(folder / "tiny.toml")]) == 2
    assert capsys.readouterr().err.startswith(f"gspo: {said}")
