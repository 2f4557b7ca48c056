"""TensorBoard, wandb and trackio behind one protocol; each is an extra, imported here and nowhere else."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from gspo.config import TrackingConfig
from gspo.errors import BadInputError


@runtime_checkable
class Tracker(Protocol):
    """Takes the values of a step; what it does with them is its own affair."""

    def log(self, step: int, values: Mapping[str, float | int]) -> None:
        """Reports the values of one step."""
        ...

    def close(self) -> None:
        """Sends what is still waiting."""
        ...


class TensorBoard:
    """Event files under `tensorboard/` in the run folder."""

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def log(self, step: int, values: Mapping[str, float | int]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases; a resumed run goes on under its old id."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=project, name=folder.name, id=folder.name, resume="allow", dir=str(folder), config=dict(config)
        )

    def log(self, step: int, values: Mapping[str, float | int]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """trackio; a resumed run goes on under its old name."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        import trackio

        self._run = trackio.init(project=project, name=folder.name, resume="allow", config=dict(config))

    def log(self, step: int, values: Mapping[str, float | int]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def check_trackers(tracking: TrackingConfig) -> None:
    """Raises BadInputError, without importing any, where the package of a wanted tracker is missing."""
    for name in tracking.trackers:
        if importlib.util.find_spec(name) is None:
            raise BadInputError(
                f"tracking.trackers: {name} is not installed; pip install 'gspo[{name}]' or take it off the list"
            )


def open_trackers(
    tracking: TrackingConfig, folder: Path, config: Mapping[str, Any], *, resume_step: int | None = None
) -> list[Tracker]:
    """Starts the wanted trackers for the run in `folder`; `config` is shown beside the curves."""
    check_trackers(tracking)
    makers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(folder, resume_step),
        "wandb": lambda: Wandb(folder, tracking.project, config),
        "trackio": lambda: Trackio(folder, tracking.project, config),
    }
    return [makers[name]() for name in tracking.trackers]
