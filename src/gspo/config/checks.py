"""What goes with what: combinations that cannot work, and settings that can have no effect."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gspo.config.schema import Config

BY_RESPONSE = ("gmpo", "gspo")
"""Objectives that take one advantage per response; the others take one per token."""


def impossible(config: Config) -> list[str]:
    """Why the settings cannot work together, one line each."""
    rollout, training, found = config.rollout, config.training, []
    if rollout.prompts % training.minibatches:
        found.append(
            f"training.minibatches = {training.minibatches} does not divide rollout.prompts = {rollout.prompts}: "
            "a mini-batch is whole groups; choose a divisor"
        )
    objective = config.objective
    if objective.clip_low == 1 and objective.name not in ("cispo", "sapo"):
        found.append(
            f"objective.clip_low = 1: no ratio is below 0, so that {objective.name} would never clip on the low side; "
            "give a value below 1"
        )
    if objective.dual_clip is not None and objective.name not in ("gspo", "gspo_token", "grpo", "dr_grpo", "dapo"):
        found.append(f"objective.dual_clip: {objective.name} has no dual clip; leave it out")
    if config.routing.replay == "old" and config.likelihoods.old == "sampler":
        found.append(
            'routing.replay = "old" needs likelihoods.old = "recompute": without an old forward there are no old '
            'experts; use routing.replay = "sampler"'
        )
    if config.model.compile and config.routing.replay != "off":
        found.append(
            f'model.compile = true cannot be with routing.replay = "{config.routing.replay}": compiled layers do not '
            "hand the choice of experts over; set model.compile = false"
        )
    if rollout.engine == "server" and not rollout.servers:
        found.append('rollout.servers: found none, and rollout.engine = "server" needs one: give their addresses')
    found += _impossible_truncation(config)
    found += _impossible_lag(config)
    found += _impossible_correction(config)
    found += _impossible_invariance(config)
    found += _impossible_credit(config)
    named = [entry.function for entry in config.reward.functions]
    if "reasoning_gym" in named and config.task.kind != "reasoning_gym":
        found.append(
            f'reward.functions: reasoning_gym scores tasks of task.kind = "reasoning_gym" alone, not '
            f'"{config.task.kind}"; use another verifier, or your own package.module:function'
        )
    if "environment" in named and config.task.kind != "multi_turn":
        found.append(
            f'reward.functions: environment is what a task of task.kind = "multi_turn" gives, not '
            f'"{config.task.kind}"; use a verifier, or your own package.module:function'
        )
    if named and not any(entry.weight for entry in config.reward.functions):
        found.append("reward.functions: every weight is 0, so that every reward is; give one a weight")
    return found


def _impossible_truncation(config: Config) -> list[str]:
    rollout, evaluation, found = config.rollout, config.evaluation, []
    if rollout.top_k == 1:
        found.append(
            "rollout.top_k = 1: the only candidate always has log-prob 0, so that nothing could be learned; use a "
            "larger one, or 0 for all tokens"
        )
    if not rollout.truncated or rollout.engine == "transformers":
        return found
    if rollout.top_k == 0:
        found.append(
            "rollout.top_k = 0 with rollout.top_p or rollout.min_p: vLLM reports the tokens that it kept only where "
            "top-k bounds their number; give one that is large enough to change little, for instance 1000"
        )
    if evaluation.temperature > 0 and evaluation.top_k == 0:
        found.append(
            "evaluation.top_k = 0: a vLLM that reports the tokens that it kept, as rollout.top_p, top_k and min_p ask "
            "for, refuses to sample without top-k; give it a value, or set evaluation.temperature = 0"
        )
    return found


def _impossible_lag(config: Config) -> list[str]:
    lag, found = config.rollout.lag, []
    if lag == 0:
        return []
    if config.rollout.engine != "server":
        found.append(
            f'rollout.lag = {lag}: rollout.engine = "{config.rollout.engine}" generates in the process that trains, '
            'and cannot run ahead of it; use rollout.engine = "server", or rollout.lag = 0'
        )
    if config.likelihoods.old != "sampler":
        found.append(
            f'rollout.lag = {lag} needs likelihoods.old = "sampler": the weights that sampled are gone when the '
            f'step comes, so that "{config.likelihoods.old}" would score another policy'
        )
    if config.routing.replay == "old":
        found.append(
            f'rollout.lag = {lag} cannot be with routing.replay = "old": the old policy\'s experts are not known; use '
            '"sampler" or "off"'
        )
    if config.task.kind == "multi_turn":
        found.append(
            f'rollout.lag = {lag} cannot be with task.kind = "multi_turn": conversations are played in the process '
            "that trains; use rollout.lag = 0"
        )
    return found


def _impossible_correction(config: Config) -> list[str]:
    likelihoods, name = config.likelihoods, config.objective.name
    if likelihoods.correction == "none":
        return []
    found = []
    if likelihoods.old == "sampler":
        found.append(
            f'likelihoods.correction = "{likelihoods.correction}" needs likelihoods.old = "recompute": with "sampler" '
            "old and sampler are the same and every weight is 1"
        )
    if likelihoods.correction_level == "token" and name in BY_RESPONSE:
        found.append(
            f'likelihoods.correction_level = "token" needs an advantage per token, and objective.name = "{name}" takes '
            'one per response; use "sequence", or objective.name = "gspo_token"'
        )
    return found


def _impossible_invariance(config: Config) -> list[str]:
    model = config.model
    if not config.likelihoods.batch_invariant or config.rollout.engine != "transformers":
        return []
    found = []
    if model.layout in ("shared", "packed"):
        found.append(
            f'likelihoods.batch_invariant = true cannot be with model.layout = "{model.layout}"; use "padded" or "auto"'
        )
    if model.dtype == "bfloat16":
        found.append('likelihoods.batch_invariant = true cannot be with model.dtype = "bfloat16"; use "float32"')
    rollout = config.rollout
    if rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0:
        found.append(
            "likelihoods.batch_invariant = true cannot be with rollout.top_p, rollout.top_k or rollout.min_p: what "
            "they keep is renormalised with other roundings in training; leave them out"
        )
    if model.compile:
        found.append(
            "likelihoods.batch_invariant = true cannot be with model.compile = true: compiled layers choose their own "
            "shapes; set one of the two to false"
        )
    return found


def _impossible_credit(config: Config) -> list[str]:
    objective, task = config.objective, config.task
    found = []
    if objective.credit != "response" and objective.name in BY_RESPONSE:
        found.append(
            f'objective.credit = "{objective.credit}" needs an advantage per token, and objective.name = '
            f'"{objective.name}" takes one per response; use "gspo_token"'
        )
    if objective.ratio_span == "turn" and objective.name != "gspo_token":
        found.append(
            f'objective.ratio_span = "turn": only objective.name = "gspo_token" takes a ratio per turn, not '
            f'"{objective.name}"'
        )
    if "turn" in (objective.credit, objective.ratio_span) and task.kind != "multi_turn":
        name = "credit" if objective.credit == "turn" else "ratio_span"
        found.append(
            f'objective.{name} = "turn": task.kind = "{task.kind}" has one turn; use task.kind = "multi_turn", or '
            "leave it out"
        )
    if objective.credit == "token" and task.kind == "multi_turn":
        found.append(
            'objective.credit = "token": an environment rewards turns, not tokens; use objective.credit = "turn"'
        )
    if task.kind == "multi_turn" and task.template != type(task).model_fields["template"].default:
        found.append("task.template: the environment words its own messages; leave it out")
    if task.kind == "multi_turn" and task.path is not None and task.row_parameters:
        found.append("task.row_parameters: the rows come from task.path; leave one of the two out")
    return found


def without_effect(config: Config) -> list[str]:
    """Settings that can have no effect, one line each."""
    return [
        *_of_the_engine(config),
        *_of_the_correction(config),
        *_of_the_update(config),
        *_of_the_data(config),
        *_of_evaluation(config),
        *_of_sharding(config),
    ]


def _of_the_engine(config: Config) -> list[str]:
    rollout = config.rollout
    if rollout.servers and rollout.engine != "server":
        return [f'rollout.servers has no effect with rollout.engine = "{rollout.engine}"']
    return []


def _of_the_correction(config: Config) -> list[str]:
    likelihoods = config.likelihoods
    used = {
        "none": (),
        "truncate": ("correction_level", "correction_high"),
        "mask": ("correction_level", "correction_low", "correction_high"),
    }[likelihoods.correction]
    return [
        f'likelihoods.{name} has no effect with likelihoods.correction = "{likelihoods.correction}"'
        for name in ("correction_level", "correction_low", "correction_high")
        if name not in used and getattr(likelihoods, name) != type(likelihoods).model_fields[name].default
    ]


def _of_the_update(config: Config) -> list[str]:
    found = []
    training, optimizer, objective = config.training, config.optimizer, config.objective
    if training.minibatches == 1 and training.epochs == 1 and config.likelihoods.old == "recompute":
        found.append(
            "training.minibatches = 1 and training.epochs = 1: every ratio is 1 by construction and nothing is "
            "ever clipped; use several mini-batches to train off-policy as the paper does"
        )
    updates = training.steps * training.epochs * training.minibatches
    if optimizer.warmup_updates >= updates:
        found.append(
            f"optimizer.warmup_updates = {optimizer.warmup_updates}: the run makes {updates} updates, so that the "
            "learning rate never reaches optimizer.learning_rate"
        )
    if objective.discount > 0 and objective.credit != "turn":
        found.append(f'objective.discount has no effect with objective.credit = "{objective.credit}"')
    if objective.name == "gspo_token" and (objective.credit, objective.ratio_span) == ("response", "trajectory"):
        found.append(
            'objective.name = "gspo_token": with one advantage per response its gradient is that of "gspo" (paper, '
            "section 4.3)"
        )
    return found


def _of_the_data(config: Config) -> list[str]:
    found = []
    reward = config.reward
    default = type(reward).model_fields["truncated_penalty"].default
    if reward.truncated != "penalize" and reward.truncated_penalty != default:
        found.append(f'reward.truncated_penalty has no effect with reward.truncated = "{reward.truncated}"')
    found += [
        f"reward.functions: {entry.function} has weight 0: it is called and recorded, but never counts"
        for entry in reward.functions
        if entry.weight == 0
    ]
    apart = getattr(config.task, "held_out_path", None) or getattr(config.task, "held_out_split", None)
    if apart and config.task.held_out != type(config.task).model_fields["held_out"].default:
        found.append(f"task.held_out has no effect: all questions of {apart} are held out")
    if config.task.held_out == 0 and not apart:
        found.append("task.held_out = 0: nothing is held out, so that nothing is evaluated and no checkpoint is best")
    return found


def _of_evaluation(config: Config) -> list[str]:
    evaluation, found = config.evaluation, []
    greedy = evaluation.temperature == 0
    if greedy and evaluation.samples > 1:
        found.append("evaluation.samples > 1 with evaluation.temperature = 0: greedy responses are all the same")
    if greedy and (evaluation.top_p < 1 or evaluation.top_k > 0 or evaluation.min_p > 0):
        found.append(
            "evaluation.top_p, top_k and min_p have no effect with evaluation.temperature = 0: greedy takes the most "
            "likely token"
        )
    if evaluation.every > 0 and evaluation.every >= config.training.steps:
        found.append(
            f"evaluation.every = {evaluation.every} with training.steps = {config.training.steps}: no evaluation falls "
            "between the first and the last"
        )
    return found


def _of_sharding(config: Config) -> list[str]:
    if config.distributed.shard == "none" and not config.distributed.reshard_after_forward:
        return ['distributed.reshard_after_forward has no effect with distributed.shard = "none"']
    return []
