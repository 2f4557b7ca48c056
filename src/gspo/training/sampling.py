"""Responses of a step or an evaluation, sampled and scored by all processes together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gspo.distributed.world import World
from gspo.rollout.engine import Engine
from gspo.types import Request, Rollout, Sampling

Score = Callable[[Sequence[Rollout]], list[Rollout]]


def sample(
    engine: Engine, requests: Sequence[Request], sampling: Sampling, score: Score, world: World
) -> list[Rollout]:
    """Every request's rollouts with their rewards, on every process, sorted by (slot, sample).

    Request k is process k mod N's: it draws all of its samples with its own engine and scores them, so that no prompt
    is sampled twice and a reward function sees whole groups. What is drawn does not depend on N, since noise is keyed
    by slot and sample.
    """
    mine = score(engine.generate(requests[world.rank :: world.size], sampling))
    return sorted(world.gather(mine), key=lambda rollout: (rollout.slot, rollout.sample))
