"""Files that survive a kill at any moment: whole lines appended, whole files replaced."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from gspo.errors import BadInputError, GspoError


@contextmanager
def writing(path: Path, advice: str = "make room, or give a place that can be written to") -> Iterator[None]:
    """Turns a full disk, or a folder that takes no files, into a GspoError of one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise GspoError(f"{path}: cannot be written ({reason}); {advice}") from error


def write_atomically(path: Path, content: bytes) -> None:
    """Puts a file in place whole: readers see the old one or the new one, also after a power cut.

    Raises GspoError where the disk is full or the folder cannot be written to.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LineFile:
    """A JSONL file of records that carry a `step`; each line is written whole.

    Opened with `resume_step`, it first forgets what comes after that step: those steps are done again. A last
    line that was cut by a kill is forgotten too.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        self.path = path
        if path.exists():
            self._forget_after(resume_step)

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one record; it is in the hands of the operating system when this returns.

        Raises GspoError where the disk is full or the folder cannot be written to.
        """
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        with writing(self.path), self.path.open("ab") as file:
            file.write(line)

    def _forget_after(self, step: int | None) -> None:
        kept = [line for line, record in _records(self.path) if step is None or record["step"] <= step]
        content = b"".join(kept)
        if len(content) != self.path.stat().st_size:
            write_atomically(self.path, content)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file; a last line that was cut by a kill is left out.

    Raises BadInputError with file and line where a whole line is not a record.
    """
    return [record for _, record in _records(path)]


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            return
        try:
            record = json.loads(line)
        except ValueError as error:
            raise BadInputError(f"{path}:{number}: not a JSON record ({error}); remove the line") from None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise BadInputError(f"{path}:{number}: a record without a whole-number `step`; remove the line")
        yield line, record
