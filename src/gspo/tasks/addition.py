"""Addition with worked answers: a task that a model of a million parameters learns in minutes.

    prompt    347+85=
    response  75:12 48:13 30:4 #432

One step a column from the right: the two digits, then their sum with the carry that came in; after `#` the
answer, which is also the last number of the text. Problems are split for good by a hash of their text, so
that what the cold start saw, what reinforcement trains on and what is held out never meet.
"""

from __future__ import annotations

import random
import zlib
from typing import Literal

Split = Literal["cold_start", "train", "held_out"]

ALPHABET = "0123456789+=: #"
_BUCKETS: dict[str, range] = {"held_out": range(1), "cold_start": range(1, 6), "train": range(6, 11)}


def problems(
    count: int = 4000, seed: int = 0, split: Split = "train", min_digits: int = 2, max_digits: int = 6
) -> list[dict[str, str]]:
    """`count` random problems of a split, as rows for `gspo train` (`task.kind = "function"`).

    Each row has the `prompt`, the `answer` and the `worked` response that ends in it. The digits of either
    number are drawn uniformly from `min_digits` to `max_digits`; repeats are possible where few problems exist.

    >>> problems(1, seed=3)[0]
    {'prompt': '31423+674=', 'answer': '32097', 'worked': '34:7 27:9 46:10 10:2 30:3 #32097'}
    """
    draw = random.Random(f"{split}:{seed}")
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        first, second = (_number(draw, draw.randint(min_digits, max_digits)) for _ in range(2))
        prompt = f"{first}+{second}="
        if zlib.crc32(prompt.encode()) % 11 in _BUCKETS[split]:
            rows.append({"prompt": prompt, "answer": str(first + second), "worked": work(first, second)})
    return rows


def work(first: int, second: int) -> str:
    """The worked response to `first+second=`.

    >>> work(347, 85)
    '75:12 48:13 30:4 #432'
    """
    steps, carry, width = [], 0, max(len(str(first)), len(str(second)))
    for place in range(width):
        one, two = first // 10**place % 10, second // 10**place % 10
        total = one + two + carry
        steps.append(f"{one}{two}:{total}")
        carry = total // 10
    return " ".join([*steps, f"#{first + second}"])


def _number(draw: random.Random, digits: int) -> int:
    return draw.randint(10 ** (digits - 1), 10**digits - 1)
