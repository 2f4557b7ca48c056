"""Built-in verifiers that compare text. Each gives 1 or 0, or None where the row has nothing to compare with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from gspo.errors import BadInputError
from gspo.rewards.calls import data_columns

# A sign counts only where it cannot be a minus between two operands: "5-3" ends in 3, "= -3" in -3.
_NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z.)\]])[+-])?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)


def completion_text(completion: Any) -> str:
    """The text of a completion: a string, or what the assistant said last in its messages."""
    if isinstance(completion, str):
        return completion
    said = [str(message["content"]) for message in completion if message["role"] == "assistant"]
    return said[-1] if said else ""


def expected(columns: Mapping[str, Any], column: str) -> Sequence[Any]:
    """The column that holds the expected answers. Raises BadInputError if the data has no such column."""
    if column not in columns:
        names = ", ".join(data_columns(columns)) or "none"
        raise BadInputError(
            f"reward.functions: no column {column!r} to compare with; the columns are {names}; name one as the "
            "function's parameter `column`"
        )
    values: Sequence[Any] = columns[column]
    return values


def exact(completions: Sequence[Any], *, column: str = "answer", **columns: Any) -> list[float | None]:
    """1 where the whole response equals the expected answer, white space at both ends aside."""
    answers = expected(columns, column)
    return [
        None if answer is None else float(completion_text(completion).strip() == str(answer).strip())
        for completion, answer in zip(completions, answers, strict=True)
    ]


def regex(completions: Sequence[Any], *, pattern: str, column: str | None = None, **columns: Any) -> list[float | None]:
    """1 where the pattern is found in the response.

    With `column`, the last match (its first group, if the pattern has one) must equal the expected answer.
    """
    compiled = compile_pattern(pattern)
    if column is None:
        return [float(compiled.search(completion_text(completion)) is not None) for completion in completions]
    rewards: list[float | None] = []
    for completion, answer in zip(completions, expected(columns, column), strict=True):
        found = None
        for match in compiled.finditer(completion_text(completion)):
            found = match[1] if compiled.groups else match[0]
        equal = found is not None and found.strip() == str(answer).strip()
        rewards.append(None if answer is None else float(equal))
    return rewards


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The compiled pattern. Raises BadInputError if it is none."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise BadInputError(f"reward.functions: pattern = {pattern!r} is no regular expression ({error})") from None


def find_last_number(text: str) -> Decimal | None:
    """The last number in a text: `1,234`, `-3`, `.5`, `2.50`; a minus sign may be the typographic one.

    >>> find_last_number("5-3 makes 2, not −1,000.50."), find_last_number("none")
    (Decimal('-1000.50'), None)
    """
    last = None
    for match in _NUMBER.finditer(text.replace("\u2212", "-")):
        last = match[0]
    return None if last is None else Decimal(last.replace(",", ""))


def last_number(completions: Sequence[Any], *, column: str = "answer", **columns: Any) -> list[float | None]:
    """1 where the last number of the response equals the last number of the expected answer."""
    rewards: list[float | None] = []
    for completion, answer in zip(completions, expected(columns, column), strict=True):
        wanted = find_last_number(str(answer)) if answer is not None else None
        got = find_last_number(completion_text(completion))
        rewards.append(None if wanted is None else float(got is not None and got == wanted))
    return rewards
