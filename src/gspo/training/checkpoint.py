"""Checkpoints: a `from_pretrained` folder with the trainer's state inside, written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gspo.errors import BadInputError
from gspo.policy.export import save_policy
from gspo.policy.model import Policy
from gspo.training.interrupts import uninterrupted
from gspo.training.learner import Learner
from gspo.training.optimizer import load_optimizer_tensors, optimizer_tensors

CHECKPOINTS = "checkpoints"
BEST = "best"
STATE = "trainer_state.json"
OPTIMIZER = "trainer_optimizer.safetensors"


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
    """Writes `checkpoints/step-NNNNNN` under the run, then removes all but the last `keep` and the best."""
    folder = run / CHECKPOINTS
    final = folder / f"step-{state.step:06d}"
    if learner.world.is_main:
        with uninterrupted():
            _write(folder, final, policy, learner, state)
            if state.best_step == state.step:
                _point_best_at(folder, final.name)
            _prune(folder, keep)
    learner.world.barrier()
    return final


def _write(folder: Path, final: Path, policy: Policy, learner: Learner, state: TrainState) -> None:
    partial = folder / f".partial-{final.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_policy(policy, partial)
    save_file(_contiguous(optimizer_tensors(learner.optimizer, _names(policy))), partial / OPTIMIZER)
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
        tensors = load_file(checkpoint / OPTIMIZER)
    except (OSError, SafetensorError) as error:
        raise _damaged(checkpoint / OPTIMIZER, error) from None
    load_optimizer_tensors(learner.optimizer, _names(policy), tensors)
    learner.version = version


def _damaged(file: Path, error: Exception) -> BadInputError:
    return BadInputError(
        f"{file}: cannot be read ({error}); remove {file.parent} to go on from the checkpoint before it"
    )


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


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
