"""One object writes the whole run, and a resumed run leaves no doubled line."""

import io
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from rich.console import Console

from gspo.cli import main
from gspo.config import build_config
from gspo.distributed.world import World
from gspo.reporting.files import read_lines
from gspo.reporting.journal import read_rollouts
from gspo.reporting.metrics import Ratio
from gspo.reporting.recorder import Recorder
from gspo.reporting.run_folder import RunFolder
from gspo.training.evaluation import summarize
from gspo.types import Sampling
from tests.reporting.rollouts import make_rollout


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    settings = {"model": {"path": "m"}, "task": {"kind": "reasoning_gym", "name": "chain_sum"}}
    settings |= {"run": {"dir": str(tmp_path), "name": "r"}, "training": {"steps": 3}}  # type: ignore[dict-item]
    return RunFolder.create(build_config(settings))


def recorder(run: RunFolder, resume_step: int | None = None) -> tuple[Recorder, io.StringIO]:
    screen = io.StringIO()
    console = Console(file=screen, width=200)
    return Recorder(run.read_config(), run, resume_step=resume_step, console=console), screen


def write_step(target: Recorder, step: int, reward: float) -> None:
    rollouts = [make_rollout(0, 0), make_rollout(0, 1, reward=None)]
    target.stage("rollout")
    target.rollouts(step, rollouts, [0.0, None])
    target.metrics(step, {"reward/mean": Ratio(reward, 2), "response/length": Ratio(0, 0)})
    target.timings(step, {"rollout": 2.0, "update": 0.0}, {"rollout": 30, "update": 5}, 1000)


def test_a_step_is_written_and_shown(run: RunFolder) -> None:
    target, screen = recorder(run)
    write_step(target, 1, 1.0)
    target.close()
    assert read_lines(run.metrics_file) == [
        {"step": 1, "reward/mean": 0.5, "response/length": None}
        | {"sums": {"reward/mean": [1.0, 2], "response/length": [0, 0]}}
    ]
    assert read_lines(run.timings_file) == [
        {"step": 1, "seconds": {"rollout": 2.0, "update": 0.0}, "tokens": {"rollout": 30, "update": 5}}
        | {"tokens_per_second": {"rollout": 15.0}, "peak_memory_bytes": 1000}
    ]
    assert read_rollouts(run.rollout_file(1)) == [make_rollout(0, 0), make_rollout(0, 1, reward=None)]
    assert screen.getvalue().startswith("step 1/3  reward 0.5  length -  ETA ")


def test_resuming_replaces_later_steps_and_keeps_their_rollout_batches(run: RunFolder) -> None:
    first, _ = recorder(run)
    for step in (1, 2, 3):
        write_step(first, step, 1.0)
    first.close()
    second, _ = recorder(run, resume_step=1)
    assert second.read_step(2) == [make_rollout(0, 0), make_rollout(0, 1, reward=None)]
    assert second.read_step(4) is None
    write_step(second, 2, 2.0)
    second.close()
    assert [(r["step"], r["reward/mean"]) for r in read_lines(run.metrics_file)] == [(1, 0.5), (2, 1.0)]
    assert [r["step"] for r in read_lines(run.timings_file)] == [1, 2]


def test_an_evaluation_is_written_with_its_rollouts_and_shown(run: RunFolder) -> None:
    rollouts = [make_rollout(0, 0), make_rollout(1, 0, reward=0.0)]
    evaluation = summarize([r.prompt for r in rollouts], rollouts, sampling=Sampling(4), samples=1, correct_at=1.0)
    target, screen = recorder(run)
    target.evaluation(0, evaluation)
    target.close()
    (record,) = read_lines(run.evaluations_file)
    assert record["step"] == 0
    assert record["accuracy"] == pytest.approx({"value": 0.5, "low": 0.012579, "high": 0.987421, "n": 2}, abs=1e-6)
    assert record["prompts"][1] == {"key": "key1", "correct": 0, "scored": 1}
    assert read_rollouts(run.evaluation_file(0)) == rollouts
    assert "accuracy 0.500 [0.013, 0.987], n = 2" in screen.getvalue()


def test_an_evaluation_that_could_not_be_scored_says_why(run: RunFolder) -> None:
    lost = [make_rollout(0, 0, reward=None)]
    evaluation = summarize([r.prompt for r in lost], lost, sampling=Sampling(4), samples=1, correct_at=1.0)
    target, screen = recorder(run)
    target.evaluation(2, evaluation)
    target.close()
    assert "held out after step 2: no response could be scored (the reward function raised)" in screen.getvalue()


def test_only_the_main_process_writes(run: RunFolder) -> None:
    screen = io.StringIO()
    target = Recorder(run.read_config(), run, world=World(rank=1, size=2), console=Console(file=screen))
    write_step(target, 1, 1.0)
    target.note("hello")
    target.warn(1, "clip range", "below the noise")
    target.close()
    assert not run.metrics_file.exists()
    assert not run.rollout_file(1).exists()
    assert not run.report_file.exists()
    assert not run.warnings_file.exists()
    assert screen.getvalue() == ""


def test_the_end_of_a_run_writes_the_page_of_gspo_report(run: RunFolder) -> None:
    target, screen = recorder(run)
    write_step(target, 1, 1.0)
    target.close()
    written = run.report_file.read_bytes()
    assert b"Step 1: 1 groups, 2 rollouts" in written
    assert "report" not in screen.getvalue()
    run.report_file.unlink()
    assert main(["report", str(run.path)]) == 0
    assert run.report_file.read_bytes() == written


def test_without_a_finished_step_there_is_no_page(run: RunFolder) -> None:
    target, _ = recorder(run)
    target.close()
    assert not run.report_file.exists()


def damage_metrics(run: RunFolder) -> None:
    run.metrics_file.write_text("no JSON\n" + run.metrics_file.read_text())


@pytest.mark.parametrize(
    ("harm", "reason"),
    [(lambda run: run.report_file.mkdir(), "directory"), (damage_metrics, "metrics.jsonl:1: not a JSON record")],
)
def test_a_page_that_cannot_be_written_costs_a_line_and_nothing_else(
    run: RunFolder, harm: Callable[[RunFolder], None], reason: str
) -> None:
    target, screen = recorder(run)
    write_step(target, 1, 1.0)
    harm(run)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    target.close()
    *_, line = screen.getvalue().splitlines()
    assert line.startswith(f"warning: {run.report_file} is not written (")
    assert reason in line
    assert line.endswith(f"; try: gspo report {run.path}")
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


class Tracker:
    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.seen: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self.fails:
            raise OSError("no network")
        self.seen.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True


def test_trackers_get_what_has_a_value_and_a_failing_one_does_not_end_the_run(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = Tracker(fails=False), Tracker(fails=True)
    monkeypatch.setattr("gspo.reporting.recorder.open_trackers", lambda *_, **__: [bad, good])
    target, screen = recorder(run)
    write_step(target, 1, 1.0)
    write_step(target, 2, 1.0)
    target.close()
    text = "Tracker failed (no network) and gets no more metrics; the run goes on"
    assert read_lines(run.warnings_file) == [{"step": 1, "what": "tracker", "text": text}]
    assert f"warning: {text}\n" in screen.getvalue()
    assert good.seen == [(1, {"reward/mean": 0.5}), (2, {"reward/mean": 0.5})]
    assert good.closed
