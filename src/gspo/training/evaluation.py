"""Accuracy on prompts that training never sees, with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo.config import Config
from gspo.distributed.world import World
from gspo.rollout.engine import Engine
from gspo.training.intervals import Estimate, estimate
from gspo.training.sampling import Score, sample
from gspo.types import Prompt, Request, Rollout, Sampling

_SEED_OFFSET = 1_000_003  # evaluation draws other noise than the training step of the same number


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a policy got right.

    `correct[p]` of `scored[p]` responses to prompt `keys[p]` are correct; a response that could not be sampled or
    scored is in neither. `accuracy` is pass@1; `pass_at[k]` the chance that one of k responses is correct, over
    the prompts with at least k scored responses.
    """

    sampling: Sampling
    samples: int
    keys: tuple[str, ...]
    correct: tuple[int, ...]
    scored: tuple[int, ...]
    accuracy: Estimate
    pass_at: Mapping[int, Estimate]
    rollouts: tuple[Rollout, ...]

    @property
    def dropped(self) -> int:
        """Responses that could not be sampled or scored."""
        return len(self.rollouts) - sum(self.scored)


def evaluation_sampling(config: Config, eos_ids: Sequence[int]) -> Sampling:
    """How `[evaluation]` says that held-out prompts are answered; lengths and stop strings as in training."""
    wanted = config.evaluation
    return Sampling(
        max_tokens=config.rollout.max_tokens,
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        top_k=wanted.top_k,
        min_p=wanted.min_p,
        stop=tuple(config.rollout.stop),
        eos_ids=tuple(eos_ids),
        seed=config.run.seed + _SEED_OFFSET,
    )


def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    score: Score,
    *,
    sampling: Sampling,
    samples: int = 1,
    correct_at: float = 1.0,
    world: World | None = None,
) -> Evaluation:
    """Draws `samples` responses per prompt, scores them and counts the correct ones; all processes get the same.

    Every call draws with the same noise (step 0), so that two evaluations differ by the policy alone.
    """
    requests = [Request(prompt, samples, step=0, slot=slot) for slot, prompt in enumerate(prompts)]
    rollouts = sample(engine, requests, sampling, score, world or World())
    return summarize(prompts, rollouts, sampling=sampling, samples=samples, correct_at=correct_at)


def summarize(
    prompts: Sequence[Prompt],
    rollouts: Sequence[Rollout],
    *,
    sampling: Sampling,
    samples: int,
    correct_at: float,
) -> Evaluation:
    """Counts scored rollouts, whose `slot` is the place of their prompt in `prompts`."""
    correct, scored = [0] * len(prompts), [0] * len(prompts)
    for rollout in rollouts:
        if _is_scored(rollout):
            scored[rollout.slot] += 1
            correct[rollout.slot] += rollout.reward is not None and rollout.reward >= correct_at
    return Evaluation(
        sampling=sampling,
        samples=samples,
        keys=tuple(prompt.key for prompt in prompts),
        correct=tuple(correct),
        scored=tuple(scored),
        accuracy=_mean_over_prompts(correct, scored, 1),
        pass_at={k: _mean_over_prompts(correct, scored, k) for k in _powers_of_two(samples)},
        rollouts=tuple(rollouts),
    )


def _is_scored(rollout: Rollout) -> bool:
    return rollout.dropped is None and rollout.reward is not None


def _powers_of_two(samples: int) -> list[int]:
    """2, 4, 8 ... and `samples` itself: pass@1 is the accuracy."""
    return sorted({2**i for i in range(1, samples.bit_length())} | ({samples} if samples > 1 else set()))


def _mean_over_prompts(correct: Sequence[int], scored: Sequence[int], k: int) -> Estimate:
    return estimate([pass_at_k(n, c, k) for c, n in zip(correct, scored, strict=True) if n >= k])


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k responses, drawn from n without replacement of which c are correct, is.

    The unbiased estimate 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, eq. 1). Needs
    1 <= k <= n and 0 <= c <= n.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, found k={k}, n={n}, c={c}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def evaluation_record(evaluation: Evaluation) -> dict[str, Any]:
    """An evaluation as JSON, without its rollouts."""
    scored = [rollout for rollout in evaluation.rollouts if _is_scored(rollout)]
    return {
        "samples": evaluation.samples,
        "temperature": evaluation.sampling.temperature,
        "accuracy": _as_json(evaluation.accuracy),
        "pass_at": {str(k): _as_json(found) for k, found in evaluation.pass_at.items()},
        "truncated": [sum(rollout.truncated for rollout in scored), len(scored)],
        "length": [sum(len(rollout.response_ids) for rollout in scored), len(scored)],
        "dropped": evaluation.dropped,
        "prompts": [
            {"key": key, "correct": c, "scored": n}
            for key, c, n in zip(evaluation.keys, evaluation.correct, evaluation.scored, strict=True)
        ],
    }


def _as_json(found: Estimate) -> dict[str, Any]:
    return {"value": found.value, "low": found.low, "high": found.high, "n": found.n}
