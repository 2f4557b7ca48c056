"""How a failing reward function is kept from costing more than the rollouts that it fails on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gspo.rewards.callers import Caller
from gspo.rewards.calls import Arguments, LostCallError, RewardError, Value

MAX_LOST = 4
"""Calls in a row that may hang or crash before the rest of a batch is given up."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rollout has no reward from a function."""

    reason: str


Outcome = Value | Failure


def score_guarded(caller: Caller, arguments: Arguments, seconds: float, *, together: bool) -> list[Outcome]:
    """One outcome per rollout, whatever the function does.

    `together`: all rollouts go into one call, and only if it fails does each go once more, by itself, so that the
    one at fault costs only itself; no rollout is sent a third time. Otherwise each goes by itself at once.
    """
    if together:
        try:
            return _finite(caller.call(arguments, seconds))
        except RewardError as error:
            if len(arguments["completions"]) == 1:
                return [Failure(str(error))]
    return _one_by_one(caller, arguments, seconds)


def _one_by_one(caller: Caller, arguments: Arguments, seconds: float) -> list[Outcome]:
    outcomes: list[Outcome] = []
    lost = 0
    for index in range(len(arguments["completions"])):
        if lost >= MAX_LOST:
            outcomes.append(Failure(f"not called: {lost} calls in a row before hung or crashed"))
            continue
        try:
            outcomes += _finite(caller.call(_single(arguments, index), seconds))
            lost = 0
        except RewardError as error:
            lost = lost + 1 if isinstance(error, LostCallError) else 0
            outcomes.append(Failure(str(error)))
    return outcomes


def _single(arguments: Arguments, index: int) -> dict[str, Sequence[object]]:
    return {name: values[index : index + 1] for name, values in arguments.items()}


def _finite(values: Sequence[Value]) -> list[Outcome]:
    return [
        value if all(map(math.isfinite, _numbers(value))) else Failure(f"returned {value}; rewards must be finite")
        for value in values
    ]


def _numbers(value: Value) -> list[float]:
    return [] if value is None else value if isinstance(value, list) else [value]
