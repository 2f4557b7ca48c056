"""The order of training: every prompt once an epoch, shuffled, the same after a resume."""

from __future__ import annotations

import random
from collections.abc import Sequence

from gspo.types import Prompt


class PromptStream:
    """Endless epochs of shuffled prompts, a pure function of (prompts, seed, cursor).

    `cursor` counts the places passed since the start (epoch = cursor // len(prompts)); setting it is all that a
    resume needs.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, cursor: int = 0) -> None:
        if not prompts:
            raise ValueError("prompts: none were given; a stream needs at least one")
        self.cursor = cursor
        self._prompts = prompts
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts; none twice unless there are fewer than `n`.

        Where a take spans two epochs, a prompt that the first has just given is passed over in the second.
        """
        taken: list[Prompt] = []
        seen: set[int] = set()
        while len(taken) < n:
            if len(seen) == len(self._prompts):
                seen.clear()
            index = self._at(self.cursor)
            self.cursor += 1
            if index not in seen:
                seen.add(index)
                taken.append(self._prompts[index])
        return taken

    def _at(self, cursor: int) -> int:
        epoch, place = divmod(cursor, len(self._prompts))
        if epoch != self._epoch:
            # random() alone is promised to give the same numbers in every version of Python.
            noise = random.Random(f"{self._seed}/{epoch}")
            keys = [noise.random() for _ in self._prompts]
            self._epoch, self._order = epoch, sorted(range(len(keys)), key=keys.__getitem__)
        return self._order[place]
