from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gspo.rewards.callers import ProcessCaller
from gspo.rewards.calls import LostCallError, MisuseError, RewardError

MODULE = """
import os, re, subprocess, time

def pid(completions):
    return [float(os.getpid())] * len(completions)

def hold_the_lock(completions):
    re.match(r"(a+)+$", "a" * 60 + "b")

def child(completions, log):
    process = subprocess.Popen(["sleep", "60"])
    open(log, "w").write(str(process.pid))
    time.sleep(60)

def sleep(completions, seconds):
    open("started", "w").write(str(os.getpid()))
    time.sleep(seconds)
    return [1.0] * len(completions)

class Column:
    def __reduce__(self):
        return explode, ()

def explode():
    raise RuntimeError("cannot load")
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "caller_rewards.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_call_that_holds_the_interpreter_lock_is_killed_and_replaced() -> None:
    caller = ProcessCaller("caller_rewards:hold_the_lock", {})
    try:
        for _ in range(2):
            with pytest.raises(LostCallError, match=r"within 0\.5 s"):
                caller.call({"completions": ["x"]}, 0.5)
    finally:
        caller.close()


def test_killing_takes_what_the_function_started_along(tmp_path: Path) -> None:
    log = tmp_path / "child"
    caller = ProcessCaller("caller_rewards:child", {"log": str(log)})
    try:
        with pytest.raises(LostCallError):
            caller.call({"completions": ["x"]}, 2.0)
    finally:
        caller.close()
    wait_for(lambda: not alive(int(log.read_text())))


def test_interrupting_the_parents_group_leaves_the_worker_alone(tmp_path: Path) -> None:
    caller = ProcessCaller("caller_rewards:sleep", {"seconds": 0.5})
    try:
        thread = threading.Thread(target=lambda: wait_for((tmp_path / "started").exists))
        thread.start()
        assert caller.call({"completions": ["x"]}, 20.0) == [1.0]
        thread.join()
        worker = int((tmp_path / "started").read_text())
        assert os.getpgid(worker) == worker != os.getpgid(0)
    finally:
        caller.close()
    assert not alive(worker)


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    # One worker waits for a call when its parent dies; the other is in a call and ends when that is overdue.
    script = (
        "from gspo.rewards.callers import ProcessCaller\n"
        "idle = ProcessCaller('caller_rewards:pid', {})\n"
        "busy = ProcessCaller('caller_rewards:sleep', {'seconds': 100})\n"
        "print(int(idle.call({'completions': ['x']}, 30)[0]), flush=True)\n"
        "busy.call({'completions': ['x']}, 3.0)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    with parent.stdout:
        idle = int(parent.stdout.readline())
    wait_for((tmp_path / "started").exists)
    wait_for(lambda: bool((tmp_path / "started").read_text()))
    busy = int((tmp_path / "started").read_text())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_for(lambda: not alive(idle))
    wait_for(lambda: not alive(busy))


def test_columns_that_cannot_travel() -> None:
    caller = ProcessCaller("caller_rewards:pid", {})
    try:
        with pytest.raises(MisuseError, match="cannot be passed to a worker process"):
            caller.call({"completions": ["x"], "lock": [threading.Lock()]}, 20.0)
        column = importlib.import_module("caller_rewards").Column()
        with pytest.raises(RewardError, match=r"cannot be passed to a worker process \(cannot load\)"):
            caller.call({"completions": ["x"], "column": [column]}, 20.0)
        assert caller.call({"completions": ["x"]}, 20.0)[0] != os.getpid()
    finally:
        caller.close()
