"""Where a run begins: in a folder of its own, or at the last checkpoint of one that was begun before."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from gspo.config import Config
from gspo.errors import BadInputError
from gspo.reporting.run_folder import RunFolder
from gspo.reporting.run_lock import held
from gspo.training.checkpoint import TrainState, find_checkpoint, read_state


def begin(
    config: Config, resume: Path | None, opened: ExitStack
) -> tuple[RunFolder, Path | None, TrainState, list[str]]:
    """The folder of the run, the checkpoint that it goes on from, where that stood, and what a resume changes.

    A run that is there already is held from now on, until `opened` is closed. Raises BadInputError where another
    process holds it, or where a setting was changed that a run cannot change.
    """
    if resume is None:
        return RunFolder.planned(config), None, TrainState(), []
    folder, checkpoint = RunFolder.open(resume), find_checkpoint(resume)
    opened.enter_context(held(resume))
    before = folder.read_config()
    _check_same_place(config, before)
    if checkpoint is None:
        return folder, None, TrainState(), []
    _check_same_seed(config, before)
    _check_same_model(config, before)
    changes = []
    if config.task != before.task:
        changes.append(
            "task: it was changed since the run began; what is held out now may have been trained on before, so that "
            "accuracies before and after cannot be compared"
        )
    if config.model.path != before.model.path:
        changes.append(
            f"model.path: {config.model.path} is taken for {before.model.path}, with which the run began, at another "
            "place; the reference of the KL, or the model under the adapter, comes from there"
        )
    return folder, checkpoint, read_state(checkpoint), changes


def _check_same_place(config: Config, before: Config) -> None:
    """A config that does not say where the run lies, such as the file that it was begun with, is not asked."""
    for name in {"name", "dir"} & config.run.model_fields_set:
        found = getattr(config.run, name)
        if found not in (None, getattr(before.run, name)):
            raise BadInputError(
                f"run.{name} = {str(found)!r}: a resumed run stays in its folder; leave it out, or move the folder and "
                "resume it where it lies"
            )


def _check_same_seed(config: Config, before: Config) -> None:
    if config.run.seed != before.run.seed:
        raise BadInputError(
            f"run.seed = {config.run.seed}: which questions are held out and the order of the others hang on it, and "
            f"the run began with {before.run.seed}; leave it out, or start a new run with model.path = its folder"
        )


def _check_same_model(config: Config, before: Config) -> None:
    """A path that moved is needed where a checkpoint does not hold the whole model: an adapter's base, a reference."""
    if config.model.lora != before.model.lora:
        was = "without an adapter" if before.model.lora is None else f"with {before.model.lora}"
        raise BadInputError(
            f"model.lora: a resumed run goes on from its checkpoint, which began {was}; leave it out, or start a new "
            "run with model.path = its folder"
        )
    used = config.model.lora is not None or config.objective.kl_weight > 0
    if config.model.path != before.model.path and not used:
        raise BadInputError(
            f"model.path = {config.model.path!r}: a resumed run goes on from its checkpoint, which began as "
            f"{before.model.path!r}; leave it out, or start a new run from that model"
        )
