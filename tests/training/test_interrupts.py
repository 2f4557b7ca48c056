import os
import signal
import threading

import pytest

from gspo.training.interrupts import Terminated, terminable, uninterrupted


@pytest.fixture(autouse=True)
def default_handler():
    """As in a terminal, however the tests themselves were started."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_waits_for_the_end_of_the_block():
    reached = []

    def block():
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("after the signal")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert reached == ["after the signal"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_ctrl_c_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_an_error_inside_is_not_hidden_by_a_signal():
    def block():
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        block()


def test_runs_in_other_threads():
    seen = []

    def work():
        with uninterrupted():
            seen.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [1]


def test_sigterm_closes_what_was_opened():
    closed = []

    def block():
        with terminable():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                closed.append(1)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated):
        block()
    assert closed == [1]
    assert signal.getsignal(signal.SIGTERM) is before


def test_other_threads_leave_sigterm_as_it_is():
    seen = []

    def work():
        with terminable():
            seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


@pytest.mark.parametrize(
    ("numbers", "error"),
    [
        ((signal.SIGTERM,), Terminated),
        ((signal.SIGTERM, signal.SIGINT), Terminated),
        ((signal.SIGINT, signal.SIGTERM), KeyboardInterrupt),
    ],
)
def test_what_came_first_is_raised_after_the_block(numbers, error):
    reached = []

    def block():
        with terminable(), uninterrupted():
            for number in numbers:
                os.kill(os.getpid(), number)
            reached.append("after the signals")

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt) as found:
        block()
    assert found.type is error
    assert reached == ["after the signals"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_sigterm_that_nobody_handles_ends_the_process_at_once():
    seen = []
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIG_DFL]
