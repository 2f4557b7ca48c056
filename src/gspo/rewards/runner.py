"""From rollouts to scored rollouts."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from gspo.config import RewardConfig, RewardFunctionConfig
from gspo.errors import BadInputError
from gspo.rewards.callers import Caller, ProcessCaller, ThreadCaller
from gspo.rewards.calls import (
    BUILT_IN,
    ENVIRONMENT,
    Arguments,
    LostCallError,
    MisuseError,
    RewardError,
    RewardFunction,
    Value,
)
from gspo.rewards.guard import Failure, Outcome, score_guarded
from gspo.types import Rollout

TRIAL_TEXT = "The answer is 0."


@runtime_checkable
class Question(Protocol):
    """What a trial call needs of a row or a prompt."""

    @property
    def content(self) -> str | list[dict[str, Any]]:
        """Text, or chat messages."""

    @property
    def columns(self) -> Mapping[str, Any]:
        """What goes to the reward functions."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Scorer:
    name: str
    weight: float
    caller: Caller
    together: bool

    def score(self, arguments: Arguments, seconds: float) -> list[Outcome]:
        return score_guarded(self.caller, arguments, seconds, together=self.together)


class RewardRunner:
    """Calls the reward functions of a run. Close it at the end: worker processes belong to it.

    The functions are those of `config` and, with weight 1, the Python callables `functions`; without either,
    `default` (the task's own verifier). `names` are the keys of `Rollout.rewards`. What an environment gave is the
    sum of a rollout's `turn_rewards`, under the name `environment`.
    """

    def __init__(
        self,
        config: RewardConfig,
        *,
        default: RewardFunctionConfig | None = None,
        functions: Sequence[RewardFunction] = (),
    ) -> None:
        named = list(config.functions) or ([default] if default is not None and not functions else [])
        if not named and not functions:
            raise BadInputError(
                "reward.functions: none given, and this kind of task brings no verifier along; "
                f"give one of {', '.join(BUILT_IN)} or package.module:function"
            )
        self._seconds = config.time_limit
        self._lock = threading.Lock()
        self._scorers: list[_Scorer] = []
        self._environment_weight: float | None = None
        for entry in named:
            if entry.function == ENVIRONMENT:
                self._environment_weight = entry.weight
                continue
            parameters = entry.parameters
            if default is not None and entry.function == default.function:
                parameters = {**default.parameters, **parameters}
            # A built-in verifier judges each rollout alone, so that each has the time limit to itself.
            together = entry.function not in BUILT_IN
            self._add(entry.function, entry.weight, ProcessCaller(entry.function, parameters), together)
        for function in functions:
            self._add(getattr(function, "__name__", type(function).__name__), 1.0, ThreadCaller(function), True)

    @property
    def names(self) -> list[str]:
        """One name per function, in order, none twice."""
        environment = [] if self._environment_weight is None else [ENVIRONMENT]
        return environment + [scorer.name for scorer in self._scorers]

    def validate(self, questions: Iterable[Question]) -> list[str]:
        """Calls every function once on two made-up responses, before a run spends anything.

        Raises BadInputError if a function does not import, lacks a column, does not return in time, or returns
        something other than one number or None per response. Returns what deserves a warning: a function that
        raised (it may do so on a made-up response alone).
        """
        pair = [question for _, question in zip(range(2), questions, strict=False)]
        pair = pair * 2 if len(pair) == 1 else pair
        trial = [TRIAL_TEXT if isinstance(question.content, str) else _assistant(TRIAL_TEXT) for question in pair]
        arguments = _arguments(pair, trial, [[] for _ in pair])
        warnings = []
        for scorer in self._scorers:
            try:
                scorer.caller.call(arguments, self._seconds)
            except (MisuseError, LostCallError) as error:
                reason = str(error).removeprefix("reward.functions: ")
                named = (
                    reason if reason.startswith("reward.functions") else f"reward.functions: {scorer.name}: {reason}"
                )
                raise BadInputError(f"{named} (trial call on two rows)") from None
            except RewardError as error:
                warnings.append(f"reward.functions: {scorer.name}: {error}, in a trial call on a made-up response")
        return warnings

    def score(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts with `reward` (the weighted sum of the functions that apply) and `rewards` (each, unweighted).

        One on which a function failed, or to which none applies, comes back with `dropped` saying why and no
        reward; so does one that the engine gave up. One that was dropped before is left as it is. Never raises for
        what a function does.
        """
        found = [_drop_unfinished(rollout) for rollout in rollouts]
        kept = [rollout for rollout in found if rollout.dropped is None]
        if not kept:
            return found
        arguments = _arguments(
            [rollout.prompt for rollout in kept],
            [_completion(rollout) for rollout in kept],
            [list(rollout.response_ids) for rollout in kept],
        )
        # A worker process answers one call at a time, and two threads may score at once.
        with self._lock, ThreadPoolExecutor(max(len(self._scorers), 1)) as pool:
            columns = list(pool.map(lambda scorer: scorer.score(arguments, self._seconds), self._scorers))
        scored = iter([self._combine(*row) for row in zip(kept, *columns, strict=True)])
        return [next(scored) if rollout.dropped is None else rollout for rollout in found]

    def close(self) -> None:
        """Ends the worker processes."""
        for scorer in self._scorers:
            scorer.caller.close()

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _add(self, path: str, weight: float, caller: Caller, together: bool) -> None:
        base = path.rpartition(":")[2]
        name, number = base, 1
        while name in self.names:
            number += 1
            name = f"{base}_{number}"
        self._scorers.append(_Scorer(name, weight, caller, together))

    def _combine(self, rollout: Rollout, *outcomes: Outcome) -> Rollout:
        failures = [
            f"reward {scorer.name}: {outcome.reason}"
            for scorer, outcome in zip(self._scorers, outcomes, strict=True)
            if isinstance(outcome, Failure)
        ]
        values = {
            scorer.name: outcome
            for scorer, outcome in zip(self._scorers, outcomes, strict=True)
            if not isinstance(outcome, Failure)
        }
        tokens = len(rollout.response_ids)
        failures += [
            f"reward {name}: returned {len(value)} numbers for a response of {tokens} tokens; it must be one for each"
            for name, value in values.items()
            if isinstance(value, list) and len(value) != tokens
        ]
        if failures:
            known = {name: value for name, value in values.items() if not isinstance(value, list)}
            return dataclasses.replace(rollout, reward=None, rewards=known, dropped="; ".join(failures))
        rewards = {name: _mean(value, rollout) if isinstance(value, list) else value for name, value in values.items()}
        applied = [s.weight * value for s in self._scorers if (value := rewards.get(s.name)) is not None]
        turns = self._turn_rewards(rollout, float(sum(applied)))
        if self._environment_weight is not None and rollout.turn_rewards is not None:
            rewards = {ENVIRONMENT: sum(rollout.turn_rewards), **rewards}
            applied.insert(0, self._environment_weight * sum(rollout.turn_rewards))
        total = sum(applied)
        if not applied or not math.isfinite(total):
            unusable = (
                f"its weighted rewards sum to {total}"
                if applied
                else "no reward function applies to it (None from all)"
            )
            return dataclasses.replace(rollout, reward=None, rewards=rewards, dropped=unusable)
        by_token = self._token_rewards(rollout, values)
        return dataclasses.replace(rollout, reward=total, rewards=rewards, turn_rewards=turns, token_rewards=by_token)

    def _turn_rewards(self, rollout: Rollout, last: float) -> tuple[float, ...] | None:
        """The environment's, weighted; what the functions say of the whole is known after the last turn."""
        if not rollout.turn_rewards:
            return rollout.turn_rewards
        turns = [(self._environment_weight or 0.0) * reward for reward in rollout.turn_rewards]
        return (*turns[:-1], turns[-1] + last)

    def _token_rewards(self, rollout: Rollout, values: Mapping[str, Value]) -> tuple[float, ...] | None:
        """The weighted sum of what was said of each token; a number for the whole counts for each of them."""
        if not any(isinstance(value, list) for value in values.values()):
            return None
        totals = [0.0] * len(rollout.response_ids)
        for scorer in self._scorers:
            value = values[scorer.name]
            each = value if isinstance(value, list) else [value or 0.0] * len(totals)
            totals = [total + scorer.weight * number for total, number in zip(totals, each, strict=True)]
        return tuple(totals)


def _mean(values: Sequence[float], rollout: Rollout) -> float:
    """The reward of a response whose tokens were judged: the mean over those that the policy sampled."""
    kept = [value for value, trainable in zip(values, rollout.trainable, strict=True) if trainable]
    return sum(kept) / max(len(kept), 1)


def _completion(rollout: Rollout) -> str | list[dict[str, Any]]:
    """What reward functions are given: a conversation's messages, or the text of a response."""
    if rollout.turns is not None:
        return list(rollout.messages)
    return rollout.text if isinstance(rollout.prompt.content, str) else _assistant(rollout.text)


def _assistant(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def _drop_unfinished(rollout: Rollout) -> Rollout:
    if rollout.finish_reason == "error" and rollout.dropped is None:
        return dataclasses.replace(rollout, dropped="the engine gave it up")
    return rollout


def _arguments(
    questions: Sequence[Question], completions: Sequence[str | list[dict[str, Any]]], ids: Sequence[list[int]]
) -> dict[str, Sequence[Any]]:
    """The columns of all questions (None where one lacks a column), then what names the responses themselves."""
    names = dict.fromkeys(name for question in questions for name in question.columns)
    columns: dict[str, Sequence[Any]] = {name: [q.columns.get(name) for q in questions] for name in names}
    prompts = [question.content for question in questions]
    return {**columns, "prompts": prompts, "completions": completions, "completion_ids": list(ids)}
