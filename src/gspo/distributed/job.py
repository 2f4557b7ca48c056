"""A job of several supervised processes, followed to its end: what is shown of them, and what ends it. Knows no Ray."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from gspo.distributed.launch import INTERRUPTED
from gspo.distributed.supervised import Said
from gspo.errors import GspoError

FOLLOW_SECONDS = 2.0
"""After a process failed: how long the others' ends are waited for. The cause may be heard of last."""
INTERRUPT_SECONDS = 30.0
"""After Ctrl-C: how long a checkpoint that is being written is waited for, as `torchrun` does."""
LOOK_SECONDS = 0.5
"""How often Ctrl-C is looked for."""
KEPT_BYTES = 20_000
"""Of the output of a process other than the main one: what is kept, to be shown if it fails."""


@runtime_checkable
class Processes(Protocol):
    """The processes of a job, by rank, wherever they run."""

    def next_event(self, seconds: float) -> tuple[int, Said | int | str] | None:
        """A rank, and what it said, its exit status, or how it was lost; None if nothing happened for so long."""
        ...

    def interrupt(self) -> None:
        """Ctrl-C for all of them."""
        ...


def follow(processes: Processes, machines: Sequence[str]) -> int:
    """Shows what the main process says until all have ended or one has failed; the exit status of the job.

    A process that fails says why itself, if it is the first one; of the others but the main one nothing is shown
    unless they fail. Ctrl-C is handed on, and the processes end by themselves; a second one is not waited for.

    Args:
        processes: the job's; what is left of them at the end is the caller's to end.
        machines: the address of each rank's.

    Raises:
        GspoError: a process was killed, or lost with its machine.
    """
    kept = [b""] * len(machines)
    statuses: dict[int, int] = {}
    handed_on, deadline = False, None
    with _counted_interrupts() as interrupts:
        while len(statuses) < len(machines) and len(interrupts) < 2:
            if interrupts and not handed_on:
                handed_on, deadline = True, time.monotonic() + INTERRUPT_SECONDS
                processes.interrupt()
            event = processes.next_event(LOOK_SECONDS)
            if event is None:
                if deadline is not None and time.monotonic() > deadline:
                    break
                continue
            rank, what = event
            if isinstance(what, tuple):
                kept[rank] = _hear(rank, what, kept[rank])
                continue
            if isinstance(what, str) or what < 0:
                how = what if isinstance(what, str) else f"killed by {signal.Signals(-what).name}"
                raise GspoError(f"process {rank} of {len(machines)}, on {machines[rank]}, was {how}")
            statuses[rank] = what
            if what != 0 and deadline is None:
                deadline = time.monotonic() + FOLLOW_SECONDS
    for rank, status in statuses.items():
        if status != 0:
            _show(2, kept[rank])
    return INTERRUPTED if interrupts else max(statuses.values())


@contextmanager
def _counted_interrupts() -> Iterator[list[int]]:
    """Grows with each Ctrl-C, even where it was ignored (a background job), as `torchrun` hears it there too."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def _hear(rank: int, said: Said, kept: bytes) -> bytes:
    if rank == 0:
        _show(*said)
        return b""
    return (kept + said[1])[-KEPT_BYTES:]


def _show(number: int, text: bytes) -> None:
    stream = (sys.stdout if number == 1 else sys.stderr).buffer
    stream.write(text)
    stream.flush()
