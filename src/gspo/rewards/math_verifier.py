"""Mathematical equality, by math-verify. Nobody else imports `math_verify`.

math-verify limits its time with SIGALRM, which works in the main thread alone: this runs in a worker process.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

from gspo.errors import BadInputError
from gspo.rewards.text import completion_text, expected

_DELIMITERS = ("$", "\\(", "\\[", "\\boxed", "\\begin")


def math(completions: Sequence[Any], *, column: str = "answer", **columns: Any) -> list[float | None]:
    """1 where the response's final expression equals the expected one mathematically (LaTeX or plain).

    None where the expected answer is missing or holds no expression. A response that math-verify cannot parse or
    compare within its own limits counts as wrong.
    """
    verifier = _verifier()
    return [
        _compare(verifier, completion_text(completion), answer)
        for completion, answer in zip(completions, expected(columns, column), strict=True)
    ]


def _compare(verifier: Any, text: str, answer: Any) -> float | None:
    gold = _parse_gold(verifier, str(answer)) if answer is not None else []
    if not gold:
        return None
    return float(verifier.verify(gold, verifier.parse(text)))


def _parse_gold(verifier: Any, answer: str) -> Any:
    """An expected answer without delimiters is one expression; without them math-verify would look for fragments."""
    bare = answer.strip()
    if any(mark in bare for mark in _DELIMITERS) or "\n" in bare:
        return verifier.parse(bare)
    return verifier.parse(f"${bare}$") or verifier.parse(bare)


@functools.cache
def _verifier() -> Any:
    try:
        import math_verify
    except ImportError:
        raise BadInputError(
            'reward.functions: math needs the extra `math-verify`: pip install "gspo[math-verify]"'
        ) from None
    # Its warnings quote the responses that it could not parse, one a line, and most early ones are such.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return math_verify
