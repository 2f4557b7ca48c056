"""A process under a supervisor: where it starts, what is heard of it, and that neither outlives its time."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from gspo.distributed.launch import is_first_failure
from gspo.distributed.supervised import SupervisedProcess
from tests.distributed.processes import REPOSITORY

PATHS = {"PYTHONPATH": str(REPOSITORY / "src")}


def end(process):
    """Its exit status, standard output and standard error."""
    said = {1: b"", 2: b""}
    while isinstance(event := process.follow(), tuple):
        said[event[0]] += event[1]
    return event, said[1], said[2]


@pytest.fixture
def python(monkeypatch):
    """A supervised process that runs the given code in place of gspo."""
    started = []

    def run(code, common=PATHS, own=PATHS, folder=str(REPOSITORY)):
        monkeypatch.setattr("gspo.distributed.supervised.START", code)
        started.append(SupervisedProcess())
        assert started[-1].start([], folder, common, own)
        return started[-1]

    yield run
    for process in started:
        if process._process.poll() is None:
            process._process.kill()
        process._process.wait()


def test_it_runs_gspo_with_the_words_in_the_folder(tmp_path):
    (tmp_path / "bad.toml").write_text("steps = 1\n")
    process = SupervisedProcess()
    assert process.start(["train", "bad.toml"], str(tmp_path), {}, PATHS)
    status, output, errors = end(process)
    assert (status, output) == (2, b"")
    assert errors.startswith(b"gspo: bad.toml: ")


def test_a_folder_that_is_not_here_is_said(tmp_path):
    assert not SupervisedProcess().start(["train"], str(tmp_path / "elsewhere"), {}, {})


def test_its_variables_are_this_machines_and_those_given(python, monkeypatch):
    monkeypatch.setenv("HERE", "here")
    code = "import os; print(*(os.environ[name] for name in ('HERE', 'RANK', 'KEY')))"
    common = PATHS | {"HERE": "there", "RANK": "7", "KEY": "secret"}
    assert end(python(code, common, {"RANK": "1"})) == (0, b"here 1 secret\n", b"")


def test_output_is_heard_as_it_comes(python):
    process = python("import os, time; os.write(1, b'first'); os.write(2, b'why'); time.sleep(60)")
    assert sorted(process.follow() for _ in range(2)) == [(1, b"first"), (2, b"why")]
    os.kill(process._process.pid, signal.SIGKILL)
    assert process.follow() == -signal.SIGKILL


def test_output_that_a_left_child_holds_open_is_not_waited_for(python):
    start = time.monotonic()
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(20)']); print(1)"
    assert end(python(code)) == (0, b"1\n", b"")
    assert time.monotonic() - start < 15


def test_ctrl_c_reaches_it_though_it_was_started_with_it_blocked(python):
    wait = "import os, time\nos.write(1, b'ready')\n"
    wait += "try: time.sleep(60)\nexcept KeyboardInterrupt: os.write(1, b'stopped')"
    code = f"import gspo.cli\ngspo.cli.main = lambda: exec({wait!r})\n"
    code += "from gspo.distributed.supervised import run_supervised; run_supervised()"
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = python(code)
        assert process.follow() == (1, b"ready")
        process.interrupt()
        assert end(process) == (0, b"stopped", b"")
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def test_it_ends_with_its_supervisor():
    code = "import gspo.cli, os, time\ngspo.cli.main = lambda: (print(os.getpid()), time.sleep(60))\n"
    code += "from gspo.distributed.supervised import run_supervised; run_supervised()"
    supervisor = (
        "from gspo.distributed import supervised\n"
        f"supervised.START = {code!r}\n"
        "process = supervised.SupervisedProcess()\n"
        f"process.start([], '.', {{}}, {PATHS!r})\n"
        "print(process.follow()[1].decode(), flush=True)\n"
        "process.follow()"
    )
    environment = os.environ | PATHS
    with subprocess.Popen([sys.executable, "-c", supervisor], stdout=subprocess.PIPE, env=environment) as started:
        pid = int(started.stdout.readline())
        assert psutil.pid_exists(pid)
        started.kill()
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_its_store_counts_the_failures_of_the_job(monkeypatch):
    supervisor = SupervisedProcess()
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(supervisor.open_store("127.0.0.1"))}
    variables |= {"WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert [is_first_failure() for _ in range(3)] == [True, False, False]
