"""One environment in a thread of its own, so that one that hangs costs its rollout alone."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from gspo.imports import describe


class EnvironmentFailure(Exception):  # noqa: N818 (what failed is the environment, not the caller)
    """An environment raised, hung or answered what cannot be used; the message says which, in one line."""


@dataclass(frozen=True, slots=True)
class _Raised:
    reason: str


class EnvironmentThread:
    """Calls of one environment, made one after the other in one thread, async ones in one event loop.

    `ask` starts a call and returns; `answer` waits for it. A call that hangs is left behind with its thread, since
    a thread cannot be killed.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._calls: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asked = ""
        threading.Thread(target=self._serve, daemon=True, name="environment").start()

    def ask(self, method: str, argument: object) -> None:
        """Starts `environment.method(argument)`."""
        self._asked = method
        self._calls.put((method, argument))

    def answer(self, seconds: float) -> Any:
        """What the last call returned. Raises EnvironmentFailure if it raised, or takes longer than `seconds`."""
        try:
            value = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise EnvironmentFailure(f"{self._asked} did not return within task.time_limit") from None
        if isinstance(value, _Raised):
            raise EnvironmentFailure(value.reason)
        return value

    def close(self) -> None:
        """Lets the thread end after the call that it is in, closing the environment where it has a `close`."""
        self._calls.put(None)

    def _serve(self) -> None:
        calls = _Calls()
        environment: Any = None
        try:
            while (call := self._calls.get()) is not None:
                method, argument = call
                try:
                    if environment is None:
                        environment = self._make()
                    self._answers.put(calls.finished(getattr(environment, method)(argument)))
                except BaseException as error:  # noqa: BLE001 (whatever it raises ends this rollout alone)
                    self._answers.put(_Raised(f"{method} raised {describe(error)}"))
            if callable(close := getattr(environment, "close", None)):
                calls.finished(close())
        finally:
            calls.close()


class _Calls:
    """The event loop of a thread, made when the first coroutine comes."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def finished(self, result: Any) -> Any:
        if not inspect.isawaitable(result):
            return result
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(_await(result))

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()


async def _await(result: Awaitable[Any]) -> Any:
    return await result
