"""Signals that ask a run to end: Ctrl-C never leaves a file half-written, and SIGTERM is told from it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds Ctrl-C back until the block is done, then raises KeyboardInterrupt.

    Outside the main thread signals are not delivered, and a process that was started with Ctrl-C ignored (in the
    background) stays so: there the block simply runs.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    received: list[int] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    try:
        previous = signal.signal(signal.SIGINT, remember)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if received:
        raise KeyboardInterrupt


class Terminated(KeyboardInterrupt):
    """SIGTERM, which schedulers send before they kill."""


@contextmanager
def terminable() -> Iterator[None]:
    """Raises Terminated in the block on SIGTERM, so that what was opened is closed. In the main thread alone."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    try:
        previous = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
