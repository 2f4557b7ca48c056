"""`gspo train`: from a config or a run to go on with, to a finished run or the reason why there is none.

Nothing heavy is imported before the config is known to be right.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from gspo.config import Config, load_config
from gspo.distributed.launch import INTERRUPTED, is_one_of_many, say_why
from gspo.errors import BadInputError
from gspo.reporting.run_folder import RunFolder
from gspo.reporting.trackers import check_trackers
from gspo.training.interrupts import Terminated, terminable

if TYPE_CHECKING:
    from gspo.distributed.world import World

TERMINATED = 143
"""What a shell reports of a program that SIGTERM ended."""


def run_train(path: Path | None, overrides: Mapping[str, str], *, resume: Path | None, dry_run: bool) -> int:
    """Trains, or says what training would do (`dry_run`); the exit status is 0, 130 after Ctrl-C or 143
    after SIGTERM.

    Raises:
        BadInputError: a setting, file, model or reward that cannot work.
        GspoError: the run cannot go on.
    """
    config, folder = plan_run(path, overrides, resume=resume)
    if is_one_of_many():
        return _train_among_others(config, folder, resume=resume, dry_run=dry_run)
    return _dry_run(config, resume) if dry_run else _train(config, folder, resume=resume)


def plan_run(path: Path | None, overrides: Mapping[str, str], *, resume: Path | None) -> tuple[Config, RunFolder]:
    """The whole config of a run, and its folder, which is not made yet. Raises BadInputError."""
    if resume is not None:
        if path is not None:
            raise BadInputError(f"{path}: --resume goes on under the run's own config; leave the file out")
        folder = RunFolder.open(resume)
        config = folder.read_config(overrides)
    else:
        if path is None:
            raise BadInputError("CONFIG.toml: missing; give a config file, or a run to go on with: --resume RUN")
        config = load_config(path, overrides)
        folder = RunFolder.planned(config, default_name=path.stem)
        run = config.run.model_copy(update={"name": folder.path.name})
        config = config.model_copy(update={"run": run})
    check_trackers(config.tracking)
    return config, folder


def _train_among_others(config: Config, folder: RunFolder, *, resume: Path | None, dry_run: bool) -> int:
    """Every process trains under the main one's config, in its run folder; that one alone shows what came of it.

    A job that fails never gets to `close`, which would end the others before this process has said why.
    """
    from gspo.distributed.world import World

    world = World.from_environment(config.distributed.timeout, device=config.model.device)
    config, folder = world.broadcast((config, folder))
    status = 0
    if not dry_run:
        status = _train(config, folder, resume=resume, shows=world.is_main)
    elif world.is_main:
        status = _dry_run(config, resume, world)
    if status == 0:
        world.close()
    return status


def _train(config: Config, folder: RunFolder, *, resume: Path | None, shows: bool = True) -> int:
    from gspo.training.loop import train

    try:
        # Of several processes the launcher ends the others by SIGTERM when one has failed and said why.
        with nullcontext() if is_one_of_many() else terminable():
            train(config, resume=resume)
    except KeyboardInterrupt as stop:
        begun = RunFolder.is_run(folder.path)
        how = f"go on with: gspo train --resume {folder.path}" if begun else "nothing was begun; start again"
        terminated = isinstance(stop, Terminated)
        say_why(f"{'terminated' if terminated else 'interrupted'}; {how}")
        return TERMINATED if terminated else INTERRUPTED
    if shows:
        from rich.console import Console

        from gspo.reporting.run_summary import print_result

        print_result(Console(), folder, config)
    return 0


def _dry_run(config: Config, resume: Path | None, world: World | None = None) -> int:
    print(config.model_dump_json(indent=2))
    from gspo.training.dry_run import dry_run

    for line in dry_run(config, world=world, resume=resume):
        print(line)
    return 0
