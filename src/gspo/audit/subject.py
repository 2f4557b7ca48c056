"""What is audited: an engine's rollouts, and the policy at the weights that they were sampled from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.audit.weights import EngineWeights, round_weights
from gspo.config import Config
from gspo.distributed.world import World
from gspo.errors import BadInputError
from gspo.policy.load import load_policy
from gspo.policy.model import Policy
from gspo.reporting.files import read_lines
from gspo.reporting.journal import read_rollouts
from gspo.reporting.run_folder import RunFolder
from gspo.reporting.timing import StageClock
from gspo.rewards.runner import RewardRunner
from gspo.tasks.load import load_task
from gspo.tasks.rows import Rows, load_rows
from gspo.tasks.stream import PromptStream
from gspo.training.checkpoint import TrainState, latest_checkpoint, load_optimizer, read_state
from gspo.training.collect import Collector
from gspo.training.learner import Learner
from gspo.training.run import check_prompts, load_trained_policy, make_engine, max_prompt_tokens, training_sampling
from gspo.types import Rollout

RewardFunction = Callable[..., Any]


@dataclass(slots=True)
class Subject:
    """`groups` of scored rollouts of step `step`; the learner holds the policy that they were sampled from.

    `source` says in words where they come from; `rollout_seconds` what sampling them took, if that is known.
    """

    learner: Learner
    groups: list[list[Rollout]]
    step: int
    source: str
    rollout_seconds: float | None


def recorded(config: Config, run: Path) -> Subject:
    """The newest rollouts of a run whose weights are still there: a step after a checkpoint, or else the first.

    Raises BadInputError where no step qualifies.
    """
    folder = RunFolder(run)
    checkpoint, step = _newest_step(folder)
    learner, _ = _learner(config, checkpoint, load_rows(config.task, seed=config.run.seed))
    where = "the starting weights" if checkpoint is None else f"checkpoint {checkpoint.name}"
    groups = final_groups(read_rollouts(folder.rollout_file(step)), config.rollout.prompts)
    source = f"the recorded rollouts of step {step} of {run}, scored at {where}"
    return Subject(learner, groups, step, source, _recorded_seconds(folder, step))


def fresh(
    config: Config, *, run: Path | None, engine_weights: EngineWeights, functions: Sequence[RewardFunction]
) -> Subject:
    """A rollout batch drawn now, from a run's last checkpoint or from the config's model."""
    checkpoint = None if run is None else latest_checkpoint(run)
    rows = load_rows(config.task, seed=config.run.seed)
    check_prompts(config, rows)
    with closing(RewardRunner(config.reward, default=rows.default_reward, functions=functions)) as rewards:
        rewards.validate(rows.train)
        learner, state = _learner(config, checkpoint, rows)
        policy = learner.policy
        room = max_prompt_tokens(config, policy.context_length)
        task = load_task(config.task, policy.tokenizer, seed=config.run.seed, max_prompt_tokens=room, rows=rows)
        sampled_from = policy if engine_weights == "float32" else _rounded(config, checkpoint, engine_weights)
        clock = StageClock()
        with closing(make_engine(sampled_from, config, state.version)) as engine:
            stream = PromptStream(task.train, config.run.seed, state.cursor)
            collector = Collector(stream, engine, rewards, config, training_sampling(config, policy))
            with clock.stage("rollout"):
                groups = collector.collect(state.step + 1).groups
    model = config.model.path if checkpoint is None else str(checkpoint)
    source = f'fresh rollouts of {model}; engine "{config.rollout.engine}", weights {engine_weights}'
    return Subject(learner, groups, state.step + 1, source, clock.seconds["rollout"])


def final_groups(rollouts: Sequence[Rollout], prompts: int) -> list[list[Rollout]]:
    """The P groups that a step trained on; of a group that dynamic sampling replaced, the last replacement.

    The k-th replacement of group p has slot k P + p.
    """
    by_slot: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        by_slot.setdefault(rollout.slot, []).append(rollout)
    last = {slot % prompts: by_slot[slot] for slot in sorted(by_slot)}
    return [last.get(p, []) for p in range(prompts)]


def _learner(config: Config, checkpoint: Path | None, rows: Rows) -> tuple[Learner, TrainState]:
    policy = load_trained_policy(config, checkpoint, rows)
    learner = Learner(policy, config, world=World())
    if checkpoint is None:
        return learner, TrainState()
    state = read_state(checkpoint)
    load_optimizer(checkpoint, policy, learner, state.version)
    return learner, state


def _rounded(config: Config, checkpoint: Path | None, weights: EngineWeights) -> Policy:
    """The same policy in a copy of its own, adapters merged in, with rounded weights."""
    model = config.model
    copy = load_policy(
        config.model.path if checkpoint is None else checkpoint,
        base=None if checkpoint is None or model.lora is None else model.path,
        dtype=model.dtype,
        device=model.device,
        trust_remote_code=model.trust_remote_code,
        train=False,
    )
    round_weights(copy.model, weights)
    return copy


def _newest_step(folder: RunFolder) -> tuple[Path | None, int]:
    """(checkpoint, step) such that the step's rollouts were sampled from the checkpoint's weights."""
    for checkpoint in sorted(folder.checkpoints.glob("step-*"), reverse=True):
        state = read_state(checkpoint)
        if _sampled_by(folder.rollout_file(state.step + 1), state.version):
            return checkpoint, state.step + 1
    if _sampled_by(folder.rollout_file(1), 0):
        return None, 1
    raise BadInputError(
        f"{folder.path}: no recorded rollouts whose weights are still there; draw fresh ones with "
        "--engine-weights float32"
    )


def _sampled_by(path: Path, version: int) -> bool:
    if not path.exists():
        return False
    return {span.version for rollout in read_rollouts(path) for span in rollout.policy_version} == {version}


def _recorded_seconds(folder: RunFolder, step: int) -> float | None:
    lines = read_lines(folder.timings_file) if folder.timings_file.exists() else []
    return next((line["seconds"].get("rollout") for line in lines if line["step"] == step), None)
