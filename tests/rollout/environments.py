"""Environments for tiny models, and an engine that says what it is told to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from gspo.tasks.calculator import Calculator
from gspo.tasks.multi_turn import Observation, Response
from gspo.types import Request, Rollout, Sampling, VersionSpan


class Words:
    """For word-level models: every turn is answered by two words; a turn earns its share of words below `goal`."""

    def __init__(self, turns: int = 3) -> None:
        self._left = turns
        self._goal = 0

    @staticmethod
    def rows(count: int = 12) -> list[dict[str, Any]]:
        return [{"start": f"w{3 + i} w{5 + i} w4", "goal": 20 + i % 7} for i in range(count)]

    def reset(self, row: Mapping[str, Any]) -> str:
        self._goal = row["goal"]
        return str(row["start"])

    def step(self, response: Response) -> Observation:
        self._left -= 1
        words = [int(word[1:]) for word in response.text.split() if word[1:].isdigit()]
        reward = sum(word < self._goal for word in words) / max(len(words), 1)
        return Observation(f" w{10 + self._left} w9", reward=reward, done=self._left == 0)


class Faulty(Words):
    """Fails in the way that its row names; other rows are played."""

    @staticmethod
    def rows(count: int = 0) -> list[dict[str, Any]]:  # noqa: ARG004
        faults = ["none", "raise", "hang", "no_reward", "other_start", "not_an_observation"]
        return [{"start": f"w{3 + n} w5", "goal": 20, "fault": fault} for n, fault in enumerate(faults)]

    _started = 0

    def reset(self, row: Mapping[str, Any]) -> str:
        self._fault = row["fault"]
        Faulty._started += 1
        start = super().reset(row)
        return f"{start} w{10 + Faulty._started % 40}" if self._fault == "other_start" else start

    def step(self, response: Response) -> Observation:
        observation = super().step(response)
        if self._left == 1:
            if self._fault == "raise":
                raise RuntimeError("the board is gone")
            if self._fault == "hang":
                time.sleep(30)
            if self._fault == "no_reward":
                return Observation("w5", reward=float("nan"))
            if self._fault == "not_an_observation":
                return "w5"  # type: ignore[return-value]
        return observation


class TwoNumbers(Calculator):
    """The calculator with questions of one digit."""

    @staticmethod
    def rows(count: int = 20, digits: int = 1, seed: int = 0) -> list[dict[str, Any]]:
        return Calculator.rows(count, digits, seed)


class ScriptedEngine:
    """Says `script(request, sample)`: the ids of a response; log-probs name the turn and the place."""

    def __init__(self, script: Callable[[Request, int], Sequence[int]], decode: Callable[[Sequence[int]], str]) -> None:
        self.script = script
        self.decode = decode
        self.version = 0
        self.requests: list[Request] = []

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        self.requests += requests
        return [
            self._rollout(request, sample, sampling)
            for request in requests
            for sample in range(request.first_sample, request.first_sample + request.samples)
        ]

    def _rollout(self, request: Request, sample: int, sampling: Sampling) -> Rollout:
        ids = tuple(self.script(request, sample))
        ended = bool(ids) and ids[-1] in sampling.eos_ids
        return Rollout(
            prompt=request.prompt,
            slot=request.slot,
            sample=sample,
            response_ids=ids,
            sampler_logprobs=tuple(-1.0 - request.turn - 0.01 * n for n in range(len(ids))),
            trainable=(True,) * len(ids),
            finish_reason="stop" if ended else "length",
            policy_version=(VersionSpan(0, self.version),),
            text=self.decode(ids),
        )

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:  # noqa: ARG002
        self.version = version

    def close(self) -> None:
        pass
