"""Tasks and rewards that go wrong in one process of several."""

import os
import signal
import time
from pathlib import Path

import psutil

from tests.training.tiny_task import early_words, rows


def rows_but_not_for_the_second():
    if os.environ.get("RANK") == "1":
        raise ValueError("the second process has lost its data")
    return rows()


def kills_the_second_process(completions, goal, **columns):
    """Called in a worker process of its own, whose parent is the process that trains."""
    if os.environ.get("RANK") == "1" and len(completions) > 2:  # not the trial call
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(5)
    return early_words(completions, goal, **columns)


def kills_the_second_actor(completions, goal, **columns):
    """The same, for what started the process that trains. The pid of the latter is left in a file."""
    if os.environ.get("RANK") == "1" and len(completions) > 2:
        trains = psutil.Process(os.getppid())
        Path("second.pid").write_text(str(trains.pid))
        trains.parent().kill()
        time.sleep(5)
    return early_words(completions, goal, **columns)


def slow_early_words(completions, goal, **columns):
    time.sleep(0.3)
    return early_words(completions, goal, **columns)
