"""Questions: read, worded, deduplicated and split, before any tokenizer or model is there."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gspo.config import MultiTurnTask, ReasoningGymTask, RewardFunctionConfig
from gspo.errors import BadInputError, GspoError
from gspo.tasks.sources import Source, TaskSettings, read_held_out, read_train
from gspo.tasks.wording import (
    check_messages,
    fill,
    held_out_rank,
    messages_text,
    normalise,
    question_key,
    template_columns,
)


@dataclass(frozen=True, slots=True)
class Row:
    """One question. `content` is the user's text, or chat messages where the data holds messages.

    `where` names the row in errors, `question` is the normalised text by which rows are compared, `key` a short
    hash of it; `columns` go to the reward functions untouched.
    """

    where: str
    key: str
    question: str
    content: str | list[dict[str, Any]]
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rows:
    """What a task gives: `train` and `held_out` share no question and hold none twice.

    `duplicates` counts the rows left out as repeats, `overlapping` the training rows left out because the
    held-out file or split asks the same; `default_reward` is the verifier that the task brings along.
    """

    train: tuple[Row, ...]
    held_out: tuple[Row, ...]
    duplicates: int = 0
    overlapping: int = 0
    default_reward: RewardFunctionConfig | None = None

    def notes(self) -> list[str]:
        """What a user may not expect of the data, one line each."""
        distinct = len(self.train) + len(self.held_out)
        found = []
        if self.duplicates:
            found.append(
                f"task: {self.duplicates} rows repeat a question and are left out; {distinct} questions remain"
            )
        if self.overlapping:
            found.append(f"task: {self.overlapping} training questions are held out as well and are not trained on")
        return found


def load_rows(config: TaskSettings, *, seed: int) -> Rows:
    """Reads and splits the rows of a task.

    Held out are the `held_out` questions that come first in an order given by their text and `seed`: adding rows
    to the data moves no question from training to evaluation. Raises BadInputError with the row that cannot work.
    """
    default_reward = _default_reward(config)
    apart = read_held_out(config)
    train, duplicates = _distinct(_word(read_train(config, seed), config))
    if apart is not None:
        held_out, repeated = _distinct(_word(apart, config))
        known = {row.question for row in held_out}
        kept = [row for row in train if row.question not in known]
        rows = Rows(tuple(kept), tuple(held_out), duplicates + repeated, len(train) - len(kept), default_reward)
    else:
        rows = _split(train, config.held_out, seed, duplicates, default_reward)
    _check(rows, config)
    return rows


def _default_reward(config: TaskSettings) -> RewardFunctionConfig | None:
    if isinstance(config, MultiTurnTask):
        return RewardFunctionConfig(function="environment")
    if not isinstance(config, ReasoningGymTask):
        return None
    return RewardFunctionConfig(
        function="reasoning_gym", parameters={"dataset": config.name, "dataset_parameters": config.parameters}
    )


def _word(sources: Iterable[Source], config: TaskSettings) -> Iterator[Row]:
    if isinstance(config, MultiTurnTask):
        yield from _word_conversations(sources, config)
        return
    column = "prompt" if isinstance(config, ReasoningGymTask) else config.prompt_column
    for where, columns in sources:
        if column not in columns:
            raise BadInputError(
                f"{where}: no column {column!r}; the columns are {', '.join(map(str, columns)) or 'none'}"
                + ("" if isinstance(config, ReasoningGymTask) else "; set task.prompt_column")
            )
        rest = {name: value for name, value in columns.items() if name != column}
        prompt = columns[column]
        if isinstance(prompt, str):
            question, content = _word_text(prompt, rest, column, where, config.template)
            yield Row(where, question_key(question), question, content, rest)
        else:
            messages = _word_messages(prompt, where, config)
            question = normalise(messages_text(messages))
            yield Row(where, question_key(question), question, messages, rest)


def _word_conversations(sources: Iterable[Source], config: MultiTurnTask) -> Iterator[Row]:
    from gspo.tasks.multi_turn import load_environment, opening

    make = load_environment(config).make
    for source in sources:
        first = opening(config, make, source)
        content = first if isinstance(first, str) else _word_messages(first, source.where, config)
        # What a row asks may come out in later turns only, so that the whole row tells it from others.
        question = normalise(json.dumps(dict(source.columns), sort_keys=True, default=str))
        yield Row(source.where, question_key(question), question, content, source.columns)


def _word_text(prompt: str, rest: Mapping[str, Any], column: str, where: str, template: str) -> tuple[str, str]:
    if not prompt.strip():
        raise BadInputError(f"{where}: the prompt is empty; give a text, or remove the row")
    values = {**rest, column: prompt, "prompt": prompt}
    names = template_columns(template)
    missing = [name for name in names if name not in values]
    if missing or not names:
        raise BadInputError(
            f"task.template: {{{missing[0]}}} is no column of {where}; the columns are {', '.join(values)}; "
            "write {{ and }} for literal braces"
            if missing
            else f"task.template = {template!r}: no column stands in it; put {{prompt}} where the question goes"
        )
    texts = {name: str(values[name]) for name in names}
    # The question is what differs between rows, so that rewording the template keeps the held-out set.
    return normalise("\n".join(texts.values())), fill(template, texts)


def _word_messages(prompt: object, where: str, config: TaskSettings) -> list[dict[str, Any]]:
    messages = check_messages(prompt, where)
    if config.template != "{prompt}":
        raise BadInputError(
            f"{where}: the prompt is chat messages, which task.template = {config.template!r} cannot reword; "
            "give prompts as text, or use task.system_prompt"
        )
    if config.chat_template is False:
        raise BadInputError(
            f"{where}: the prompt is chat messages and task.chat_template is false; give text, or allow the template"
        )
    if config.system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        raise BadInputError(
            f"{where}: the prompt has a system message and task.system_prompt is set as well; keep one of the two"
        )
    return [{"role": "system", "content": config.system_prompt}, *messages]


def _distinct(rows: Iterable[Row]) -> tuple[list[Row], int]:
    """The first row of each question, and how many others there were."""
    first: dict[str, Row] = {}
    total = 0
    for row in rows:
        total += 1
        first.setdefault(row.question, row)
    return list(first.values()), total - len(first)


def _split(
    rows: list[Row], held_out: int, seed: int, duplicates: int, default_reward: RewardFunctionConfig | None
) -> Rows:
    if held_out >= len(rows) > 0:
        raise BadInputError(
            f"task.held_out = {held_out}: there are only {len(rows)} distinct questions "
            f"({duplicates} more are repeats); hold out fewer, or give more rows"
        )
    ranked = sorted(rows, key=lambda row: held_out_rank(row.question, seed))[:held_out]
    chosen = {row.question for row in ranked}
    train = tuple(row for row in rows if row.question not in chosen)
    return Rows(train, tuple(ranked), duplicates, 0, default_reward)


def _check(rows: Rows, config: TaskSettings) -> None:
    if not rows.train and not rows.held_out:
        path = getattr(config, "path", None)
        where = f"the {config.kind} task" if path is None else f"task.path: {path}"
        raise BadInputError(f"{where} has no rows; give at least one to train on and one for each held out")
    if not rows.train:
        raise BadInputError(
            f"task: no question is left to train on ({len(rows.held_out)} held out, {rows.overlapping} of the training "
            f"rows ask the same as those); give more rows to the {config.kind} task"
        )
    train, held_out = {row.key for row in rows.train}, {row.key for row in rows.held_out}
    if train & held_out or len(train) != len(rows.train) or len(held_out) != len(rows.held_out):
        raise GspoError(
            f"{len(train & held_out)} questions stand both in the training and in the held-out set, or two questions "
            "have the same key; the split cannot be trusted"
        )
