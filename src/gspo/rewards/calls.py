"""One call of a reward function: what it is given, and what it must return.

The signature is the one that TRL's users know (trl 1.16, `GRPOTrainer._calculate_rewards`):
`def reward(prompts, completions, completion_ids, **columns) -> list[float | None]`, plain or async.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from gspo.errors import BadInputError
from gspo.imports import describe, load_function

Arguments = Mapping[str, Sequence[Any]]
"""`prompts`, `completions`, `completion_ids` and every column, each with one entry per rollout."""

RewardFunction = Callable[..., Any]

Value = float | list[float] | None
"""What a reward function says of a response: a number, one number per response token, or None."""

ENVIRONMENT = "environment"
"""The reward that a multi-turn task's environment gives; it comes with the rollout and is not called."""

BUILT_IN = {
    "exact": "gspo.rewards.text:exact",
    "last_number": "gspo.rewards.text:last_number",
    "math": "gspo.rewards.math_verifier:math",
    "reasoning_gym": "gspo.tasks.reasoning_gym:reward",
    "regex": "gspo.rewards.text:regex",
}


class RewardError(Exception):
    """A call gave no usable rewards; the message says why, in one line."""


class MisuseError(RewardError):
    """The function cannot work as it is set up: its path, its parameters, its columns, or the form of its result."""


class LostCallError(RewardError):
    """A call never came back: it hung, or took its process down."""


def as_functions(reward: RewardFunction | Sequence[RewardFunction] | None) -> tuple[RewardFunction, ...]:
    """The reward functions that a caller in Python gave: none, one or several. Raises BadInputError for all else."""
    given: Any = () if reward is None else reward
    functions: tuple[RewardFunction, ...] = (given,) if callable(given) or isinstance(given, str) else tuple(given)
    for function in functions:
        if not callable(function):
            raise BadInputError(
                f"reward: found {function!r}, should be a function, or a list of them; verifiers are named in the "
                "config's reward.functions"
            )
    return functions


def load_reward(name: str, parameters: Mapping[str, Any]) -> RewardFunction:
    """The reward function of that name or import path, with `parameters` bound to it.

    Raises BadInputError if it does not import or does not take the parameters.
    """
    setting = "reward.functions"
    function = load_function(BUILT_IN.get(name, name), setting)
    accepted = _accepted(function, built_in=name in BUILT_IN)
    unknown = [key for key in parameters if accepted is not None and key not in accepted]
    if unknown:
        raise BadInputError(
            f"{setting}: {name} takes no parameter {unknown[0]!r}; it takes "
            f"{', '.join(data_columns(accepted or ())) or 'none'}"
        )
    bound: RewardFunction = functools.partial(function, **parameters) if parameters else function
    return bound


def _accepted(function: RewardFunction, *, built_in: bool) -> list[str] | None:
    """The parameters that a config can give it; None: any. What a verifier of ours takes by `**` are columns alone."""
    parameters = _parameters(function)
    if built_in:
        return [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    return None if _takes_any(parameters) else list(parameters)


def data_columns(names: Iterable[str]) -> list[str]:
    """The names of arguments less those of the responses themselves."""
    return [name for name in names if name not in ("prompts", "completions", "completion_ids")]


def missing_columns(function: RewardFunction, arguments: Arguments) -> list[str]:
    """The arguments that the function cannot do without and that are not there."""
    return [
        name
        for name, parameter in _parameters(function).items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and name not in arguments
    ]


def call_reward(function: RewardFunction, arguments: Arguments) -> list[Value]:
    """Calls the function with the arguments that its signature takes; an async one is run to its end.

    Raises RewardError if it raises, MisuseError if it does not return one number or None per rollout.
    """
    missing = missing_columns(function, arguments)
    if missing:
        raise MisuseError(
            f"it needs {missing[0]!r}, which is no column of the data and not among its parameters; the columns are "
            f"{', '.join(data_columns(arguments)) or 'none'}"
        )
    accepted = _parameters(function)
    # A bound parameter wins over a column of the same name.
    bound = function.keywords if isinstance(function, functools.partial) else {}
    given = {
        name: value
        for name, value in arguments.items()
        if name not in bound and (name in accepted or _takes_any(accepted))
    }
    try:
        result = function(**given)
        if inspect.isawaitable(result):
            result = asyncio.run(_finish(result))
    except BadInputError as error:
        raise MisuseError(str(error)) from None
    except BaseException as error:
        raise RewardError(f"raised {describe(error)}") from error
    return _checked(result, len(arguments["completions"]))


async def _finish(result: Awaitable[Any]) -> Any:
    return await result


def _parameters(function: RewardFunction) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # some functions written in C do not tell; they are given everything
        return {"columns": inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)}


def _takes_any(accepted: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())


def _checked(result: Any, expected: int) -> list[Value]:
    values = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(values, list | tuple):
        raise MisuseError(f"returned a {type(result).__name__}; it must return a list of numbers or None")
    if len(values) != expected:
        raise MisuseError(f"returned {len(values)} rewards for {expected} responses; it must return one for each")
    return [_value(value) for value in values]


def _value(value: Any) -> Value:
    parts = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(parts, list | tuple):
        return _number(value)
    numbers = [_number(part) for part in parts]
    if None in numbers:
        raise MisuseError("returned None for a token; a response's list must hold one number for each of its tokens")
    return [number for number in numbers if number is not None]


def _number(value: Any) -> float | None:
    if value is None:
        return None
    plain = value.item() if hasattr(value, "item") else value
    if not isinstance(plain, int | float):
        raise MisuseError(f"returned a {type(value).__name__} as a reward; it must be a number or None")
    try:
        return float(plain)
    except OverflowError:
        return float("inf")
