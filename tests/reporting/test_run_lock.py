"""Two processes never train in one folder."""

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from gspo.errors import BadInputError, GspoError
from gspo.reporting.run_lock import LOCK, held


def test_a_folder_is_held_until_the_end_of_the_block(tmp_path: Path) -> None:
    with held(tmp_path), pytest.raises(BadInputError, match="another process is training in it"), held(tmp_path):
        pytest.fail("held twice")
    with held(tmp_path):
        pass


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    program = (
        "import fcntl, sys; f = open(sys.argv[1], 'wb'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / LOCK)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(BadInputError, match="another process"), held(tmp_path):
            pytest.fail("held twice")
        other.kill()
    with held(tmp_path):
        pass


def test_a_file_system_without_locks_is_no_reason_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_file: object, _operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with held(tmp_path):
        assert (tmp_path / LOCK).exists()


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EACCES])
def test_a_lock_that_another_machine_holds_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(_file: object, _operation: int) -> None:
        raise OSError(number, "held")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(BadInputError, match="another process is training in it"), held(tmp_path):
        pytest.fail("held twice")


def test_a_folder_that_takes_no_files_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    with pytest.raises(GspoError, match=r"run\.lock: cannot be written \("), held(tmp_path):
        pytest.fail("held without a file")
