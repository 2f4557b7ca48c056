"""Every setting, validated before anything heavy loads. TOML in, JSON out.

Precedence: defaults < file < flags (`--section.key value`). This module imports neither torch nor
transformers, so that a wrong setting is reported at once.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gspo.errors import BadInputError

ObjectiveName = Literal["gspo", "gspo_token", "grpo", "dr_grpo", "dapo", "cispo", "gmpo", "sapo"]

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0.0)]


class Section(BaseModel):
    """A table of the TOML file. Unknown keys are errors; values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class RunConfig(Section):
    """Where a run lives and what keys its randomness."""

    dir: Path = Field(Path("runs"), description="Folder that holds the run folders.")
    name: str | None = Field(
        None, description="Name of the run folder; default: the config file's name and the time of the start."
    )
    seed: int = Field(0, ge=0, description="Keys every random choice: data order, sampling noise, new LoRA weights.")


class LoraConfig(Section):
    """Low-rank adapters (extra `peft`). With LoRA the reference policy is the model with its adapter off."""

    rank: Positive = Field(16, description="Rank of the update of each adapted matrix.")
    alpha: float = Field(32.0, gt=0, description="Scale: the update is multiplied by alpha / rank.")
    targets: str | list[str] = Field(
        "all-linear", description='Names of the modules to adapt, or "all-linear" (every one but the head).'
    )


class ModelConfig(Section):
    """The policy to train."""

    path: str = Field(
        description="Hub id, `from_pretrained` folder, or the folder of another run (its last checkpoint)."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Arithmetic of the forward and backward pass; master weights are always float32. `auto`: bfloat16 "
        "autocast where the device has matrix instructions for it, else float32.",
    )
    device: str = Field(
        "auto", description='`auto` (CUDA if there is one, else CPU), or a torch device such as "cuda:1".'
    )
    layout: Literal["auto", "shared", "packed", "padded"] = Field(
        "auto",
        description="How rollouts are laid out in a forward pass: `shared` computes a group's prompt once, `packed` "
        "puts sequences end to end, `padded` pads them. `auto` takes the first that is exact for the model.",
    )
    activation_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: less memory, about a third more time."
    )
    trust_remote_code: bool = Field(False, description="Run Python code that a model repository ships.")
    lora: LoraConfig | None = Field(None, description="Train low-rank adapters instead of all weights.")


class TaskBase(Section):
    """What every source of prompts has in common."""

    system_prompt: str | None = Field(None, description="System message put before every prompt.")
    template: str = Field(
        "{prompt}",
        description="Text of the user's message; `{prompt}` and any other column can stand in it, `{{` and `}}` are "
        "literal braces.",
    )
    chat_template: bool | None = Field(
        None,
        description="Apply the tokenizer's chat template; default: if it has one. Chat prompts always need one.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Passed to the chat template, for instance `enable_thinking = false`.",
    )
    held_out: int = Field(
        200,
        ge=0,
        description="Questions kept for evaluation and never trained on, told apart by their normalised text; which "
        "ones depends on that text and `run.seed` alone.",
    )


class JsonlTask(TaskBase):
    """Rows of a JSONL file: `prompt` (text or chat messages); other columns go to the reward."""

    kind: Literal["jsonl"]
    path: Path = Field(description="File with one JSON object a line.")
    held_out_path: Path | None = Field(None, description="File to evaluate on; default: `held_out` rows of `path`.")
    prompt_column: str = Field("prompt", description="Column that holds the prompt.")


class DatasetsTask(TaskBase):
    """A Hugging Face dataset (extra `datasets`), by name or path."""

    kind: Literal["datasets"]
    name: str = Field(description="Hub id or local path of the dataset.")
    subset: str | None = Field(None, description="Configuration of the dataset.")
    split: str = Field("train", description="Split to train on.")
    held_out_split: str | None = Field(None, description="Split to evaluate on; default: `held_out` rows of `split`.")
    prompt_column: str = Field("prompt", description="Column that holds the prompt.")


class ReasoningGymTask(TaskBase):
    """A Reasoning Gym generator (extra `reasoning-gym`), scored by its own verifier unless rewards are given."""

    kind: Literal["reasoning_gym"]
    name: str = Field(description="Name of the Reasoning Gym dataset, for instance `chain_sum`.")
    parameters: dict[str, Any] = Field(default_factory=dict, description="Parameters of the generator.")
    size: Positive = Field(4000, description="Questions to generate, duplicates included.")


FUNCTION_PATH = r"^[\w.]+:[\w.]+$"


class FunctionTask(TaskBase):
    """Rows from your own code."""

    kind: Literal["function"]
    function: str = Field(
        pattern=FUNCTION_PATH,
        description="`package.module:function`; called with `parameters`, returns rows (dicts with a `prompt`).",
    )
    parameters: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the function.")
    prompt_column: str = Field("prompt", description="Column that holds the prompt.")


TaskConfig = Annotated[
    JsonlTask | DatasetsTask | ReasoningGymTask | FunctionTask,
    Field(discriminator="kind", description="Where prompts come from."),
]


REWARD_NAMES = ("exact", "last_number", "math", "reasoning_gym", "regex")


class RewardFunctionConfig(Section):
    """One reward function; the reward of a response is the weighted sum of those that apply to it."""

    function: str = Field(
        description="`math`, `exact`, `regex`, `last_number`, `reasoning_gym`, or your own `package.module:function`."
    )
    weight: float = Field(1.0, description="Factor of this reward in the sum.")
    parameters: dict[str, Any] = Field(default_factory=dict, description="Extra keyword arguments of the function.")

    @field_validator("function")
    @classmethod
    def _known(cls, name: str) -> str:
        if name in REWARD_NAMES or re.match(FUNCTION_PATH, name):
            return name
        close = difflib.get_close_matches(name, REWARD_NAMES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"give {', '.join(REWARD_NAMES)} or package.module:function"
        raise ValueError(f"{name!r} is no reward function; {hint}")


class RewardConfig(Section):
    """How responses are scored, and what happens when scoring fails."""

    functions: list[RewardFunctionConfig] = Field(
        default_factory=list,
        description="Reward functions; default: the verifier that the task brings along.",
    )
    time_limit: float = Field(30.0, gt=0, description="Seconds that one call of a reward function may take.")
    max_dropped: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Stop the run when more than this share of a step's rollouts had to be dropped.",
    )
    correct_at: float = Field(1.0, description="A response counts as correct from this reward on (accuracy).")
    truncated: Literal["keep", "mask", "penalize"] = Field(
        "keep",
        description="Responses cut at `max_tokens`: train on them, mask them out of the loss (they stay in the group's "
        "baseline), or subtract `truncated_penalty` from their reward.",
    )
    truncated_penalty: NonNegative = Field(
        0.5, description="Subtracted from a truncated response's reward under `penalize`."
    )


class RolloutConfig(Section):
    """How responses are sampled for training."""

    engine: Literal["transformers"] = Field("transformers", description="Inference engine.")
    prompts: Positive = Field(8, description="Prompts per step (P).")
    group_size: int = Field(8, ge=2, description="Responses per prompt (G).")
    max_tokens: Positive = Field(256, description="Longest response, in tokens.")
    max_concurrent: Positive = Field(64, description="Sequences that the engine generates at a time.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature; log-probs are taken at it.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling. Training refuses values below 1.")
    top_k: int = Field(0, ge=0, description="Sample among the k most likely tokens, 0: all. Training refuses others.")
    min_p: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Drop tokens below this share of the most likely one. Training refuses others.",
    )
    stop: list[str] = Field(default_factory=list, description="Strings that end a response.")
    resample_without_signal: int = Field(
        0,
        ge=0,
        description="Dynamic sampling: how many times a step may replace groups of equal rewards by new prompts.",
    )


class ObjectiveConfig(Section):
    """The loss. `gspo` is the paper's; `grpo` is its control, run by the same code."""

    name: ObjectiveName = Field("gspo", description="Objective, a function of `gspo.objectives`.")
    clip_low: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Ratios below 1 - clip_low are clipped; default: the objective's own (gspo 3e-4, grpo 0.2).",
    )
    clip_high: float | None = Field(
        None,
        gt=0,
        description="Ratios above 1 + clip_high are clipped; default: the objective's own (gspo 4e-4, grpo 0.27).",
    )
    advantage_scale: Literal["std", "none"] = Field(
        "std", description="Divide a group's centred rewards by their standard deviation, or not."
    )
    kl_weight: NonNegative = Field(
        0.0,
        description="Weight of the KL to the frozen starting policy (k3 estimate, mean over tokens). 0: not computed.",
    )


class LikelihoodsConfig(Section):
    """Which log-probs stand in the ratio's denominator."""

    old: Literal["recompute", "sampler"] = Field(
        "recompute",
        description="`recompute`: the training engine scores the responses before the update; `sampler`: those the "
        "inference engine returned, with no scoring pass.",
    )


class RoutingConfig(Section):
    """Routing Replay for Mixture-of-Experts policies."""

    replay: Literal["off", "old", "sampler"] = Field(
        "off",
        description="Experts of the update: the router's own (`off`), those of the old policy (`old`, the paper's "
        "Routing Replay), or those that the inference engine used (`sampler`).",
    )


class OptimizerConfig(Section):
    """AdamW."""

    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="Decay rates of the two moments.")
    epsilon: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: NonNegative = Field(0.0, description="Decoupled weight decay, on matrices only.")
    warmup_updates: int = Field(0, ge=0, description="Updates over which the learning rate rises linearly from 0.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Learning rate after the warm-up."
    )
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are scaled down to this norm.")


class TrainingConfig(Section):
    """The loop."""

    steps: Positive = Field(100, description="Rollout batches to train on.")
    minibatches: Positive = Field(
        4, description="Updates per rollout batch (whole groups each; must divide `rollout.prompts`)."
    )
    epochs: Positive = Field(1, description="Passes over each rollout batch.")
    micro_batch_tokens: Positive = Field(
        8192,
        description="Tokens that one forward and backward pass holds in memory; never visible in the numbers.",
    )


class EvaluationConfig(Section):
    """Accuracy on held-out prompts."""

    every: int = Field(
        0,
        ge=0,
        description="Evaluate after every so many steps; 0: only before the first and after the last.",
    )
    samples: Positive = Field(1, description="Responses per held-out prompt.")
    temperature: NonNegative = Field(0.0, description="0: greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling.")
    top_k: int = Field(0, ge=0, description="Sample among the k most likely tokens, 0: all.")
    min_p: float = Field(0.0, ge=0, lt=1, description="Drop tokens below this share of the most likely one.")


class CheckpointConfig(Section):
    """What is saved, and when."""

    every: int = Field(
        50, ge=0, description="Save after every so many steps; the last step is always saved; 0: only it."
    )
    keep: Positive = Field(2, description="Latest checkpoints kept; the best by held-out accuracy is kept too.")


class TrackingConfig(Section):
    """Where metrics go besides the run folder."""

    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = Field(
        default_factory=list, description="Trackers to report to, each an extra of the package."
    )
    project: str = Field("gspo", description="Project name given to the trackers.")


class Config(Section):
    """All settings of a run."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig
    task: TaskConfig
    reward: RewardConfig = Field(default_factory=RewardConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    likelihoods: LikelihoodsConfig = Field(default_factory=LikelihoodsConfig)
    routing: RoutingConfig = Field(default_factory=RoutingConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)

    @model_validator(mode="after")
    def _combinations(self) -> Config:
        rollout, training = self.rollout, self.training
        if rollout.prompts % training.minibatches:
            raise ValueError(
                f"training.minibatches = {training.minibatches} does not divide rollout.prompts = {rollout.prompts}: "
                "a mini-batch is whole groups; choose a divisor"
            )
        if rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0:
            raise ValueError(
                "rollout.top_p, rollout.top_k and rollout.min_p must be 1, 0 and 0: training on truncated sampling "
                "needs the kept support, which is not carried; they are allowed under [evaluation]"
            )
        if self.routing.replay == "old" and self.likelihoods.old == "sampler":
            raise ValueError(
                'routing.replay = "old" needs likelihoods.old = "recompute": without an old forward there are no old '
                'experts; use routing.replay = "sampler"'
            )
        return self

    def warnings(self) -> list[str]:
        """Settings that can have no effect, one line each."""
        found = []
        if self.training.minibatches == 1 and self.training.epochs == 1 and self.likelihoods.old == "recompute":
            found.append(
                "training.minibatches = 1 and training.epochs = 1: every ratio is 1 by construction and nothing is "
                "ever clipped; use several mini-batches to train off-policy as the paper does"
            )
        if self.reward.truncated != "penalize" and "truncated_penalty" in self.reward.model_fields_set:
            found.append(f'reward.truncated_penalty has no effect with reward.truncated = "{self.reward.truncated}"')
        apart = {"held_out_path", "held_out_split"} & {name for name, value in self.task if value is not None}
        if apart and "held_out" in self.task.model_fields_set:
            found.append(f"task.held_out has no effect with task.{apart.pop()}: all of its questions are held out")
        if self.evaluation.temperature == 0 and self.evaluation.samples > 1:
            found.append("evaluation.samples > 1 with evaluation.temperature = 0: greedy responses are all the same")
        return found


def load_config(path: Path, overrides: Mapping[str, str] | None = None) -> Config:
    """Reads a TOML file, applies `section.key -> text` overrides and validates the whole.

    Raises BadInputError, one line per wrong setting.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInputError(f"{path}: no such file; give the path of a TOML config") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{path}: cannot be read ({error}); give the path of a TOML config") from None
    except tomllib.TOMLDecodeError as error:
        raise BadInputError(f"{path}: not valid TOML: {error}") from None
    return build_config(data, overrides, source=str(path))


def build_config(
    data: Mapping[str, Any], overrides: Mapping[str, str] | None = None, *, source: str = "config"
) -> Config:
    """Validates nested settings (see `load_config`)."""
    merged: dict[str, Any] = json.loads(json.dumps(dict(data), default=str))
    for key, text in (overrides or {}).items():
        _set(merged, key.split("."), _parse_value(text))
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise BadInputError("\n".join(f"{source}: {_explain(e)}" for e in error.errors())) from None


def _set(data: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    for key in keys[:-1]:
        data = data.setdefault(key, {})
        if not isinstance(data, dict):
            raise BadInputError(f"--{'.'.join(keys)}: {key} is a value, not a table of settings")
    data[keys[-1]] = value


def _parse_value(text: str) -> Any:
    """A flag's text as TOML where it is TOML (numbers, lists, booleans), else as a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(error: Any) -> str:
    kinds = {"jsonl", "datasets", "reasoning_gym", "function"}
    location = [str(part) for part in error["loc"] if str(part) not in kinds]
    name = ".".join(location)
    if error["type"] == "extra_forbidden":
        return f"{name}: unknown setting{_nearest(location)}"
    if error["type"] == "missing":
        return f"{name}: missing; give it in the file or as --{name} VALUE"
    message = error["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:] if name else message
    found = "" if error["type"] in ("value_error", "union_tag_not_found") else f" (found {error['input']!r})"
    return f"{name}: {message}{found}" if name else message


def _nearest(location: Sequence[str]) -> str:
    names = [name for name, _ in setting_fields()]
    allowed = names + sorted({name.rpartition(".")[0] for name in names if "." in name})
    close = difflib.get_close_matches(".".join(location), allowed, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else "; see docs/settings.md"


def setting_fields() -> Iterable[tuple[str, Any]]:
    """Every setting as (dotted name, pydantic FieldInfo), in the order of the file."""
    seen: set[str] = set()
    for name, info in _walk(Config, ""):
        if name not in seen:
            seen.add(name)
            yield name, info


def _walk(model: type[BaseModel], prefix: str) -> Iterable[tuple[str, Any]]:
    for name, info in model.model_fields.items():
        nested = _sections(info.annotation)
        optional_or_list = get_origin(info.annotation) is list or type(None) in get_args(info.annotation)
        if not nested or optional_or_list:
            yield prefix + name, info
        for section in nested:
            yield from _walk(section, f"{prefix}{name}.")


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for arg in get_args(annotation) for section in _sections(arg)]
