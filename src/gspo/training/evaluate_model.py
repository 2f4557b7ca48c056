"""Measures a model or a run on held-out prompts: what `gspo eval` and `gspo.evaluate` do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gspo.config import Config
from gspo.errors import BadInputError
from gspo.policy.load import load_policy, preview_policy
from gspo.reporting.run_folder import RunFolder
from gspo.rewards.calls import as_functions
from gspo.rewards.runner import RewardRunner
from gspo.tasks.load import tokenize
from gspo.tasks.rows import load_rows
from gspo.training import evaluation
from gspo.training.checkpoint import latest_checkpoint
from gspo.training.evaluation import Evaluation, evaluation_record, evaluation_sampling
from gspo.training.evaluation_config import evaluation_config
from gspo.training.intervals import Estimate
from gspo.training.run import make_engine, max_prompt_tokens

RewardFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """`greedy`: one response per prompt, the most likely tokens; `sampled`: several at the wanted temperature."""

    greedy: Evaluation
    sampled: Evaluation

    def estimates(self) -> dict[str, Estimate]:
        """The figures by name: greedy accuracy, pass@1 (mean over the samples), pass@k."""
        figures = {"greedy": self.greedy.accuracy, "pass@1": self.sampled.accuracy}
        return figures | {f"pass@{k}": estimate for k, estimate in self.sampled.pass_at.items()}

    def as_record(self) -> dict[str, Any]:
        """The report as JSON, with counts per prompt and without responses."""
        return {"greedy": evaluation_record(self.greedy), "sampled": evaluation_record(self.sampled)}


def evaluate(
    model_or_run: str | Path,
    task: Path | str | Mapping[str, Any] | None = None,
    *,
    samples: int = 8,
    temperature: float | None = None,
    reward: RewardFunction | Sequence[RewardFunction] | None = None,
    settings: Mapping[str, str] | None = None,
) -> EvaluationReport:
    """Accuracy of a model on the held-out prompts of a task.

    Args:
        model_or_run: hub id, model folder, or the folder of a run (its last checkpoint, under its own config).
        task: a config file, or a table as under `[task]`; default: the run's task.
        samples: responses per prompt for pass@1 (their mean) and pass@k.
        temperature: of the samples; default: that of training.
        reward: reward functions besides those of the config, as for `train`.
        settings: any other settings, as flags give them: `{"task.held_out": "500"}`; `model.path` is where the model
            lies that an adapter belongs to, if it was moved.

    Raises:
        BadInputError: a setting, file, model or reward that cannot work.
    """
    functions = as_functions(reward)
    given = Path(task) if isinstance(task, str) else task
    others = dict(settings or {})
    base = others.pop("model.path", None)
    config = evaluation_config(model_or_run, given, samples=samples, temperature=temperature, overrides=others)
    return evaluate_config(config, functions, base=base)


def evaluate_config(
    config: Config, functions: Sequence[RewardFunction] = (), *, base: str | None = None
) -> EvaluationReport:
    """Evaluates `model.path` on the held-out prompts of the config's task, as its `[evaluation]` says and greedily.

    `base` is where the model lies that an adapter belongs to (see `load_policy`).
    """
    rows = load_rows(config.task, seed=config.run.seed)
    if not rows.held_out:
        raise BadInputError("task.held_out = 0: there is nothing to evaluate on; hold questions out")
    with closing(RewardRunner(config.reward, default=rows.default_reward, functions=functions)) as rewards:
        rewards.validate(rows.held_out)
        folder = Path(config.model.path)
        path = latest_checkpoint(folder) if RunFolder.is_run(folder) else config.model.path
        device, trusted = config.model.device, config.model.trust_remote_code
        preview = preview_policy(path, base=base, device=device, trust_remote_code=trusted, train=False)
        room = max_prompt_tokens(config, preview.context_length)
        prompts = tokenize(rows.held_out, config.task, preview.tokenizer, room)
        precision = config.model.dtype
        policy = load_policy(path, base=base, dtype=precision, device=device, trust_remote_code=trusted, train=False)
        sampling = evaluation_sampling(config, policy.eos_ids)
        correct_at = config.reward.correct_at
        with closing(make_engine(policy, config)) as engine:
            most_likely = replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
            greedy = evaluation.evaluate(engine, prompts, rewards.score, sampling=most_likely, correct_at=correct_at)
            sampled = evaluation.evaluate(
                engine,
                prompts,
                rewards.score,
                sampling=sampling,
                samples=config.evaluation.samples,
                correct_at=correct_at,
            )
    return EvaluationReport(greedy, sampled)
