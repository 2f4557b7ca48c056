"""The audit itself: score, measure, make one update, compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo.audit.gradient import GradientChange, gradient_change
from gspo.audit.measure import (
    Contender,
    Decisions,
    Differences,
    clip_decisions,
    measure_differences,
    outside_before,
    span_lengths,
)
from gspo.audit.subject import RewardFunction, Subject, fresh, recorded
from gspo.audit.verdict import Verdict, judge
from gspo.audit.weights import EngineWeights
from gspo.config import Config
from gspo.errors import GspoError
from gspo.objectives import CLIP_RANGES
from gspo.reporting.timing import StageClock
from gspo.training.clip_range import clip_range
from gspo.training.credit import make_batch
from gspo.training.learner import Learner
from gspo.training.minibatch import MicroBatch, MiniBatch
from gspo.training.update_metrics import UpdateMetrics


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the engine's log-probs do to one objective at one clip range.

    Before any update `outside` of `units` ratios lie outside the range by noise alone. `decisions` and `gradient` are
    those after one update; `gradient` is None where no mini-batch has a non-zero advantage.
    """

    contender: Contender
    outside: int
    units: int
    decisions: Decisions
    gradient: GradientChange | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, measured: sampling the batch, scoring what a step would score, and updates extrapolated from one."""

    rollout: float | None
    recompute: float
    update: float | None


@dataclass(frozen=True, slots=True)
class Audit:
    """Everything that the audit found; `as_record` is it as JSON."""

    source: str
    responses: int
    differences: Differences
    outcomes: tuple[Outcome, ...]
    costs: Costs

    def as_record(self) -> dict[str, Any]:
        """Plain values throughout."""
        return asdict(self)


def audit(
    config: Config,
    *,
    run: Path | None = None,
    engine_weights: EngineWeights | None = None,
    functions: Sequence[RewardFunction] = (),
) -> Audit:
    """Compares the inference engine's log-probs with the training engine's, and what follows from the difference.

    With `run` and no `engine_weights` the run's recorded rollouts are audited; else fresh ones are drawn, from the
    run's last checkpoint or from the config's model, with the engine's weights rounded as asked.

    The update that decisions and gradients are taken after is the step's own first one: the learner's, with the run's
    optimizer state and learning rate and without the KL, on the first mini-batch that has a non-zero advantage, with
    old log-probs of the training engine. At ratio 1 its gradient is the same for GSPO and GRPO. Decisions are counted
    over the other mini-batches, gradients compared on the first of these with a non-zero advantage; if there is one
    mini-batch alone, on that.

    Raises BadInputError; GspoError where nothing could be measured.
    """
    config = _as_audited(config)
    if run is not None and engine_weights is None:
        subject = recorded(config, run)
    else:
        subject = fresh(config, run=run, engine_weights=engine_weights or "float32", functions=functions)
    return examine(subject, config)


def _as_audited(config: Config) -> Config:
    """One pass with recomputed old log-probs, without the KL and without figures that nobody will see."""
    changes: dict[str, dict[str, Any]] = {
        "training": {"epochs": 1},
        "likelihoods": {"old": "recompute"},
        "objective": {"kl_weight": 0.0},
        "routing": {"figures_every": 0},
    }
    sections = {name: getattr(config, name).model_copy(update=update) for name, update in changes.items()}
    return config.model_copy(update=sections)


def examine(subject: Subject, config: Config) -> Audit:
    """The audit of given rollouts; makes one update with the subject's learner."""
    learner, clock = subject.learner, StageClock()
    minibatches = list(learner.cut(make_batch(subject.groups, config)))
    with_signal = [m for m in minibatches if _has_signal(m)]
    for minibatch in minibatches:
        # A step takes the old log-probs of its first update from that update's own forward pass.
        with clock.stage("first" if with_signal and minibatch is with_signal[0] else "others"):
            _score_old(learner, minibatch)
    differences = _differences(minibatches)
    if with_signal:
        with clock.stage("update"):
            _update(learner, subject.step, with_signal[0])
    costs = Costs(
        rollout=subject.rollout_seconds,
        recompute=clock.seconds.get("others", 0.0),
        update=clock.seconds["update"] * len(with_signal) if with_signal else None,
    )
    rest = with_signal[1:] or with_signal
    current = [(micro, _score(learner, micro)) for m in rest for micro in m.micro_batches]
    turns = _turn_lengths(minibatches)
    outcomes = []
    for contender in contenders(config):
        outside, units = _outside(contender, minibatches)
        decisions = sum((_decisions(contender, micro, now) for micro, now in current), Decisions())
        change = None
        if rest:
            change = gradient_change(learner.policy, rest[0], contender, temperature=config.rollout.temperature)
        verdict = judge(contender, differences, outside, units, decisions, change, costs.recompute, turns=turns)
        outcomes.append(Outcome(contender, outside, units, decisions, change, verdict))
    return Audit(subject.source, sum(map(len, subject.groups)), differences, tuple(outcomes), costs)


def contenders(config: Config) -> list[Contender]:
    """GSPO and GRPO: at the config's clip range where that is theirs, and at their papers' own.

    GSPO takes its ratio over what `objective.ratio_span` says.
    """
    objective = config.objective
    found = []
    for name in ("gspo", "grpo"):
        low, high = CLIP_RANGES[name]
        by_turn = name == "gspo" and objective.ratio_span == "turn"
        if objective.name in (name, f"{name}_token"):
            found.append(Contender(name, *clip_range(objective), objective.dual_clip, by_turn))
        found.append(Contender(name, low, high, by_turn=by_turn))
    return list(dict.fromkeys(found))


def _has_signal(minibatch: MiniBatch) -> bool:
    return any(bool((_by_token(micro) != 0).any()) for micro in minibatch.micro_batches)


def _by_token(micro: MicroBatch) -> Tensor:
    given = micro.batch.advantages
    return torch.where(micro.batch.mask, given if given.ndim == 2 else given[:, None], 0)


def _score_old(learner: Learner, minibatch: MiniBatch) -> None:
    """The training engine's log-probs at the weights that sampled, with the routes that the update will replay."""
    for micro in minibatch.micro_batches:
        record = learner.config.routing.replay == "old"
        temperature = learner.config.rollout.temperature
        scores = learner.policy.score(
            micro.layout, temperature=temperature, entropy=False, routes=micro.routes, record=record
        )
        micro.batch.old_logprobs, micro.routes = scores.logprobs, scores.routes or micro.routes


def _score(learner: Learner, micro: MicroBatch) -> Tensor:
    temperature = learner.config.rollout.temperature
    return learner.policy.score(micro.layout, temperature=temperature, entropy=False, routes=micro.routes).logprobs


def _update(learner: Learner, step: int, minibatch: MiniBatch) -> None:
    before = learner.version
    learner.update(step, [minibatch], UpdateMetrics())
    if learner.version == before:
        raise GspoError("the audit's update has a gradient that is not finite; the policy cannot be trained from here")


def _differences(minibatches: Sequence[MiniBatch]) -> Differences:
    micros = [micro for m in minibatches for micro in m.micro_batches]
    if not any(bool(micro.batch.mask.any()) for micro in micros):
        raise GspoError("no trainable token in the rollouts: there is nothing to measure")
    width = max(micro.batch.mask.shape[1] for micro in micros)

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([torch.nn.functional.pad(t, (0, width - t.shape[1])) for t in tensors])

    return measure_differences(
        joined([_old(micro) for micro in micros]),
        joined([micro.batch.sampler_logprobs for micro in micros]),
        joined([micro.batch.mask for micro in micros]),
    )


def _outside(contender: Contender, minibatches: Sequence[MiniBatch]) -> tuple[int, int]:
    counts = [
        outside_before(contender, _old(micro), micro.batch.sampler_logprobs, micro.batch.mask, micro.batch.spans)
        for m in minibatches
        for micro in m.micro_batches
    ]
    return sum(outside for outside, _ in counts), sum(units for _, units in counts)


def _decisions(contender: Contender, micro: MicroBatch, now: Tensor) -> Decisions:
    batch = micro.batch
    return clip_decisions(
        contender, now, _old(micro), batch.sampler_logprobs, batch.advantages, batch.mask, batch.spans
    )


def _turn_lengths(minibatches: Sequence[MiniBatch]) -> list[int]:
    batches = [micro.batch for m in minibatches for micro in m.micro_batches]
    return [n for batch in batches if batch.spans is not None for n in span_lengths(batch.mask, batch.spans)]


def _old(micro: MicroBatch) -> Tensor:
    assert micro.batch.old_logprobs is not None
    return micro.batch.old_logprobs
