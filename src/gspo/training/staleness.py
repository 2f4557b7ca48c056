"""How far behind the weights of a step the weights are that drew its responses (`rollout.lag`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gspo.config import Config
from gspo.distributed.world import World
from gspo.errors import BadInputError
from gspo.training.checkpoint import TrainState
from gspo.training.collect import Collected
from gspo.types import Rollout


def check_lag(config: Config, world: World) -> None:
    """Raises BadInputError for several processes, which would have to agree on when each takes new weights."""
    if config.rollout.lag and world.size > 1:
        raise BadInputError(
            f"rollout.lag = {config.rollout.lag} with {world.size} processes: only one process can generate ahead of "
            "its training; use rollout.lag = 0"
        )


def dated(collected: Collected, version: int) -> Collected:
    """The same rollouts with `updates_behind`, for a step that starts from weights `version`."""

    def date(groups: list[list[Rollout]]) -> list[list[Rollout]]:
        return [[replace(r, updates_behind=version - r.policy_version[0].version) for r in group] for group in groups]

    return replace(collected, groups=date(collected.groups), replaced=date(collected.replaced))


@dataclass(frozen=True, slots=True)
class VersionBounds:
    """The versions that a step's rollouts may have been drawn by, in a run that starts after `step` at `version`.

    A step makes at most `updates` optimizer updates, so that a step n starts at most at version
    `version + (n - 1 - step) * updates`; the oldest weights are those of `lag` steps before the start.
    """

    step: int
    version: int
    updates: int
    lag: int

    @classmethod
    def of(cls, config: Config, state: TrainState) -> VersionBounds:
        """Those of a run that goes on from `state`."""
        updates = config.training.minibatches * config.training.epochs
        return cls(state.step, state.version, updates, config.rollout.lag)

    def admit(self, rollout: Rollout, step: int) -> bool:
        """Whether a journal's rollout may be trained on in `step`."""
        newest = self.version + (step - 1 - self.step) * self.updates
        versions = [span.version for span in rollout.policy_version]
        return self.version - self.lag * self.updates <= min(versions) and max(versions) <= newest
