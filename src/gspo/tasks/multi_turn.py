"""Multi-turn tasks: an environment, a plain class of the user's, answers the policy turn by turn.

>>> class Echo:
...     def reset(self, row):
...         return row["question"]
...
...     def step(self, response):
...         return Observation(reward=float(response.text == "4"), done=True)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from gspo.config import MultiTurnTask
from gspo.errors import BadInputError
from gspo.imports import describe, load_function
from gspo.tasks.environment_thread import EnvironmentFailure, EnvironmentThread
from gspo.tasks.sources import Source, as_sources, read_jsonl
from gspo.tasks.wording import check_messages


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the policy wants called."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Response:
    """One turn of the policy: its text without special tokens, the tool calls in it, whether it was cut at the
    token limit (the conversation then ends after this step)."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Observation:
    """What the environment answers: messages for the policy (a text is one user message), the reward of the turn
    just taken, and whether the conversation is over."""

    messages: str | Sequence[Mapping[str, Any]] = ()
    reward: float = 0.0
    done: bool = False


@runtime_checkable
class Environment(Protocol):
    """One conversation. Both methods may be async; all calls of one instance come from one thread.

    A `tools` attribute of the class lists functions that the policy may call, a `rows` method of the class gives
    the rows where the config names no file, and a `close()` is called at the end; all three are optional.
    """

    def reset(self, row: Mapping[str, Any]) -> str | Sequence[Mapping[str, Any]] | Awaitable[Any]:
        """The first messages (a text is one user message): the same for the same row, since a group shares them."""
        ...

    def step(self, response: Response) -> Observation | Awaitable[Observation]:
        """The answer to a turn. An exception ends this rollout, which is then dropped from its group."""
        ...


@dataclass(frozen=True, slots=True)
class Conversation:
    """A multi-turn task's class, ready to be instantiated."""

    make: Callable[[], Environment]
    tools: tuple[Callable[..., Any], ...]


def load_environment(config: MultiTurnTask) -> Conversation:
    """The environment of the config. Raises BadInputError if it does not import, or one cannot be made."""
    setting = f"task.environment = {config.environment!r}"
    found = load_function(config.environment, "task.environment")
    make = functools.partial(found, **config.parameters)
    try:
        environment = make()
    except Exception as error:  # noqa: BLE001 (a stranger's class may raise anything)
        raise BadInputError(
            f"{setting}: making one failed ({describe(error)}); it is called with task.parameters "
            f"({', '.join(config.parameters) or 'none'})"
        ) from None
    for name in ("reset", "step"):
        if not callable(getattr(environment, name, None)):
            raise BadInputError(f"{setting}: it has no method {name}; an environment has reset(row) and step(response)")
    return Conversation(make, tuple(getattr(environment, "tools", ())))


def read_rows(config: MultiTurnTask) -> Iterable[Source]:
    """The rows that `reset` is given: those of the file, or of the class's own `rows`."""
    if config.path is not None:
        return read_jsonl(config.path, "task.path")
    environment = load_function(config.environment, "task.environment")
    rows = getattr(environment, "rows", None)
    if not callable(rows):
        raise BadInputError(
            f"task.environment = {config.environment!r}: it has no `rows` to take rows from; set task.path, or give "
            "the class a static method that returns them"
        )
    call = functools.partial(rows, **config.row_parameters)
    what = f"task.environment = {config.environment!r}: rows"
    return as_sources(call, f"{config.environment}.rows", what, "task.row_parameters")


def opening(config: MultiTurnTask, make: Callable[[], Environment], source: Source) -> str | list[dict[str, Any]]:
    """The first messages of a row's conversation. Raises BadInputError with the row if `reset` fails."""
    thread = EnvironmentThread(make)
    try:
        thread.ask("reset", source.columns)
        return as_opening(thread.answer(config.time_limit), source.where)
    except EnvironmentFailure as error:
        raise BadInputError(f"{source.where}: task.environment = {config.environment!r}: {error}") from None
    finally:
        thread.close()


def as_opening(value: object, where: str) -> str | list[dict[str, Any]]:
    """What `reset` returned, as text or checked chat messages; BadInputError otherwise."""
    if isinstance(value, str) and value.strip():
        return value
    return check_messages(value, where)


def as_observation(value: object) -> Observation:
    """What `step` returned, checked. Raises EnvironmentFailure."""
    if not isinstance(value, Observation):
        raise EnvironmentFailure(f"step returned a {type(value).__name__}; it must return an Observation")
    try:
        finite = math.isfinite(value.reward)
    except TypeError:
        finite = False
    if not finite:
        raise EnvironmentFailure(f"step gave the reward {value.reward!r}; it must be a finite number")
    if not isinstance(value.messages, str):
        for message in value.messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
                raise EnvironmentFailure('step gave a message without "role" and "content"')
    return value
