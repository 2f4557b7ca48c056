"""The warnings of a run: heard wherever they are given, kept in its folder, each kind once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from gspo.reporting.files import LineFile, read_lines

Tell = Callable[[str, str], None]
"""Takes what a warning is about, and its text."""


class WarningLog:
    """`warnings.jsonl`: `step`, `what` and `text` of each. A resumed run adds what an earlier part has not given."""

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        self._file = LineFile(path, resume_step=resume_step)
        records = read_lines(path) if path.exists() else []
        self._kept = {record.get(name) for record in records for name in ("what", "text")}
        self._given: set[str] = set()

    def add(self, step: int, what: str, text: str, *, once: bool) -> bool:
        """Whether this process has not given the warning before; keeps it if the run has not.

        `once`: one of this kind is enough for a run, whatever the figures in its text; else each text is.
        """
        kind = what if once else text
        if kind in self._given:
            return False
        self._given.add(kind)
        if kind not in self._kept:
            self._file.append({"step": step, "what": what, "text": text})
            self._kept.add(kind)
        return True


class LibraryLog(logging.Handler):
    """Hears what the rooms of the library log as a warning, and keeps it until there is somebody to tell.

    The rooms know nothing of runs: they warn as libraries do, through `logging`, under their own names.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._heard: list[tuple[str, str]] = []
        self._tell: Tell | None = None
        logging.getLogger("gspo").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        heard = record.name.removeprefix("gspo.").partition(".")[0], record.getMessage()
        if self._tell is None:
            self._heard.append(heard)
        else:
            self._tell(*heard)

    def tell(self, tell: Tell) -> None:
        """Tells what was heard so far, and from now on at once."""
        for heard in self._heard:
            tell(*heard)
        self._tell = tell

    def close(self) -> None:
        """Hears no more."""
        logging.getLogger("gspo").removeHandler(self)
        super().close()
