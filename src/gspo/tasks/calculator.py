"""Arithmetic with a tool: the model calls a calculator, reads the result and answers."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from gspo.tasks.multi_turn import Observation, Response
from gspo.tasks.tools import run_tools

_OPERATORS = {"+": "plus", "-": "minus", "*": "times"}
_NUMBER = r"-?\d+(?:\.\d+)?"
_EXPRESSION = re.compile(rf"\s*({_NUMBER})\s*([-+*])\s*({_NUMBER})\s*")


def calculate(expression: str) -> str:
    """Computes a sum, a difference or a product of two numbers.

    Args:
        expression: What to compute, such as 12 * 34
    """
    found = _EXPRESSION.fullmatch(expression)
    if found is None:
        raise ValueError("the expression must be two numbers with +, - or * between them")
    first, second = Decimal(found[1]), Decimal(found[3])
    result = {"+": first + second, "-": first - second, "*": first * second}[found[2]]
    return f"{result:f}"


class Calculator:
    """One sum, difference or product. A turn whose call is answered without an error earns `call_reward`, once; the
    right last number in a turn without a call earns 1 and ends the conversation, right or wrong. With `example` the
    conversation begins with a solved question, without which a small model never calls."""

    tools = (calculate,)

    def __init__(self, call_reward: float = 0.2, example: bool = True) -> None:
        self._call_reward = call_reward
        self._example = example
        self._answer = Decimal(0)

    @staticmethod
    def rows(count: int = 1000, digits: int = 2, seed: int = 0) -> list[dict[str, Any]]:
        """Questions with numbers of up to `digits` digits."""
        numbers = random.Random(seed)
        rows = []
        for _ in range(count):
            first, second = numbers.randrange(10**digits), numbers.randrange(10**digits)
            operator = numbers.choice(list(_OPERATORS))
            question = f"What is {first} {_OPERATORS[operator]} {second}?"
            rows.append({"question": question, "answer": calculate(f"{first} {operator} {second}")})
        return rows

    def reset(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The first messages."""
        self._answer = Decimal(row["answer"])
        return [*(_example() if self._example else ()), _asked(row["question"])]

    def step(self, response: Response) -> Observation:
        """Runs the calls of a turn, or judges the answer."""
        if not response.calls:
            return Observation(reward=float(self._is_right(response.text)), done=True)
        results = run_tools(response.calls, self.tools)
        reward, failed = self._call_reward, any(result["content"].startswith("error") for result in results)
        if not failed:
            self._call_reward = 0.0
        return Observation(results, reward=0.0 if failed else reward)

    def _is_right(self, text: str) -> bool:
        numbers = re.findall(_NUMBER, text)
        return bool(numbers) and Decimal(numbers[-1]) == self._answer


def _asked(question: str) -> dict[str, Any]:
    return {"role": "user", "content": f"{question} Call the calculator, then answer with the result only."}


def _example() -> list[dict[str, Any]]:
    function = {"name": calculate.__name__, "arguments": {"expression": "30 + 4"}}
    call = {"id": "call00000", "type": "function", "function": function}
    return [
        _asked("What is 30 plus 4?"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": calculate.__name__, "tool_call_id": "call00000", "content": calculate("30 + 4")},
        {"role": "assistant", "content": "34"},
    ]
