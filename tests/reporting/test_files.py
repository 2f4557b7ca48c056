"""Lines are whole, and steps that are done again leave no trace."""

import json
from pathlib import Path

import pytest

from gspo.errors import BadInputError, GspoError
from gspo.reporting.files import LineFile, read_lines, write_atomically


def steps(path: Path) -> list[int]:
    return [record["step"] for record in read_lines(path)]


def test_a_line_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = LineFile(path)
    file.append({"step": 1, "text": "a\nb\u2028c"})
    assert path.read_text(encoding="utf-8").count("\n") == 1
    assert read_lines(path) == [{"step": 1, "text": "a\nb\u2028c"}]


def test_resuming_forgets_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step}) for step in range(1, 6)]
    path.write_text("\n".join(lines) + "\n" + '{"step": 6, "rew', encoding="utf-8")
    file = LineFile(path, resume_step=3)
    assert steps(path) == [1, 2, 3]
    file.append({"step": 4})
    assert steps(path) == [1, 2, 3, 4]


def test_opening_without_a_step_keeps_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st', encoding="utf-8")
    file = LineFile(path)
    file.append({"step": 2})
    assert steps(path) == [1, 2]


@pytest.mark.parametrize("line", ["{oops}", "[1]", '{"stp": 1}', '{"step": "1"}'])
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + '\n{"step": 2}\n', encoding="utf-8")
    with pytest.raises(BadInputError, match=r"metrics\.jsonl:2: "):
        read_lines(path)


def test_nan_never_reaches_a_file(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="JSON compliant"):
        file.append({"step": 1, "x": float("nan")})
    assert not (tmp_path / "metrics.jsonl").exists()


def test_atomic_write_replaces_whole_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(GspoError, match=r"file/x: cannot be written \(.+\); make room, or give a place") as found:
        write_atomically(tmp_path / "file" / "x", b"content")
    assert "\n" not in str(found.value)
    lines = LineFile(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(GspoError, match=r"metrics\.jsonl: cannot be written \(Is a directory\)"):
        lines.append({"step": 1})
