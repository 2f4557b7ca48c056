"""One process in the folder of a run at a time."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gspo.errors import BadInputError
from gspo.reporting.files import writing

LOCK = "run.lock"


@contextmanager
def held(run: Path) -> Iterator[None]:
    """Keeps other processes from training in a run's folder; the system lets go when this one ends or is killed.

    Raises BadInputError where another one trains there, GspoError where the folder cannot be written to.
    """
    path = run / LOCK
    with writing(path):
        opened = path.open("wb")
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # the second is what SMB shares answer
            raise BadInputError(
                f"{run}: another process is training in it; wait until it ends, or stop it first"
            ) from None
        except OSError as error:
            # Some network file systems know no locks; a run there is worth more than the protection.
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                raise
        yield
