"""Checkpoints: a `from_pretrained` folder with the trainer's state inside, written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from gspo.errors import BadInputError
from gspo.policy.export import save_policy
from gspo.policy.model import Policy
from gspo.reporting.files import writing
from gspo.training.interrupts import uninterrupted
from gspo.training.learner import Learner
from gspo.training.optimizer_files import NAME, load_optimizer_files, save_optimizer

CHECKPOINTS = "checkpoints"
BEST = "best"
STATE = "trainer_state.json"
OPTIMIZER = f"{NAME}.safetensors"


@dataclass(slots=True)
class TrainState:
    """Where a run stands between two steps.

    `step` counts finished rollout batches, `version` optimizer updates, `cursor` prompts taken from the stream;
    `best_accuracy` and `best_step` belong to the best held-out evaluation so far.
    """

    step: int = 0
    version: int = 0
    cursor: int = 0
    best_accuracy: float | None = None
    best_step: int | None = None

    def advance(self, version: int, cursor: int) -> None:
        """One more step is done."""
        self.step += 1
        self.version, self.cursor = version, cursor


def save_checkpoint(run: Path, policy: Policy, learner: Learner, state: TrainState, *, keep: int) -> Path:
    """Writes `checkpoints/step-NNNNNN` under the run, then removes all but the last `keep` and the best.

    The main process writes, and every process its own rows of a sharded optimizer: the folder must be one for all.
    """
    folder = run / CHECKPOINTS
    final = folder / f"step-{state.step:06d}"
    partial = folder / f".partial-{final.name}"
    world = learner.world
    with uninterrupted(), writing(final, f"make room, then go on with: gspo train --resume {run}"), _gone(partial):
        if world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        if policy.sharded:
            world.barrier()
            save_policy(policy, partial, write=world.is_main)
            save_optimizer(learner.optimizer, _names(policy), partial, world)
            world.barrier()
        elif world.is_main:
            save_policy(policy, partial)
            save_optimizer(learner.optimizer, _names(policy), partial, None)
        if world.is_main:
            _finish(partial, final, state)
            if state.best_step == state.step:
                _point_best_at(folder, final.name)
            _prune(folder, keep)
    world.barrier()
    return final


@contextmanager
def _gone(partial: Path) -> Iterator[None]:
    """Leaves nothing of a checkpoint that could not be written: on a full disk its room is needed."""
    try:
        yield
    except (OSError, SafetensorError):
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _finish(partial: Path, final: Path, state: TrainState) -> None:
    (partial / STATE).write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")
    _flush(partial)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)


def read_state(checkpoint: Path) -> TrainState:
    """Where the run stood. Raises BadInputError for a damaged file."""
    try:
        return TrainState(**json.loads((checkpoint / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(checkpoint / STATE, error) from None


def load_optimizer(checkpoint: Path, policy: Policy, learner: Learner, version: int) -> None:
    """Puts the optimizer back, `version` updates made; the weights were loaded with the policy.

    Raises BadInputError for a damaged file.
    """
    try:
        load_optimizer_files(learner.optimizer, _names(policy), checkpoint)
    except OSError as error:
        raise _damaged(checkpoint / OPTIMIZER, error) from None
    learner.version = version


@contextmanager
def damaged_model(checkpoint: Path | None) -> Iterator[None]:
    """Adds what to do to an error that is about a checkpoint's model."""
    try:
        yield
    except BadInputError as error:
        if checkpoint is None or repr(str(checkpoint)) not in str(error):
            raise
        raise BadInputError(f"{error}; {_go_back(checkpoint)}") from None


def _damaged(file: Path, error: Exception) -> BadInputError:
    return BadInputError(f"{file}: cannot be read ({error}); {_go_back(file.parent)}")


def _go_back(checkpoint: Path) -> str:
    return f"remove {checkpoint} to go on from the checkpoint before it"


def find_checkpoint(run: Path) -> Path | None:
    """The run's last checkpoint, None where it has not saved one yet."""
    return max((run / CHECKPOINTS).glob("step-*"), default=None)


def latest_checkpoint(run: Path) -> Path:
    """The run's last checkpoint; BadInputError where there is none."""
    found = find_checkpoint(run)
    if found is None:
        raise BadInputError(f"{run}: no checkpoint under {CHECKPOINTS}/; give the folder of a run that has saved one")
    return found


def _point_best_at(folder: Path, name: str) -> None:
    temporary = folder / f".{BEST}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(name)
    os.replace(temporary, folder / BEST)


def _prune(folder: Path, keep: int) -> None:
    best = os.readlink(folder / BEST) if (folder / BEST).is_symlink() else None
    for old in sorted(folder.glob("step-*"))[:-keep]:
        if old.name != best:
            shutil.rmtree(old)


def _flush(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _names(policy: Policy) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in policy.trainable_parameters()}
