"""Work that runs ahead of the one who wants it, on a thread, by a bounded number of steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")

_GLANCE = 0.5


class Ahead(Generic[Result]):
    """Calls `make(step)` for `first`, `first + 1` ... `last`, one after the other, at most `lag` steps too early.

    Whoever takes step n has done with step n - 1, so that from then on n + lag may be made. With lag 1 that is one
    step made while the one before it is used. An exception ends the work and is raised to the taker when its step's
    turn comes. `stop` must make a running `make` end soon; it is called by `close`.
    """

    def __init__(
        self, make: Callable[[int], Result], *, first: int, last: int, lag: int, stop: Callable[[], None]
    ) -> None:
        self._make = make
        self._first, self._last, self._lag = first, last, lag
        self._stop = stop
        self._condition = threading.Condition()
        self._wanted = first - lag - 1
        self._made: dict[int, Result] = {}
        self._error: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def take(self, step: int) -> Result:
        """The result of a step, waited for; steps are taken in order. Raises what `make` raised."""
        with self._condition:
            self._wanted = step
            self._condition.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ahead", daemon=True)
                self._thread.start()
            while step not in self._made:
                if self._error is not None:
                    raise self._error
                # A timed wait lets Ctrl-C through.
                self._condition.wait(_GLANCE)
            return self._made.pop(step)

    def close(self) -> None:
        """Ends the work and waits for the thread; what was made and not taken is gone."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._stop()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        for step in range(self._first, self._last + 1):
            with self._condition:
                self._condition.wait_for(lambda step=step: self._closed or step <= self._wanted + self._lag)  # type: ignore[misc]
                if self._closed:
                    return
            try:
                made = self._make(step)
            except BaseException as error:  # noqa: BLE001 (it belongs to the thread that takes the step)
                with self._condition:
                    self._error = error
                    self._condition.notify_all()
                return
            with self._condition:
                self._made[step] = made
                self._condition.notify_all()
