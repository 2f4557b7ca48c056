"""Which settings `gspo eval` evaluates under. Imports neither torch nor transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo.config import Config, build_config, read_settings
from gspo.errors import BadInputError
from gspo.reporting.run_folder import RunFolder


def evaluation_config(
    model_or_run: str | Path,
    task: Path | Mapping[str, Any] | None = None,
    *,
    samples: int,
    temperature: float | None = None,
    overrides: Mapping[str, str] | None = None,
) -> Config:
    """The config of an evaluation: the run's own, or that of a file, with the model and the sampling put in.

    `task` is the path of a config file, or a table as under `[task]`; default: the run's task. The task flags among
    `overrides` (`task.kind` ...) make one too. `temperature` defaults to that of training. Raises BadInputError.
    """
    run = Path(model_or_run)
    is_run = RunFolder.is_run(run)
    data: dict[str, Any] = json.loads(RunFolder(run).config_file.read_bytes()) if is_run else {}
    source = str(RunFolder(run).config_file) if is_run else "config"
    given = dict(overrides or {})
    if isinstance(task, Path):
        data, source = {"model": data.get("model", {})} | read_settings(task), str(task)
    elif task is not None:
        data["task"] = dict(task)
    elif not is_run and "task.kind" not in given:
        raise BadInputError(
            f"--task: missing, and {model_or_run} is not the folder of a run, which would have one; give a config file "
            "(--task CONFIG.toml) or flags (--task.kind ...)"
        )
    if "task.kind" in given:
        data["task"] = {}
    model = data.get("model", {})
    data["model"] = {**(model if isinstance(model, Mapping) else {}), "path": str(model_or_run)}
    config = build_config(data, given, source=source)
    wanted = {
        "samples": samples,
        "temperature": config.rollout.temperature if temperature is None else temperature,
    }
    evaluation = {**config.evaluation.model_dump(), **wanted}
    return build_config({**config.model_dump(mode="json"), "evaluation": evaluation}, source=source)
