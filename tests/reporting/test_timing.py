"""Stages add up."""

import time

import pytest

from gspo.reporting.timing import StageClock, peak_memory_bytes


def test_a_stage_entered_twice_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 2.0, 10.0, 13.0, 20.0, 21.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    clock = StageClock()
    for name in ("rollout", "update", "rollout"):
        with clock.stage(name):
            pass
    assert clock.seconds == {"rollout": 3.0, "update": 3.0}


def test_a_stage_that_fails_is_timed_and_its_error_goes_on() -> None:
    clock = StageClock()
    with pytest.raises(KeyError), clock.stage("rewards"):
        raise KeyError
    assert clock.seconds["rewards"] >= 0


def test_peak_memory_is_in_bytes() -> None:
    assert 20e6 < peak_memory_bytes() < 1e12  # a Python process with torch holds more than 20 MB
