"""A process among others that a launcher started: what it says when it fails, and how it ends. Imports no torch."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

from gspo.errors import BadInputError, GspoError, LostProcessError

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130
"""What a shell reports of a program that Ctrl-C ended."""

HEARING_SECONDS = 1.0
"""How long a process that lost another leaves the word to others: its launcher may know that it was killed."""


def is_one_of_many() -> bool:
    """Whether a launcher (`torchrun`, or ours on Ray) started this process together with others."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def is_first_failure() -> bool:
    """Whether no process of this job has failed before: the first one's reason is the cause, the others' follow.

    The launcher keeps the count, in a store that outlives its processes; where it cannot be asked, every process is
    taken for the first.
    """
    if not is_one_of_many() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10), wait_for_workers=False)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return int(store.add(f"gspo/failed/{attempt}", 1)) == 1
    except RuntimeError:  # the launcher has ended
        return True


def say_why(*lines: str) -> None:
    """Tells the user why a command ends; of several processes that end, the first alone does."""
    if is_first_failure():
        for line in lines:
            print(f"gspo: {line}", file=sys.stderr)


def status_of(command: Callable[[], int]) -> int:
    """The exit status that a command returns, or that of the error that ends it, which the user is told."""
    try:
        return command()
    except BadInputError as error:
        say_why(*str(error).splitlines())
        return BAD_INPUT
    except GspoError as error:
        if isinstance(error, LostProcessError):
            time.sleep(HEARING_SECONDS)
        say_why(*str(error).splitlines())
        return FAILED
    except KeyboardInterrupt:
        say_why("interrupted")
        return INTERRUPTED


def run_among_others(command: Callable[[], int]) -> int:
    """Runs a command whose process is one of many; a status other than 0 ends the process here and now.

    Python's own way out would wait for what belongs to a failed job: threads, and connections to processes that are
    gone. The launcher ends the others as soon as it sees this one end. An error that is not the user's to read is shown
    with its traceback, by the first process that fails.
    """
    try:
        status = command()
    except BaseException:  # noqa: BLE001 (whatever it is, the process ends)
        if is_first_failure():
            traceback.print_exc()
        status = FAILED
    if status != 0:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
