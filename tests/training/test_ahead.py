"""Work on a thread: in order, never too far ahead, really at the same time, and ended when it must."""

import threading

import pytest

from gspo.errors import GspoError
from gspo.training.ahead import Ahead


def nothing():
    pass


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_no_step_is_made_more_than_lag_steps_early(lag):
    taken = 0
    early = []

    def make(step):
        early.append(step - taken)
        return step * 10

    ahead = Ahead(make, first=1, last=9, lag=lag, stop=nothing)
    for step in range(1, 10):
        taken = step
        assert ahead.take(step) == step * 10
    ahead.close()
    assert len(early) == 9
    assert max(early) <= lag


def test_the_next_step_is_made_while_one_is_used_and_the_one_after_is_not():
    begun = {step: threading.Event() for step in range(1, 6)}

    def make(step):
        begun[step].set()
        return step

    ahead = Ahead(make, first=1, last=5, lag=1, stop=nothing)
    ahead.take(1)
    assert begun[2].wait(10)
    assert not begun[3].wait(0.1)
    ahead.take(2)
    assert begun[3].wait(10)
    ahead.close()


def test_a_resumed_count_starts_where_it_is_told():
    made = []
    ahead = Ahead(made.append, first=4, last=5, lag=2, stop=nothing)
    ahead.take(4)
    ahead.take(5)
    ahead.close()
    assert made == [4, 5]


def test_an_error_waits_for_its_step():
    def make(step):
        if step == 2:
            raise GspoError("no server")
        return step

    ahead = Ahead(make, first=1, last=4, lag=1, stop=nothing)
    assert ahead.take(1) == 1
    for _ in range(2):
        with pytest.raises(GspoError, match="no server"):
            ahead.take(2)
    ahead.close()


def test_closing_ends_what_is_being_made():
    begun, stopped = threading.Event(), threading.Event()

    def make(step):
        if step == 2:
            begun.set()
            assert stopped.wait(10)
            raise GspoError("ended")
        return step

    ahead = Ahead(make, first=1, last=9, lag=1, stop=stopped.set)
    ahead.take(1)
    assert begun.wait(10)
    ahead.close()
    assert [t for t in threading.enumerate() if t.name == "ahead"] == []


def test_closing_before_anything_was_taken_is_nothing():
    calls = []
    Ahead(calls.append, first=1, last=3, lag=1, stop=nothing).close()
    assert calls == []
