"""What is shown of a job of several processes, and what it ends with."""

import signal
import time

import pytest

from gspo.distributed.job import FOLLOW_SECONDS, KEPT_BYTES, follow
from gspo.errors import GspoError

MACHINES = ["10.0.0.1", "10.0.0.1", "10.0.0.2"]
OUT, ERR = 1, 2


class Scripted:
    """Processes of which is known what happens: events of `next_event`, or Ctrl-C; then nothing more."""

    def __init__(self, *events):
        self.events = list(events)
        self.interrupts = 0

    def next_event(self, seconds):
        if not self.events:
            time.sleep(seconds)
            return None
        event = self.events.pop(0)
        if event is KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
            return None
        return event

    def interrupt(self):
        self.interrupts += 1


def test_the_main_process_alone_is_heard_of_a_job_that_succeeds(capfdbinary):
    said = [(0, (OUT, b"step 1\n")), (1, (OUT, b"x\n")), (2, (ERR, b"warning\n")), (0, (ERR, b"note\n"))]
    processes = Scripted(*said, (1, 0), (0, (OUT, b"step 2\n")), (2, 0), (0, 0))
    assert follow(processes, MACHINES) == 0
    assert capfdbinary.readouterr() == (b"step 1\nstep 2\n", b"note\n")


@pytest.mark.parametrize("order", [(1, 0), (0, 1)])
def test_a_failed_process_is_heard_and_its_status_is_the_jobs(order, capfdbinary):
    statuses = {1: 2, 0: 1}
    events = [(1, (ERR, b"gspo: no data\n")), (2, (ERR, b"warning\n")), *((rank, statuses[rank]) for rank in order)]
    begun = time.monotonic()
    assert follow(Scripted(*events), MACHINES) == 2, "bad input, though those that noticed have status 1"
    assert capfdbinary.readouterr() == (b"", b"gspo: no data\n")
    assert time.monotonic() - begun >= FOLLOW_SECONDS, "the third might have been the cause"


def test_of_a_failed_process_the_end_is_kept(capfdbinary):
    long = b"a" * KEPT_BYTES
    assert follow(Scripted((2, (OUT, b"begin")), (2, (ERR, long)), (2, (ERR, b"end")), (2, 1)), MACHINES) == 1
    assert capfdbinary.readouterr().err == long[3:] + b"end"


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (-signal.SIGKILL, "process 2 of 3, on 10.0.0.2, was killed by SIGKILL"),
        ("lost with its Ray actor", "process 2 of 3, on 10.0.0.2, was lost with its Ray actor"),
    ],
)
def test_a_process_that_is_gone_ends_the_job_by_name(what, told, capfdbinary):
    with pytest.raises(GspoError) as error:
        follow(Scripted((1, (ERR, b"gspo: another process\n")), (1, 1), (2, what), (0, 0)), MACHINES)
    assert str(error.value) == told
    assert capfdbinary.readouterr() == (b"", b"")


def test_ctrl_c_is_handed_on_and_waited_for(capfdbinary):
    before = signal.getsignal(signal.SIGINT)
    processes = Scripted(
        (0, (OUT, b"step 1\n")), KeyboardInterrupt, (1, (ERR, b"gspo: interrupted\n")), (1, 130), (0, 1), (2, 1)
    )
    assert follow(processes, MACHINES) == 130
    assert processes.interrupts == 1
    assert signal.getsignal(signal.SIGINT) is before
    assert capfdbinary.readouterr() == (b"step 1\n", b"gspo: interrupted\n")


def test_a_second_ctrl_c_is_not_waited_for():
    processes = Scripted(KeyboardInterrupt, KeyboardInterrupt, (0, 0), (1, 0), (2, 0))
    assert follow(processes, MACHINES) == 130
    assert len(processes.events) == 3
