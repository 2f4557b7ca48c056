"""Prompts in, scored groups out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gspo.config import Config
from gspo.distributed.world import World
from gspo.errors import GspoError
from gspo.rewards.runner import RewardRunner
from gspo.rollout.engine import Engine
from gspo.rollout.support_checks import checked_supports
from gspo.tasks.stream import PromptStream
from gspo.training.credit import has_signal
from gspo.training.sampling import sample
from gspo.types import Request, Rollout, Sampling


@dataclass(slots=True)
class Collected:
    """The P groups of a step, and the groups without signal that dynamic sampling replaced.

    `cursor` counts the prompts that had been taken from the stream by then.
    """

    groups: list[list[Rollout]]
    replaced: list[list[Rollout]]
    cursor: int

    @property
    def sampled(self) -> list[Rollout]:
        """Every rollout that was sampled, replaced ones included."""
        return [rollout for group in self.groups + self.replaced for rollout in group]


class Collector:
    """Samples G responses for each of P prompts and scores them; of several processes, each its part of the prompts.

    All processes hold the same `stream` and get the same groups.
    """

    def __init__(
        self,
        stream: PromptStream,
        engine: Engine,
        rewards: RewardRunner,
        config: Config,
        sampling: Sampling,
        world: World | None = None,
    ) -> None:
        self.stream = stream
        self.engine = engine
        self.rewards = rewards
        self.config = config
        self.sampling = sampling
        self.world = world or World()

    def collect(self, step: int, journal: Sequence[Rollout] = ()) -> Collected:
        """The step's groups. Those without signal are replaced up to `resample_without_signal` times.

        `journal` holds scored rollouts of this step that need not be sampled again.
        """
        known: dict[int, list[Rollout]] = {}
        for rollout in journal:
            known.setdefault(rollout.slot, []).append(rollout)
        size = self.config.rollout.prompts
        groups = self._sample(step, range(size), known)
        replaced: list[list[Rollout]] = []
        for attempt in range(1, self.config.rollout.resample_without_signal + 1):
            dull = [p for p in range(size) if not has_signal(groups[p], self.config)]
            if not dull:
                break
            for p, group in zip(dull, self._sample(step, [attempt * size + p for p in dull], known), strict=True):
                replaced.append(groups[p])
                groups[p] = group
        collected = Collected(groups, replaced, self.stream.cursor)
        self._check_dropped(step, collected.sampled)
        return collected

    def _sample(self, step: int, slots: Sequence[int], known: Mapping[int, list[Rollout]]) -> list[list[Rollout]]:
        samples = self.config.rollout.group_size
        prompts = self.stream.take(len(slots))
        requests = [
            Request(prompt, samples=samples, step=step, slot=slot)
            for prompt, slot in zip(prompts, slots, strict=True)
            if slot not in known
        ]
        groups = dict(known)
        if requests:
            for rollout in sample(self.engine, requests, self.sampling, self._score, self.world):
                groups.setdefault(rollout.slot, []).append(rollout)
        return [groups[slot] for slot in slots]

    def _score(self, drawn: Sequence[Rollout]) -> list[Rollout]:
        return self.rewards.score(checked_supports(drawn, self.sampling))

    def _check_dropped(self, step: int, rollouts: Sequence[Rollout]) -> None:
        reasons = Counter(r.dropped for r in rollouts if r.dropped is not None)
        dropped = sum(reasons.values())
        if dropped > self.config.reward.max_dropped * len(rollouts):
            reason, count = reasons.most_common(1)[0]
            raise GspoError(
                f"step {step}: {dropped} of {len(rollouts)} rollouts had to be dropped, more than reward.max_dropped = "
                f"{self.config.reward.max_dropped} allows; {count} of them: {reason}"
            )
