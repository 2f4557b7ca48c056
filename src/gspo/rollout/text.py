"""The text of a response, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gspo.types import FinishReason, Sampling


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of the ids, special tokens left out, spaces as they are."""
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


class StopStrings:
    """Finds the first stop string that a growing response completes, wherever tokens begin and end."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.special = set(tokenizer.all_special_ids) if stop else set()
        # Every other token holds at least a byte of text, so that a stop string completed by the last token lies
        # within as many tokens as it has bytes; the rest is room for a character or a space cut at the edge.
        self.reach = max((len(s.encode()) for s in stop), default=0) + 8

    def cut(self, ids: Sequence[int]) -> str | None:
        """The text before the earliest stop string; None if there is none in the response."""
        if not self.stop or not self._found(decode(self.tokenizer, self._tail(ids))):
            return None
        text = decode(self.tokenizer, ids)
        starts = self._found(text)
        return text[: min(starts)] if starts else None

    def _found(self, text: str) -> list[int]:
        return [at for s in self.stop if (at := text.find(s)) >= 0]

    def _tail(self, ids: Sequence[int]) -> list[int]:
        tail: list[int] = []
        for token in reversed(ids):
            if token not in self.special:
                tail.append(token)
                if len(tail) == self.reach:
                    break
        return tail[::-1]


class Ending:
    """Decides where a growing response ends, and what its text is then."""

    def __init__(self, tokenizer: Any, sampling: Sampling) -> None:
        self.tokenizer = tokenizer
        self.eos = frozenset(sampling.eos_ids)
        self.stops = StopStrings(tokenizer, sampling.stop)

    def judge(self, ids: Sequence[int], limit: int) -> tuple[FinishReason, str] | None:
        """Why the response ends with its last token, and its text; None if it goes on."""
        if ids[-1] in self.eos:
            return "stop", decode(self.tokenizer, ids[:-1])
        if (text := self.stops.cut(ids)) is not None:
            return "stop", text
        return ("length", decode(self.tokenizer, ids)) if len(ids) >= limit else None
