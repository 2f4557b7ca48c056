"""The folder of a run: what lies where."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from gspo.config import Config, build_config
from gspo.errors import BadInputError
from gspo.reporting.files import write_atomically

ROLLOUTS_SHOWN = 32
"""Rollouts of a step that a report shows where nothing else is asked for."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run on disk.

    config.json                      the resolved config
    run.lock                         held by the process that trains in it
    metrics.jsonl                    a line a step: each metric, with its sum and denominator
    timings.jsonl                    a line a step: seconds, tokens per second, peak memory (not reproducible)
    evaluations.jsonl                a line an evaluation
    warnings.jsonl                   a line a warning: the step that gave it, what it is about, its text
    rollouts/step-000001.jsonl.zst   every rollout of a step; beside it routes and supports, if any
    evaluations/step-000001.jsonl.zst
    checkpoints/
    report.html                      what the above says, as a page
    """

    path: Path

    @classmethod
    def create(cls, config: Config, *, default_name: str = "run") -> RunFolder:
        """Makes the folder of a new run and writes its config; see `planned`."""
        run = cls.planned(config, default_name=default_name)
        run.make(config)
        return run

    @classmethod
    def planned(cls, config: Config, *, default_name: str = "run") -> RunFolder:
        """Where a new run will lie; makes nothing yet.

        The name is `run.name`, or `default_name` and the time. Raises BadInputError where that is taken, or where
        `run.dir` cannot be written to.
        """
        run = cls(config.run.dir / (config.run.name or free_name(config.run.dir, default_name)))
        if run.path.exists():
            raise run._taken()
        above = next(folder for folder in run.path.absolute().parents if folder.exists())
        if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
            raise BadInputError(f"run.dir: {above} is no folder that can be written to; give another")
        return run

    def make(self, config: Config) -> None:
        """Makes the folder of a new run and writes its config.

        Raises BadInputError where it cannot be made, or where another run has taken the name since it was planned.
        """
        try:
            self.path.mkdir(parents=True)
        except FileExistsError:
            raise self._taken() from None
        except OSError as error:
            raise BadInputError(f"run.dir: {self.path} cannot be made ({error.strerror}); give another") from None
        self.rollouts.mkdir()
        self.checkpoints.mkdir()
        self.write_config(config)

    def _taken(self) -> BadInputError:
        return BadInputError(f"run.name: {self.path} exists; choose another name, or go on with --resume {self.path}")

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of a run that was started before. Raises BadInputError if it is none."""
        if not cls.is_run(path):
            raise BadInputError(f"{path}: not the folder of a run (no config.json of one and checkpoints/ in it)")
        return cls(path)

    @classmethod
    def is_run(cls, path: Path) -> bool:
        """Whether a folder is that of a run, not that of a model (which has a config.json of its own)."""
        run = cls(path)
        return run.checkpoints.is_dir() and run.has_config()

    def has_config(self) -> bool:
        """Whether its config.json is there, and is that of a run."""
        if not self.config_file.is_file():
            return False
        try:
            content = json.loads(self.config_file.read_bytes())
        except ValueError:
            return False
        return isinstance(content, dict) and {"run", "task", "objective"} <= set(content)

    def write_config(self, config: Config) -> None:
        """Writes the resolved config."""
        write_atomically(self.config_file, config.model_dump_json(indent=2).encode() + b"\n")

    def read_config(self, overrides: Mapping[str, str] | None = None) -> Config:
        """The config that the run was started with, with `section.key -> text` changes."""
        return build_config(json.loads(self.config_file.read_bytes()), overrides, source=str(self.config_file))

    def change(self, config: Config, step: int) -> None:
        """Writes the config that the run goes on under after `step`; rollouts that another config drew later go.

        The name and the folder that it has stay, whether `config` knows them or not.
        """
        before = self.read_config()
        place = {"name": before.run.name, "dir": before.run.dir}
        config = config.model_copy(update={"run": config.run.model_copy(update=place)})
        if config == before:
            return
        for file in [] if _draw_alike(config, before) else self.rollouts.glob("step-*"):
            if int(file.name.removeprefix("step-").partition(".")[0]) > step:
                file.unlink()
        self.write_config(config)

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def timings_file(self) -> Path:
        return self.path / "timings.jsonl"

    @property
    def evaluations_file(self) -> Path:
        return self.path / "evaluations.jsonl"

    @property
    def warnings_file(self) -> Path:
        return self.path / "warnings.jsonl"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def report_file(self) -> Path:
        return self.path / "report.html"

    def rollout_file(self, step: int) -> Path:
        """The rollouts that step `step` trains on."""
        return self.rollouts / f"step-{step:06d}.jsonl.zst"

    def evaluation_file(self, step: int) -> Path:
        """The rollouts of the evaluation after step `step` (0: before the first)."""
        return self.evaluations / f"step-{step:06d}.jsonl.zst"


def free_name(folder: Path, stem: str) -> str:
    """A name for a new run in `folder`: the stem and the time, with a number where that is taken."""
    name = f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', stem).strip('.-') or 'run'}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(candidate for candidate in candidates if not (folder / candidate).exists())


def _draw_alike(one: Config, other: Config) -> bool:
    """Whether the next rollouts are the same under both, however long the run is and whatever it shows and saves."""
    shown = {name: getattr(other, name) for name in ("evaluation", "checkpoint", "tracking")}
    training = one.training.model_copy(update={"steps": other.training.steps})
    return one.model_copy(update=shown | {"training": training}) == other
