"""A process of `gspo` that another process starts, listens to and outlives: what `torchrun`'s agent does, for Ray.

The parent is not the training program, so that what Ray does in its workers (signals, threads, output) does not reach
that one, and its exit status is seen whichever way it ends. Imports torch in `open_store` alone.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

START = "from gspo.distributed.supervised import run_supervised; run_supervised()"
CHUNK = 65536
DRAIN_SECONDS = 0.5
"""How long output of an ended process is waited for: one that it started may hold the pipe open."""

Said = tuple[int, bytes]
"""Output: 1 or 2, for standard output or standard error, and the bytes."""


class SupervisedProcess:
    """One training process, started by `start`; every method may be called from another thread."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Said | int] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._store: Any = None

    def visible_gpus(self) -> str:
        """What CUDA_VISIBLE_DEVICES says here: the GPUs that were given to this process."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def open_store(self, address: str) -> int:
        """Opens the store in which the processes of the job meet and count their failures; returns its port.

        It lives here, and so longer than any training process. Who comes before torch is loaded waits for it.
        """
        door = socket.create_server((address, 0), backlog=1024)
        port: int = door.getsockname()[1]

        def serve() -> None:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            self._store = TCPStore(
                address, port, is_master=True, wait_for_workers=False, master_listen_fd=door.detach(), use_libuv=False
            )

        threading.Thread(target=serve, daemon=True).start()
        return port

    def start(self, words: Sequence[str], folder: str, common: Mapping[str, str], own: Mapping[str, str]) -> bool:
        """Starts `gspo` with these words in a folder; False if this machine does not have the folder.

        Args:
            common: variables that hold where this machine does not set them itself.
            own: variables that hold in any case.
        """
        if not Path(folder).is_dir():
            return False
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, *words],
            cwd=folder,
            env={**common, **os.environ, **own, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        readers = [
            threading.Thread(target=self._read, args=item, daemon=True)
            for item in ((1, self._process.stdout), (2, self._process.stderr))
        ]
        for thread in (*readers, threading.Thread(target=self._wait, args=(self._process, readers), daemon=True)):
            thread.start()
        return True

    def follow(self) -> Said | int:
        """What happens next: output as it comes, and at last the exit status (that of Popen: -9 after SIGKILL)."""
        return self._events.get()

    def interrupt(self) -> None:
        """Ctrl-C for the process and all that it started."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGINT)

    def _wait(self, process: subprocess.Popen[bytes], readers: Sequence[threading.Thread]) -> None:
        status = process.wait()
        assert process.stdin is not None
        process.stdin.close()
        for reader in readers:
            reader.join(DRAIN_SECONDS if status >= 0 else 0)
        self._events.put(status)

    def _read(self, number: int, pipe: Any) -> None:
        with pipe:
            while text := os.read(pipe.fileno(), CHUNK):
                self._events.put((number, text))


def run_supervised() -> None:
    """The `gspo` command under a supervisor: it ends when that one ends, and Ctrl-C reaches it.

    Ray blocks SIGINT in its workers, and what they start inherits that.
    """
    threading.Thread(target=_end_with_supervisor, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from gspo.cli import main

    sys.exit(main())


def _end_with_supervisor() -> None:
    os.read(0, 1)  # nothing is ever written: it returns when the other end is gone
    os.killpg(0, signal.SIGKILL)
