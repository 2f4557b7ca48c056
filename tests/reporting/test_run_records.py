"""Runs in every state are read: going on, cut off, incomplete, of another version."""

import json
from pathlib import Path

import pytest

from gspo.errors import BadInputError
from gspo.reporting.metrics import Ratio
from gspo.reporting.run_records import joined, read_runs, total
from tests.reporting.run_folders import make_run, settings


def test_figures_are_joined_by_sum_and_denominator() -> None:
    records = [
        {"step": 1, "a": 1.0, "b_max": 3, "c": 1.0, "n": 2, "sums": {"a": [4.0, 4]}},
        {"step": 2, "a": 0.25, "b_max": 7, "c": 2.0, "n": 3, "sums": {"a": [3.0, 12]}},
    ]
    assert joined(records, "a") == 7 / 16  # not the mean of 1 and 1/4
    assert joined(records, "b_max") == 7
    assert joined([{"step": 1, "x_min": 5.0}, {"step": 2, "x_min": -1.0}], "x_min") == -1
    assert joined(records, "c") == 1.5
    assert total(records, "a") == (7.0, 16)
    assert total(records, "n") == (5.0, 2)


@pytest.mark.parametrize(
    "record",
    [
        {"step": 1},
        {"step": 1, "a": None},
        {"step": 1, "a": None, "sums": {"a": [0.0, 0]}},
        {"step": 1, "a": None, "sums": {"a": ["nan", 4]}},
        {"step": 1, "a": None, "sums": {"a": ["inf", 4]}},
    ],
)
def test_what_is_not_a_number_is_none(record: dict[str, object]) -> None:
    assert joined([record], "a") is None


def test_a_run_that_is_cut_off_shows_its_whole_lines(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", [{}, {}, {}], config=settings(10))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/me')
    (run,) = read_runs([folder])
    assert (run.last_step, run.planned_steps, run.notes) == (3, 10, ())
    assert run.timings[0]["seconds/update"] == 6.0


def test_a_run_that_died_in_the_middle_of_a_line_is_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", [{}, {}])
    file = folder / "metrics.jsonl"
    content = file.read_bytes()
    first = content.index(b"\n")
    for end in {*range(0, len(content), 97), first, first + 1, len(content) - 1, len(content)}:
        file.write_bytes(content[:end])
        (run,) = read_runs([folder])
        assert run.last_step == content[:end].count(b"\n")


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", [{}, {}])
    file = folder / "metrics.jsonl"
    file.write_bytes(b"\0\0\n" + file.read_bytes())
    with pytest.raises(BadInputError, match=r"metrics\.jsonl:1: not a JSON record .* remove the line"):
        read_runs([folder])


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", [{}])
    for name in ("config.json", "timings.jsonl", "evaluations.jsonl"):
        (folder / name).unlink()
    (run,) = read_runs([folder])
    assert run.config is None
    assert run.planned_steps is None
    assert len(run.metrics) == 1
    assert [note.split()[0] for note in run.notes] == ["config.json", "timings.jsonl", "evaluations.jsonl"]


def test_settings_of_another_version_are_said_and_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", [{}])
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"flux": {"capacitor": 1}}))
    (run,) = read_runs([folder])
    assert run.config is None
    assert "flux" in run.notes[0]


def test_a_run_before_its_first_step_is_one(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    (run,) = read_runs([folder])
    assert (run.last_step, run.metrics) == (0, [])


def test_a_step_that_was_written_twice_counts_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", [{"reward/mean": Ratio(0.0, 16)}])
    file = folder / "metrics.jsonl"
    file.write_text(file.read_text() + file.read_text().replace("0.0, 16", "16.0, 16"))
    (run,) = read_runs([folder])
    assert joined(run.metrics, "reward/mean") == 1.0


@pytest.mark.parametrize("content", [None, "{}", '{"architectures": ["LlamaForCausalLM"]}'])
def test_a_folder_that_is_no_run_is_one_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(BadInputError, match=r"not the folder of a run .* give the folder") as caught:
        read_runs([tmp_path])
    assert "\n" not in str(caught.value)


def test_names_are_told_apart_and_a_run_counts_once(tmp_path: Path) -> None:
    one, two = make_run(tmp_path / "a" / "r", [{}]), make_run(tmp_path / "b" / "r", [{}])
    assert [run.name for run in read_runs([one, two, one / "." / ".." / "r"])] == [str(one), str(two)]
    assert [run.name for run in read_runs([one])] == ["r"]
