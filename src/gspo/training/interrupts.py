"""Signals that ask a run to end: neither Ctrl-C nor SIGTERM cuts a checkpoint short, and they are told apart."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], None]


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
    with _handled({number: remember for number, handler in handlers.items() if callable(handler)}):
        yield
    if received:
        signal.raise_signal(received[0])


class Terminated(KeyboardInterrupt):
    """SIGTERM, which schedulers send before they kill."""


@contextmanager
def terminable() -> Iterator[None]:
    """Raises Terminated in the block on SIGTERM, so that what was opened is closed. In the main thread alone."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    with _handled({signal.SIGTERM: stop}):
        yield


@contextmanager
def _handled(handlers: Mapping[int, Handler]) -> Iterator[None]:
    """Signals are handled so meanwhile; outside the main thread, where they do not arrive, nothing changes."""
    before: dict[int, Any] = {}
    with suppress(ValueError):  # not the main thread
        for number, handler in handlers.items():
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
