"""From rows to prompts: the chat template applied once, the ids kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gspo.config import MultiTurnTask, RewardFunctionConfig
from gspo.errors import BadInputError
from gspo.imports import describe
from gspo.tasks.chat import Chat
from gspo.tasks.multi_turn import load_environment
from gspo.tasks.rows import Row, Rows, load_rows
from gspo.tasks.sources import TaskSettings
from gspo.types import Prompt


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts to train on and to evaluate on, with no question in common; `notes` are for the user to read."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    default_reward: RewardFunctionConfig | None = None
    notes: tuple[str, ...] = ()


def load_task(
    config: TaskSettings, tokenizer: Any, *, seed: int, max_prompt_tokens: int, rows: Rows | None = None
) -> Task:
    """The prompts of a task; `rows`, if they were loaded before, are not read again.

    `max_prompt_tokens` is what the context leaves beside the longest response. Raises BadInputError with the row
    that cannot work (too long, empty, refused by the chat template), and for a chat template that cannot carry a
    conversation on.
    """
    found = load_rows(config, seed=seed) if rows is None else rows
    several = isinstance(config, MultiTurnTask)
    notes = make_chat(config, tokenizer).check(found.train[0].content) if several else []
    return Task(
        train=tokenize(found.train, config, tokenizer, max_prompt_tokens),
        held_out=tokenize(found.held_out, config, tokenizer, max_prompt_tokens),
        default_reward=found.default_reward,
        notes=tuple(notes),
    )


def make_chat(config: TaskSettings, tokenizer: Any) -> Chat:
    """How the task's messages become text, its environment's tools included."""
    return Chat(config, tokenizer, load_environment(config).tools if isinstance(config, MultiTurnTask) else ())


def tokenize(rows: Sequence[Row], config: TaskSettings, tokenizer: Any, max_prompt_tokens: int) -> tuple[Prompt, ...]:
    """Prompts with the exact ids that are fed; special tokens come from the chat template, or without one from
    the tokenizer, never from both."""
    if not rows:
        return ()
    chat = make_chat(config, tokenizer)
    texts = [_render(row, chat) if chat.applied else _plain(row) for row in rows]
    encoded = tokenizer(texts, add_special_tokens=not chat.applied, padding=False, truncation=False, verbose=False)
    prompts = []
    for row, ids in zip(rows, encoded["input_ids"], strict=True):
        if not ids:
            raise BadInputError(f"{row.where}: the prompt has no token; give a text, or remove the row")
        if len(ids) > max_prompt_tokens:
            raise BadInputError(
                f"{row.where}: the prompt has {len(ids)} tokens, but only {max_prompt_tokens} fit beside a response of "
                "rollout.max_tokens; shorten or remove the row, or lower rollout.max_tokens"
            )
        prompts.append(Prompt(row.key, row.content, tuple(ids), row.columns))
    return tuple(prompts)


def _plain(row: Row) -> str:
    if not isinstance(row.content, str):
        raise BadInputError(
            f"{row.where}: the prompt is chat messages, but the model's tokenizer has no chat template; give text"
        )
    return row.content


def _render(row: Row, chat: Chat) -> str:
    try:
        return chat.render(chat.opening(row.content))
    except Exception as error:  # noqa: BLE001 (templates raise what they like)
        raise BadInputError(
            f"{row.where}: the model's chat template refuses the prompt ({describe(error)}); "
            "change the roles, task.system_prompt or task.chat_template_kwargs"
        ) from None
