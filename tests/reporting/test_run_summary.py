"""A run in a few rows."""

from collections import Counter
from pathlib import Path

from gspo.reporting.metrics import Ratio
from gspo.reporting.run_records import read_runs
from gspo.reporting.run_summary import summary
from tests.reporting.run_folders import make_run, settings


def rows(*folders: Path, reasons: dict[str, int] | None = None) -> dict[str, list[str]]:
    runs = read_runs(folders)
    head, *body = summary(runs, [Counter(reasons or {})] * len(runs))
    assert head == ["", *(run.name for run in runs)]
    return {name: cells for name, *cells in body}


def test_dropped_rollouts_have_their_reasons(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", [{"reward/dropped": Ratio(3, 16)}] * 2)
    table = rows(folder, reasons={"reward f: raised\nValueError": 5, "the engine gave it up": 1, "x" * 999: 2})
    shown = f"6 of 32 (5 x reward f: raised ValueError; 2 x {'x' * 157}...; 1 x the engine gave it up)"
    assert table["rollouts dropped"] == [shown]


def test_runs_of_different_lengths_stand_side_by_side(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", [{}], accuracy={0: (0.1, 0.0, 0.2)})
    twenty = make_run(tmp_path / "twenty", [{}] * 20, config=settings(20))
    table = rows(one, twenty)
    assert table["steps"] == ["1", "20"]
    assert table["reward (last step)"] == ["0.5", "-"]
    assert table["reward (last 10 steps)"] == ["-", "0.5"]
    assert table["held-out accuracy before"] == ["0.100 [0.000, 0.200], n = 50", "-"]
    assert table["held-out accuracy"] == ["-", "not measured"]


def test_a_run_without_a_step_has_dashes(tmp_path: Path) -> None:
    table = rows(make_run(tmp_path / "r", config=settings(5)))
    assert table["steps"][0].startswith("0 of 5")
    assert table["time in steps"] == table["tokens a second"] == table["reward, last step"] == ["-"]
    assert table["rollouts dropped"] == ["0 of 0"]


def test_speeds_are_tokens_over_seconds(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", [{}])
    (folder / "timings.jsonl").write_text(
        '{"step": 1, "seconds": {"rollout": 0.5, "score": 0.0, "update": 10.0}, '
        '"tokens": {"rollout": 1234, "score": 0, "update": 617}}\n'
    )
    table = rows(folder)
    assert table["tokens a second"] == ["rollout 2,468, update 61.7"]
    assert table["time in steps"] == ["0:10: update 95%, rollout 5%, score 0%"]
