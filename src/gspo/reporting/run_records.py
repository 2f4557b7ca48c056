"""What a run folder says, read without the model and without torch, whatever state the run is in."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from gspo.config import Config
from gspo.errors import BadInputError
from gspo.reporting.files import read_lines
from gspo.reporting.run_folder import RunFolder

Record = Mapping[str, Any]
"""A line of `metrics.jsonl` or of `timings.jsonl`: figures by name, `step`, and the `sums` of quotients."""


@dataclass(frozen=True, slots=True)
class RunRecords:
    """The records of a run, each sorted by step; what is missing is empty, and `notes` say what and why.

    `warnings` are those that were given while it ran: a `step`, `what` and `text` each.

    `config` is None where it is missing or was written by a version with other settings.
    """

    name: str
    folder: RunFolder
    config: Config | None
    metrics: Sequence[Record]
    timings: Sequence[Record]
    evaluations: Sequence[Record]
    warnings: Sequence[Record]
    notes: tuple[str, ...]

    @property
    def last_step(self) -> int:
        """The last step that is finished, 0 where none is."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def planned_steps(self) -> int | None:
        """How many steps the run is to make."""
        return None if self.config is None else self.config.training.steps

    @property
    def written(self) -> datetime | None:
        """When the last finished step was written."""
        file = self.folder.metrics_file
        return datetime.fromtimestamp(file.stat().st_mtime) if file.exists() else None


def read_runs(paths: Sequence[Path]) -> list[RunRecords]:
    """The records of each run, named by its folder; by its whole path where two folders have one name.

    Raises BadInputError where a folder is none of a run, or a whole line of a record is damaged.
    """
    distinct = [path for i, path in enumerate(paths) if path.resolve() not in [p.resolve() for p in paths[:i]]]
    names = [path.resolve().name for path in distinct]
    return [
        _read_run(path, name if names.count(name) == 1 else str(path))
        for path, name in zip(distinct, names, strict=True)
    ]


def _read_run(path: Path, name: str) -> RunRecords:
    folder = RunFolder(path)
    if not (folder.metrics_file.is_file() or folder.has_config()):
        raise BadInputError(
            f"{path}: not the folder of a run (no config.json of one and no metrics.jsonl in it); give the folder "
            "that gspo train names at its end"
        )
    notes: list[str] = []
    config = _read_config(folder, notes)
    records = []
    for file in (folder.metrics_file, folder.timings_file, folder.evaluations_file):
        if not file.is_file():
            notes.append(f"{file.name} is missing")
        of_step = {record["step"]: record for record in (read_lines(file) if file.is_file() else [])}
        records.append([of_step[step] for step in sorted(of_step)])
    metrics, timings, evaluations = records
    given = read_lines(folder.warnings_file) if folder.warnings_file.is_file() else []
    warnings = [record for record in given if isinstance(record.get("text"), str)]
    return RunRecords(
        name, folder, config, metrics, list(map(_flat_timing, timings)), evaluations, warnings, tuple(notes)
    )


def _read_config(folder: RunFolder, notes: list[str]) -> Config | None:
    if not folder.has_config():
        notes.append("config.json is missing or damaged: what the settings decide is left out")
        return None
    try:
        return folder.read_config()
    except BadInputError as error:
        notes.append(f"config.json is of another version ({str(error).splitlines()[0]})")
        return None


def _flat_timing(record: Record) -> Record:
    flat: dict[str, Any] = {"step": record["step"]}
    for kind in ("seconds", "tokens", "tokens_per_second"):
        flat |= {f"{kind}/{stage}": value for stage, value in record.get(kind, {}).items()}
    return flat | {"peak_memory_bytes": record.get("peak_memory_bytes")}


def joined(records: Sequence[Record], name: str) -> float | int | None:
    """A figure over several steps: sums and denominators added and then divided, so that it is exact.

    Of a figure without a denominator the mean over the steps; of one that is an extreme by its name, the extreme.
    None where there is nothing to count, or the result is not a finite number.
    """
    pairs = [pair for record in records if (pair := record.get("sums", {}).get(name)) is not None]
    if pairs:
        count = sum(pair[1] for pair in pairs)
        value = sum(float(pair[0]) for pair in pairs) / count if count else math.nan
    else:
        found = [record[name] for record in records if record.get(name) is not None]
        value = _join(name, found) if found else math.nan
    return value if math.isfinite(value) else None


def _join(name: str, values: Sequence[float | int]) -> float | int:
    if name.endswith("min"):
        return min(values)
    return max(values) if name.endswith("max") else statistics.fmean(values)


def total(records: Sequence[Record], name: str) -> tuple[float, float]:
    """Sum and denominator of a figure over several steps; of a plain count, its sum and the number of steps.

    Steps whose sum is not a finite number are left out.
    """
    pairs = [pair for record in records if (pair := record.get("sums", {}).get(name)) is not None]
    if not pairs:
        pairs = [(record[name], 1) for record in records if record.get(name) is not None]
    finite = [(float(part), float(whole)) for part, whole in pairs if math.isfinite(float(part))]
    return math.fsum(part for part, _ in finite), math.fsum(whole for _, whole in finite)
