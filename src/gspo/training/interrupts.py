"""Signals that ask a run to end: neither Ctrl-C nor SIGTERM cuts a checkpoint short, and they are told apart."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds Ctrl-C, and a SIGTERM that `terminable` or the user's program handles, back until the block is done.

    Then the first of them is handled as it would have been. Outside the main thread signals are not delivered, and
    what was ignored from the start (Ctrl-C, in the background) or ends the process unasked (SIGTERM) stays so.
    """
    received: list[int] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    held = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        for number in held:
            signal.signal(number, remember)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
    if received:
        signal.raise_signal(received[0])


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
