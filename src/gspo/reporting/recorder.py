"""Everything a run writes and shows, behind one object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from gspo.config import Config
from gspo.distributed.world import World
from gspo.reporting.console import Progress, say
from gspo.reporting.files import LineFile
from gspo.reporting.journal import Advantage, read_rollouts, write_rollouts
from gspo.reporting.metrics import Metric, Ratio, as_record, value_of
from gspo.reporting.run_folder import RunFolder
from gspo.reporting.run_report import write_page
from gspo.reporting.trackers import Tracker, open_trackers
from gspo.reporting.warning_log import WarningLog
from gspo.training.evaluation import Evaluation, evaluation_record
from gspo.types import Rollout

_SHOWN = {"reward/mean": "reward", "clip/token_removed": "clipped", "response/length": "length"}


class Recorder:
    """Writes metrics, timings, rollouts and evaluations to the run folder, to the trackers and to the screen.

    With `resume_step`, lines of later steps are removed first: those steps are done again (-1: all of them, the
    evaluation before the first too). Only the main process of the world writes; on the others every method returns
    at once.
    """

    def __init__(
        self,
        config: Config,
        run: RunFolder,
        *,
        resume_step: int | None = None,
        world: World | None = None,
        console: Console | None = None,
    ) -> None:
        self.run = run
        self.console = console if console is not None else Console()
        self._active = world is None or world.is_main
        if not self._active:
            return
        self._metrics = LineFile(run.metrics_file, resume_step=resume_step)
        self._timings = LineFile(run.timings_file, resume_step=resume_step)
        self._evaluations = LineFile(run.evaluations_file, resume_step=resume_step)
        self._warnings = WarningLog(run.warnings_file, resume_step=resume_step)
        self._trackers = open_trackers(
            config.tracking, run.path, config.model_dump(mode="json"), resume_step=resume_step
        )
        self._progress = Progress(self.console, config.training.steps, max(resume_step or 0, 0))

    def note(self, text: str) -> None:
        """Says one thing to the user (what a run runs on, what an evaluation found)."""
        if self._active:
            say(self.console, text)

    def warn(self, step: int, what: str, text: str, *, once: bool = True) -> None:
        """Warns the user, and keeps the warning in the run's folder. All warnings of a run go this way.

        Args:
            step: in which it is given (at the start of a process: the last finished one).
            what: what it is about, in a word or two.
            text: the warning, in one line.
            once: whether one of its kind is enough for a run, whatever its text; else each text is given once.
        """
        if self._active and self._warnings.add(step, what, text, once=once):
            say(self.console, f"warning: {text}")

    def stage(self, name: str) -> None:
        """What the run is at, for the live line."""
        if self._active:
            self._progress.stage(name)

    def metrics(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Writes the metrics of a finished step (counted from 1) and shows the main ones."""
        if not self._active:
            return
        self._metrics.append({"step": step, **as_record(metrics)})
        self._track(step, {name: value_of(metric) for name, metric in metrics.items()})
        figures = [(short, value_of(metrics[name])) for name, short in _SHOWN.items() if name in metrics]
        self._progress.step(step, figures)

    def timings(
        self, step: int, seconds: Mapping[str, float], tokens: Mapping[str, int], peak_memory_bytes: int
    ) -> None:
        """Writes the seconds of each stage, and tokens per second for the stages that `tokens` names."""
        if not self._active:
            return
        per_second = {name: count / seconds[name] for name, count in tokens.items() if seconds[name] > 0}
        record: dict[str, Any] = {"step": step, "seconds": dict(seconds), "tokens": dict(tokens)}
        self._timings.append(record | {"tokens_per_second": per_second, "peak_memory_bytes": peak_memory_bytes})

    def rollouts(self, step: int, rollouts: Sequence[Rollout], advantages: Sequence[Advantage] | None = None) -> None:
        """Writes the rollout batch of a step whole, before it is trained on (see `read_step`)."""
        if self._active:
            write_rollouts(self.run.rollout_file(step), rollouts, advantages)

    def read_step(self, step: int) -> list[Rollout] | None:
        """The rollout batch of a step as it was written, None where it was not finished."""
        path = self.run.rollout_file(step)
        return read_rollouts(path) if path.exists() else None

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Writes an evaluation made after step `step` (0: before the first), its rollouts too."""
        if not self._active:
            return
        record = evaluation_record(evaluation)
        write_rollouts(self.run.evaluation_file(step), evaluation.rollouts)
        self._evaluations.append({"step": step, **record})
        self._track(step, {name: value_of(metric) for name, metric in evaluation_metrics(evaluation).items()})
        estimate = evaluation.accuracy
        if estimate.value is None:
            reason = next((r.dropped for r in evaluation.rollouts if r.dropped is not None), "there is none")
            self.warn(
                step, "evaluation", f"held out after step {step}: no response could be scored ({reason})", once=False
            )
        else:
            interval = f"[{estimate.low:.3f}, {estimate.high:.3f}]"
            lost = f", {evaluation.dropped} responses not scored" if evaluation.dropped else ""
            self.note(f"held out after step {step}: accuracy {estimate.value:.3f} {interval}, n = {estimate.n}{lost}")

    def close(self) -> None:
        """Gives the terminal back, writes the report's page and lets the trackers send what is left."""
        if not self._active:
            return
        self._progress.close()
        if self.run.metrics_file.exists():
            self._report()
        for tracker in self._trackers:
            tracker.close()

    def _report(self) -> None:
        """The page is made of what is on disk already: where that fails, nothing is lost."""
        try:
            write_page(self.run)
        except Exception as error:  # noqa: BLE001 (a run that has trained does not fail for its page)
            reason = " ".join(str(error).split()) or type(error).__name__
            self.note(f"warning: {self.run.report_file} is not written ({reason}); try: gspo report {self.run.path}")

    def _track(self, step: int, values: Mapping[str, float | int | None]) -> None:
        known = {name: value for name, value in values.items() if value is not None}
        for tracker in list(self._trackers):
            self._log(tracker, step, known)

    def _log(self, tracker: Tracker, step: int, values: Mapping[str, float | int]) -> None:
        """A tracker that fails (a full disk elsewhere, a lost login) is given up, not the run."""
        try:
            tracker.log(step, values)
        except Exception as error:  # noqa: BLE001 (trackers raise what they like)
            self._trackers.remove(tracker)
            name = type(tracker).__name__
            reason = " ".join(str(error).split()) or type(error).__name__
            self.warn(
                step, "tracker", f"{name} failed ({reason}) and gets no more metrics; the run goes on", once=False
            )


def evaluation_metrics(evaluation: Evaluation) -> dict[str, Metric]:
    """The figures of an evaluation under their metric names."""
    record = evaluation_record(evaluation)
    estimates = {"evaluation/accuracy": evaluation.accuracy}
    estimates |= {f"evaluation/pass_at_{k}": estimate for k, estimate in evaluation.pass_at.items()}
    metrics: dict[str, Metric] = {name: e.value for name, e in estimates.items() if e.value is not None}
    return metrics | {f"evaluation/{name}": Ratio(*record[name]) for name in ("truncated", "length")}
