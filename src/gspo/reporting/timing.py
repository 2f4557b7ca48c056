"""Seconds per stage and peak memory: what differs from machine to machine, kept apart from the metrics."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StageClock:
    """Adds up the seconds of each stage of a step.

    >>> clock = StageClock()
    >>> with clock.stage("rollout"):
    ...     pass
    >>> list(clock.seconds)
    ['rollout']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times what it encloses, work that was queued on a GPU included; the same name again adds up."""
        start = _now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + _now() - start


def _now() -> float:
    if _on_gpu():
        torch.cuda.synchronize()
    return time.perf_counter()


def _on_gpu() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def peak_memory_bytes() -> int:
    """Most memory held so far: the GPU's where one is in use, else the resident size of the process."""
    if _on_gpu():
        return int(torch.cuda.max_memory_allocated())
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
