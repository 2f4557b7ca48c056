"""Settings of what the policy is asked and how its answers are scored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from gspo.config.section import Name, NonNegative, Positive, Section

REWARD_NAMES = ("environment", "exact", "last_number", "math", "reasoning_gym", "regex")
FUNCTION_PATH = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"


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
    name: Name = Field(description="Hub id or local path of the dataset.")
    subset: str | None = Field(None, description="Configuration of the dataset.")
    split: str = Field("train", description="Split to train on.")
    held_out_split: str | None = Field(None, description="Split to evaluate on; default: `held_out` rows of `split`.")
    prompt_column: str = Field("prompt", description="Column that holds the prompt.")


class ReasoningGymTask(TaskBase):
    """A Reasoning Gym generator (extra `reasoning-gym`), scored by its own verifier unless rewards are given."""

    kind: Literal["reasoning_gym"]
    name: Name = Field(description="Name of the Reasoning Gym dataset, for instance `chain_sum`.")
    parameters: dict[str, Any] = Field(default_factory=dict, description="Parameters of the generator.")
    size: Positive = Field(4000, description="Questions to generate, duplicates included.")


class FunctionTask(TaskBase):
    """Rows from your own code."""

    kind: Literal["function"]
    function: Annotated[str, Field(pattern=FUNCTION_PATH)] = Field(
        description="`package.module:function`; called with `parameters`, returns rows (dicts with a `prompt`)."
    )
    parameters: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the function.")
    prompt_column: str = Field("prompt", description="Column that holds the prompt.")


class MultiTurnTask(TaskBase):
    """Conversations with an environment, your own class; see `docs/multi_turn.md`."""

    kind: Literal["multi_turn"]
    environment: Annotated[str, Field(pattern=FUNCTION_PATH)] = Field(
        description="`package.module:Class` with `reset(row)` and `step(response)`; one instance per rollout."
    )
    parameters: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the class.")
    path: Path | None = Field(
        None, description="JSONL file with the rows that `reset` is given; default: what the class's `rows` returns."
    )
    row_parameters: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the class's `rows`, where `path` is not given."
    )
    max_turns: Positive = Field(
        8, description="Turns of the policy at most; each has up to `rollout.max_tokens` tokens."
    )
    time_limit: float = Field(30.0, gt=0, description="Seconds that one `reset` or `step` may take.")


TaskConfig = Annotated[
    JsonlTask | DatasetsTask | ReasoningGymTask | FunctionTask | MultiTurnTask,
    Field(discriminator="kind", description="Where prompts come from."),
]


class RewardFunctionConfig(Section):
    """One reward function; the reward of a response is the weighted sum of those that apply to it."""

    function: Annotated[str, Field(pattern=f"^({'|'.join(REWARD_NAMES)})$|{FUNCTION_PATH}")] = Field(
        description="`math`, `exact`, `regex`, `last_number`, `reasoning_gym`, `environment` (what a multi-turn task's "
        "environment gave), or your own `package.module:function`."
    )
    weight: float = Field(1.0, description="Factor of this reward in the sum.")
    parameters: dict[str, Any] = Field(default_factory=dict, description="Extra keyword arguments of the function.")


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
