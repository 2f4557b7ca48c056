"""A game with a reward for every turn: find a hidden number, told after each guess whether it is higher or lower."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from gspo.tasks.multi_turn import Observation, Response


class GuessNumber:
    """A turn earns 1 for the number, which ends the game, `consistent` for another number that the answers so far
    allow, and 0 for anything else."""

    def __init__(self, consistent: float = 0.2) -> None:
        self._consistent = consistent
        self._low = self._high = self._number = 0

    @staticmethod
    def rows(count: int = 400, highest: int = 9, seed: int = 0) -> list[dict[str, Any]]:
        """Numbers from 1 to `highest` to find; the number of the game tells rows of the same number apart."""
        numbers = random.Random(seed)
        return [{"game": game, "highest": highest, "number": numbers.randint(1, highest)} for game in range(count)]

    def reset(self, row: Mapping[str, Any]) -> str:
        """The first message."""
        self._low, self._high, self._number = 1, row["highest"], row["number"]
        return f"Guess a number from {self._low} to {self._high}. Answer with the number only.\n"

    def step(self, response: Response) -> Observation:
        """Judges a guess: the first number in the response."""
        found = re.search(r"\d+", response.text)
        if found is None:
            return Observation("Not a number.\n")
        guess = int(found[0])
        if guess == self._number:
            return Observation(reward=1.0, done=True)
        allowed = self._low <= guess <= self._high
        if allowed and guess < self._number:
            self._low = guess + 1
        elif allowed:
            self._high = guess - 1
        hint = "Higher.\n" if guess < self._number else "Lower.\n"
        return Observation(hint, reward=self._consistent if allowed else 0.0)
