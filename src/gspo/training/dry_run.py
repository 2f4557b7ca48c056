"""Everything of a run that can be tried without its weights: `gspo train --dry-run`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from gspo.config import Config
from gspo.distributed.world import World
from gspo.policy.devices import slow_autocast
from gspo.policy.load import Preview
from gspo.rewards.runner import RewardRunner
from gspo.tasks.load import Task, load_task
from gspo.tasks.rows import load_rows
from gspo.training.beginning import begin
from gspo.training.clip_range import clip_range
from gspo.training.engine import check_engine
from gspo.training.routing_checks import check_architecture
from gspo.training.run import check_prompts, max_prompt_tokens, preview_trained_policy
from gspo.training.staleness import check_lag

GB = 1e9


def dry_run(
    config: Config,
    functions: Sequence[Callable[..., Any]] = (),
    world: World | None = None,
    *,
    resume: Path | None = None,
) -> list[str]:
    """Loads task, rewards and tokenizer and estimates memory; returns what there is to say, warnings first.

    Communicates nothing: of a `world` of several processes one makes it for all.

    Raises BadInputError for what would stop the run before its first step, except a lack of memory, which is told.
    """
    with ExitStack() as opened:
        _, checkpoint, _, changes = begin(config, resume, opened)
    clip_range(config.objective)
    check_lag(config, world or World())
    rows = load_rows(config.task, seed=config.run.seed)
    check_prompts(config, rows)
    with closing(RewardRunner(config.reward, default=rows.default_reward, functions=functions)) as rewards:
        warnings = config.warnings() + changes + rows.notes() + rewards.validate(rows.train)
        names = rewards.names
    policy = preview_trained_policy(config, checkpoint, rows, world)
    warnings += slow_autocast(policy.autocast, policy.device)
    check_architecture(policy, config)
    check_engine(config, policy.device, world)
    room = max_prompt_tokens(config, policy.context_length)
    task = load_task(config.task, policy.tokenizer, seed=config.run.seed, max_prompt_tokens=room, rows=rows)
    warnings += task.notes
    return [f"warning: {line}" for line in warnings] + [_memory(policy), _task(task), f"rewards: {', '.join(names)}"]


def _memory(policy: Preview) -> str:
    free = "" if policy.free is None else f"; {policy.free / GB:.1f} GB are free"
    short = " (too little)" if policy.free is not None and policy.memory.total > policy.free else ""
    return f"memory: {policy.memory}{free}{short}"


def _task(task: Task) -> str:
    longest = max(len(prompt.ids) for prompt in task.train + task.held_out)
    counts = f"{len(task.train)} training prompts, {len(task.held_out)} held out, none in both"
    return f"task: {counts}; longest prompt: {longest} token(s)"
