"""A run: its parts, put together once, and what happens between two steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from gspo.config import Config, MultiTurnTask
from gspo.distributed.world import World
from gspo.errors import BadInputError
from gspo.policy.load import Preview, load_policy, preview_policy
from gspo.policy.model import Policy
from gspo.reporting.recorder import Recorder
from gspo.reporting.run_lock import held
from gspo.reporting.warning_log import LibraryLog
from gspo.rewards.runner import RewardRunner
from gspo.rollout.engine import Engine
from gspo.tasks.load import Task, load_task
from gspo.tasks.rows import Rows, load_rows
from gspo.tasks.stream import PromptStream
from gspo.training.ahead import Ahead
from gspo.training.beginning import begin
from gspo.training.checkpoint import damaged_model, load_optimizer, save_checkpoint
from gspo.training.clip_range import clip_range
from gspo.training.collect import Collected, Collector
from gspo.training.engine import check_engine, start_engine
from gspo.training.evaluation import Evaluation, evaluate, evaluation_sampling
from gspo.training.learner import Learner
from gspo.training.routing_checks import check_architecture, check_routing
from gspo.training.staleness import VersionBounds, check_lag, dated
from gspo.types import Batch, Sampling

RewardFunction = Callable[..., Any]


class Run:
    """Everything that a training run is made of. Cheap checks come first: nothing heavy loads for a bad setting."""

    def __init__(self, config: Config, functions: Sequence[RewardFunction], resume: Path | None, world: World) -> None:
        self.config = config
        self.world = world
        with ExitStack() as opened:
            records = opened.enter_context(ExitStack())  # closed last: engines and workers do not wait for the report
            self.folder, checkpoint, self.state, changes = world.from_main(lambda: begin(config, resume, records))
            clip_range(config.objective)
            check_lag(config, self.world)
            rows = load_rows(config.task, seed=config.run.seed)
            check_prompts(config, rows)
            self.rewards = opened.enter_context(
                RewardRunner(config.reward, default=rows.default_reward, functions=functions)
            )
            library = opened.enter_context(closing(LibraryLog()))
            warnings = {"settings": config.warnings(), "task": changes + rows.notes()}
            warnings["rewards"] = self.rewards.validate(rows.train)
            preview = preview_trained_policy(config, checkpoint, rows, world)
            check_architecture(preview, config)
            check_engine(config, preview.device, world)
            self.task: Task = load_task(
                config.task,
                preview.tokenizer,
                seed=config.run.seed,
                max_prompt_tokens=max_prompt_tokens(config, preview.context_length),
                rows=rows,
            )
            self.policy = load_trained_policy(config, checkpoint, rows, world)
            check_routing(self.policy.model, config.routing)
            self.learner = Learner(self.policy, config, world=self.world)
            if checkpoint is not None:
                load_optimizer(checkpoint, self.policy, self.learner, self.state.version)
            engine = make_engine(self.policy, config, self.state.version, world)
            self.engine: Engine = opened.enter_context(closing(engine))
            stream = PromptStream(self.task.train, config.run.seed, self.state.cursor)
            self.collector = Collector(
                stream, self.engine, self.rewards, config, training_sampling(config, self.policy), world
            )
            self.ahead = self._start_ahead(opened) if config.rollout.lag else None
            if world.is_main and resume is None:
                self.folder.make(config)
                records.enter_context(held(self.folder.path))
            elif world.is_main:
                self.folder.change(config, self.state.step)
            # Without a checkpoint even the evaluation before the first step is done again.
            done = self.state.step if checkpoint is not None else -1
            self.recorder = Recorder(
                config, self.folder, resume_step=None if resume is None else done, world=self.world
            )
            records.callback(self.recorder.close)
            self._opened = opened.pop_all()
        warnings["policy"] = list(self.policy.notes)
        warnings["task"] += self.task.notes
        for what, texts in warnings.items():
            for text in texts:
                self._warn(what, text)
        library.tell(self._warn)
        if resume is not None:
            where = f"after step {self.state.step}" if checkpoint is not None else "at the start: no checkpoint yet"
            on_disk = self.folder.rollout_file(self.state.step + 1).exists()
            again = "; rollouts already on disk are used again" if on_disk else ""
            left = "" if self.state.step < config.training.steps else "; no step of training.steps is left"
            self.recorder.note(f"resumed {where}{again}{left}")
        for note in self._description():
            self.recorder.note(note)

    def _warn(self, what: str, text: str) -> None:
        self.recorder.warn(self.state.step, what, text, once=False)

    def _start_ahead(self, opened: ExitStack) -> Ahead[Collected]:
        self._bounds = VersionBounds.of(self.config, self.state)
        ahead = Ahead(
            self._collect_ahead,
            first=self.state.step + 1,
            last=self.config.training.steps,
            lag=self.config.rollout.lag,
            stop=self.engine.close,
        )
        opened.callback(ahead.close)
        return ahead

    def collect(self, step: int) -> Collected:
        """The step's scored groups; taken from the journal where an interrupted process had finished them."""
        self.recorder.stage("rollout")
        if self.ahead is not None:
            return dated(self.ahead.take(step), self.learner.version)
        journal = self.world.from_main(lambda: self.recorder.read_step(step)) or []
        current = [r for r in journal if r.policy_version[0].version == self.learner.version]
        return self.collector.collect(step, current)

    def _collect_ahead(self, step: int) -> Collected:
        """What `collect` hands out under a lag, made on another thread; on disk as soon as it is there."""
        journal = self.recorder.read_step(step) or []
        collected = self.collector.collect(step, [r for r in journal if self._bounds.admit(r, step)])
        self.recorder.rollouts(step, collected.sampled)
        return collected

    def journal(self, step: int, collected: Collected, batch: Batch) -> None:
        """Puts the step's rollouts on disk, with the advantages of those that are trained on, before any update."""
        advantages = {
            (r.slot, r.sample): a[: len(r.response_ids)] if isinstance(a, list) else a
            for r, a in zip(batch.rollouts, batch.advantages.tolist(), strict=True)
        }
        sampled = collected.sampled
        self.recorder.rollouts(step, sampled, [advantages.get((r.slot, r.sample)) for r in sampled])
        self.recorder.stage("update")

    def evaluate(self) -> Evaluation | None:
        """Accuracy on the held-out prompts with the current weights; None where there are none."""
        if not self.task.held_out:
            return None
        self.recorder.stage("evaluation")
        evaluation = evaluate(
            self.engine,
            self.task.held_out,
            self.rewards.score,
            sampling=evaluation_sampling(self.config, self.policy.eos_ids),
            samples=self.config.evaluation.samples,
            correct_at=self.config.reward.correct_at,
            world=self.world,
        )
        self.recorder.evaluation(self.state.step, evaluation)
        accuracy = evaluation.accuracy.value
        if accuracy is not None and (self.state.best_accuracy is None or accuracy > self.state.best_accuracy):
            self.state.best_accuracy, self.state.best_step = accuracy, self.state.step
        return evaluation

    def evaluation_is_due(self) -> bool:
        """Whether held-out accuracy is wanted after the step just finished (always after the last)."""
        every, step = self.config.evaluation.every, self.state.step
        return step == self.config.training.steps or (every > 0 and step % every == 0)

    def save_if_due(self) -> Path | None:
        """Writes a checkpoint after every `checkpoint.every` steps, after the last, and after the best evaluation."""
        every, step = self.config.checkpoint.every, self.state.step
        due = step == self.config.training.steps or (every > 0 and step % every == 0) or step == self.state.best_step
        if not due:
            return None
        self.recorder.stage("checkpoint")
        return save_checkpoint(
            self.folder.path, self.policy, self.learner, self.state, keep=self.config.checkpoint.keep
        )

    def close(self) -> None:
        """Ends worker processes, closes files, gives the terminal back."""
        self._opened.close()

    def _description(self) -> list[str]:
        scorer, layout = self.policy.scorer, self.policy.layout_kind
        precision = "float32" if scorer.autocast is None else f"{str(scorer.autocast).removeprefix('torch.')} autocast"
        memory = [] if self.policy.memory is None else [f"memory: {self.policy.memory}"]
        together = []
        if self.world.size > 1:
            part = "a slice of the" if self.policy.sharded else "the whole"
            together = [f"processes: {self.world.size}, each with {part} policy and its share of the rollouts"]
        return [
            *together,
            f"policy: {self.config.model.path} on {self.policy.device}, float32 weights, {precision}, {layout} layout",
            *memory,
            f"task: {len(self.task.train)} training prompts, {len(self.task.held_out)} held out, none in both",
        ]


def check_prompts(config: Config, rows: Rows) -> None:
    """Raises BadInputError where a step would need more prompts than there are."""
    if len(rows.train) < config.rollout.prompts:
        raise BadInputError(
            f"rollout.prompts = {config.rollout.prompts}: the task has only {len(rows.train)} distinct training "
            "prompts; lower it, hold out fewer, or give more data"
        )


def preview_trained_policy(config: Config, checkpoint: Path | None, rows: Rows, world: World | None = None) -> Preview:
    """What is known, before its weights are read, of the policy that `load_trained_policy` loads."""
    with damaged_model(checkpoint):
        return preview_policy(config.model.path, resume=checkpoint, world=world, **_policy_settings(config, rows))


def load_trained_policy(config: Config, checkpoint: Path | None, rows: Rows, world: World | None = None) -> Policy:
    """The policy of the config, or of a checkpoint of its run; with a reference if the KL is on."""
    with damaged_model(checkpoint):
        return load_policy(
            config.model.path,
            resume=checkpoint,
            layout=config.model.layout,
            batch_invariant=config.likelihoods.batch_invariant and config.rollout.engine == "transformers",
            seed=config.run.seed,
            world=world,
            **_policy_settings(config, rows),
        )


def _policy_settings(config: Config, rows: Rows) -> dict[str, Any]:
    return {
        "dtype": config.model.dtype,
        "device": config.model.device,
        "activation_checkpointing": config.model.activation_checkpointing,
        "lora": config.model.lora,
        "trust_remote_code": config.model.trust_remote_code,
        "reference": config.objective.kl_weight > 0,
        "tokens": _largest_micro_batch(config, rows),
        "compile": config.model.compile,
        "shard": config.distributed.shard,
        "reshard_after_forward": config.distributed.reshard_after_forward,
        "samples": config.rollout.engine == "transformers",
    }


def _largest_micro_batch(config: Config, rows: Rows) -> int:
    """An upper estimate, before any tokenizer is there, of the tokens in one forward pass (a character each)."""
    longest = max((len(str(row.content)) for row in rows.train), default=0)
    per_update = config.rollout.prompts // config.training.minibatches * config.rollout.group_size
    turns = config.task.max_turns if isinstance(config.task, MultiTurnTask) else 1
    return min(config.training.micro_batch_tokens, per_update * (longest + turns * config.rollout.max_tokens))


def make_engine(policy: Policy, config: Config, version: int = 0, world: World | None = None) -> Engine:
    """The inference engine that the config names, holding the policy's weights as `version`."""
    return start_engine(policy, config, version, world)


def training_sampling(config: Config, policy: Policy) -> Sampling:
    """The distribution that training responses are drawn from."""
    return Sampling(
        max_tokens=config.rollout.max_tokens,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        min_p=config.rollout.min_p,
        record_support=True,
        stop=tuple(config.rollout.stop),
        eos_ids=policy.eos_ids,
        seed=config.run.seed,
    )


def max_prompt_tokens(config: Config, context_length: int | None) -> int:
    """What the model's context leaves for a prompt beside the longest response."""
    if context_length is None:
        return 1_000_000_000
    room = context_length - config.rollout.max_tokens
    if room < 1:
        raise BadInputError(
            f"rollout.max_tokens = {config.rollout.max_tokens}: the model's context of {context_length} tokens "
            "leaves no room for a prompt; lower it"
        )
    return room
