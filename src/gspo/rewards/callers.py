"""The two ways in which a reward function is called with a time limit: in a worker process, or in a thread."""

from __future__ import annotations

import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Protocol, runtime_checkable

from gspo.rewards.calls import Arguments, LostCallError, MisuseError, RewardError, RewardFunction, Value, call_reward

STARTUP_SECONDS = 300.0
"""How long a worker may take to import its function (which may import torch, or load a model)."""

# Not multiprocessing's spawn: that runs the user's own script a second time in the child.
_BOOT = (
    "import json, sys; descriptor = int(sys.argv[1]); sys.path[:] = json.loads(sys.argv[2]); del sys.argv[1:]; "
    "from gspo.rewards.worker import main; main(descriptor)"
)


@runtime_checkable
class Caller(Protocol):
    """Calls one reward function."""

    def call(self, arguments: Arguments, seconds: float) -> list[Value]:
        """One reward per rollout, or RewardError; LostCallError if the call did not come back in time."""

    def close(self) -> None:
        """Lets go of what the calls need."""


class ProcessCaller:
    """A function named by its path, in a process of its own that is killed and replaced when a call hangs.

    The process starts at once and gets ready while the caller does other things.
    """

    def __init__(self, name: str, parameters: Mapping[str, Any]) -> None:
        self._name = name
        self._parameters = dict(parameters)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[bytes, bytes] | None = None
        self._ready = False
        self._start()

    def call(self, arguments: Arguments, seconds: float) -> list[Value]:
        """See `Caller`. Only one thread may call at a time."""
        try:
            message = pickle.dumps((seconds, {name: list(values) for name, values in arguments.items()}))
        except Exception as error:  # noqa: BLE001 (objects that cannot be pickled raise many kinds of errors)
            raise MisuseError(f"its columns cannot be passed to a worker process ({error})") from None
        if self._process is None:
            self._start()
        if not self._ready:
            self._await_start()
        assert self._connection is not None
        try:
            self._connection.send_bytes(message)
        except OSError:
            raise self._lost("its worker process died") from None
        return self._receive(seconds, "did not return (reward.time_limit)")

    def close(self) -> None:
        """Ends the process."""
        if self._process is None or self._connection is None:
            return
        self._connection.close()
        # Its own session, so that what the function started goes with it.
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._process.poll()
        self._process.wait()
        self._process, self._connection, self._ready = None, None, False

    def _start(self) -> None:
        ours, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), json.dumps(sys.path)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # Ctrl-C in the terminal is for the parent, which may still want its rewards.
                start_new_session=True,
            )
        self._connection = ours
        ours.send_bytes(pickle.dumps((self._name, self._parameters)))

    def _await_start(self) -> None:
        try:
            self._receive(STARTUP_SECONDS, "did not import")
        except MisuseError:
            self.close()
            raise
        self._ready = True

    def _receive(self, seconds: float, late: str) -> list[Value]:
        assert self._connection is not None
        try:
            if not self._connection.poll(seconds):
                raise self._lost(f"{late} within {seconds:g} s")
            answer = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise self._lost("its worker process died") from None
        if "misuse" in answer:
            raise MisuseError(answer["misuse"])
        if "error" in answer:
            raise RewardError(answer["error"])
        values: list[Value] = answer["values"]
        return values

    def _lost(self, reason: str) -> LostCallError:
        self.close()
        return LostCallError(reason)


class ThreadCaller:
    """A function object, in a thread of this process, with whatever state it shares with the caller's code.

    A call that hangs is left behind, since a thread cannot be killed; one that hangs in C code without letting go of
    the interpreter lock (a regular expression that backtracks for ever) stops the whole process. A function named by
    its import path has neither limit.
    """

    def __init__(self, function: RewardFunction) -> None:
        self._function = function

    def call(self, arguments: Arguments, seconds: float) -> list[Value]:
        """See `Caller`."""
        answers: queue.SimpleQueue[list[Value] | RewardError] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put(call_reward(self._function, arguments))
            except RewardError as error:
                answers.put(error)

        threading.Thread(target=run, daemon=True, name="reward").start()
        try:
            answer = answers.get(timeout=seconds)
        except queue.Empty:
            raise LostCallError(f"did not return (reward.time_limit) within {seconds:g} s") from None
        if isinstance(answer, RewardError):
            raise answer
        return answer

    def close(self) -> None:
        """Nothing to let go of."""
