"""The algorithm, one line a stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from gspo.config import Config
from gspo.distributed.world import World
from gspo.errors import BadInputError
from gspo.policy.export import named_tensors
from gspo.reporting.metrics import Metric
from gspo.reporting.timing import StageClock, peak_memory_bytes
from gspo.rewards.calls import as_functions
from gspo.training.checkpoint import latest_checkpoint
from gspo.training.credit import make_batch
from gspo.training.evaluation import Evaluation
from gspo.training.rollout_metrics import rollout_metrics
from gspo.training.run import Run
from gspo.training.update_metrics import UpdateMetrics
from gspo.types import Rollout

Metrics = dict[str, Metric]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a callback sees after each step: the figures and the rollouts that were trained on."""

    step: int
    metrics: Metrics
    rollouts: list[Rollout]


@dataclass(frozen=True, slots=True)
class TrainResult:
    """A finished run: its folder, the last checkpoint, and the first and last held-out evaluation.

    `before` is None after a resume (it is in the run folder), both are None without held-out prompts.
    """

    run: Path
    checkpoint: Path
    before: Evaluation | None
    after: Evaluation | None


Callback = Callable[[StepResult], None]


def train(
    config: Config,
    *,
    reward: Callable[..., list[float | None]] | Sequence[Callable[..., list[float | None]]] | None = None,
    callbacks: Sequence[Callback] = (),
    resume: Path | str | None = None,
) -> TrainResult:
    """Trains the policy that `config` describes.

    Args:
        config: all settings; see `load_config` and `build_config`.
        reward: reward functions besides those of the config, `f(prompts, completions, completion_ids, **columns)`.
        callbacks: called after every step with a `StepResult`; of several processes, by the main one alone.
        resume: folder of a run to continue from its last checkpoint.

    Raises:
        BadInputError: a setting, file, model or reward that cannot work.
        GspoError: the run cannot go on.
    """
    functions = as_functions(reward)
    if callable(callbacks):
        raise BadInputError("callbacks: found a function, should be a list of them; write callbacks=[function]")
    world = World.from_environment(config.distributed.timeout, device=config.model.device)
    with closing(world), closing(Run(config, functions, None if resume is None else Path(resume), world)) as run:
        before = run.evaluate() if run.state.step == 0 else None
        after, checkpoint = before, None
        while run.state.step < config.training.steps:
            result = _step(run)
            after = run.evaluate() if run.evaluation_is_due() else after
            checkpoint = run.save_if_due() or checkpoint
            for callback in callbacks if world.is_main else ():
                callback(result)
        return TrainResult(run.folder.path, checkpoint or latest_checkpoint(run.folder.path), before, after)


def _step(run: Run) -> StepResult:
    config, learner, clock, update_metrics = run.config, run.learner, StageClock(), UpdateMetrics()
    step = run.state.step + 1
    with clock.stage("rollout"):
        collected = run.collect(step)
    batch = make_batch(collected.groups, config)
    with clock.stage("journal"):
        run.journal(step, collected, batch)
    with clock.stage("score"):
        minibatches = learner.prepare(batch, update_metrics)
    with clock.stage("update"):
        learner.update(step, minibatches, update_metrics)
    if update_metrics.warning is not None:
        run.recorder.warn(step, "clip range", update_metrics.warning)
    with clock.stage("export"):
        run.engine.update_weights(named_tensors(run.policy), learner.version)
    run.state.advance(learner.version, collected.cursor)
    metrics = rollout_metrics(collected, config) | update_metrics.as_metrics()
    run.recorder.metrics(step, metrics)
    if metrics["optimizer/updates"] == 0:
        run.recorder.warn(
            step,
            "no signal",
            f"step {step} taught nothing: in every group all rewards are equal, or were dropped; from now on such "
            "steps are only counted (optimizer/updates = 0)",
        )
    sampled = sum(len(rollout.response_ids) for rollout in collected.sampled)
    trained = sum(len(rollout.response_ids) for rollout in batch.rollouts)
    rescored = minibatches[1:] if config.likelihoods.old == "recompute" else []
    scored = sum(minibatch.response_tokens for minibatch in rescored)
    tokens = {"rollout": sampled, "score": scored, "update": trained}
    run.recorder.timings(step, clock.seconds, tokens, max(run.world.gather([peak_memory_bytes()])))
    return StepResult(step, metrics, batch.rollouts)
