from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.errors import BadInputError
from gspo.rewards.text import completion_text, exact, find_last_number, last_number, regex


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 12.", "12"),
        ("5-3", "3"),
        ("so 5 - 3 = -2", "-2"),
        ("= −4", "-4"),
        ("(3)-4", "4"),
        ("it costs $1,234,567.50!", "1234567.50"),
        ("1, 2, 3", "3"),
        ("1,2", "2"),
        (".5", "0.5"),
        ("-.25", "-0.25"),
        ("+7", "7"),
        ("**-8**", "-8"),
        ("\\boxed{-9}", "-9"),
        ("007", "7"),
        ("#### 42\n", "42"),
    ],
)
def test_find_last_number(text: str, number: str) -> None:
    assert find_last_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "none", "-", "٣", "."])
def test_no_number(text: str) -> None:
    assert find_last_number(text) is None


@given(st.integers(), st.text(alphabet="abc .!\n"), st.text(alphabet="abc !\n"))
def test_last_number_finds_any_integer(number: int, before: str, after: str) -> None:
    assert find_last_number(f"{before}= {number}{after}") == number
    assert find_last_number(f"{before}= {number:,}{after}") == number


@given(st.text(max_size=40))
def test_last_number_takes_any_text(text: str) -> None:
    assert last_number([text], answer=["1"])[0] in (0.0, 1.0)


def test_last_number_compares_values() -> None:
    completions = ["It is 3.50", "2", "no number", "1,000", "5"]
    answers: list[Any] = ["3.5", 3, 4, "#### 1000", "unknown"]
    assert last_number(completions, answer=answers) == [1.0, 0.0, 0.0, 1.0, None]
    assert last_number(["1"], column="gold", gold=[1]) == [1.0]


def test_exact_ignores_white_space_around() -> None:
    assert exact([" yes\n", "Yes", "no"], answer=["yes", "yes", None]) == [1.0, 0.0, None]


def test_regex_searches_or_compares() -> None:
    assert regex(["<a>1</a>", "1"], pattern=r"<a>.*</a>") == [1.0, 0.0]
    completions = ["a=1 a=2", "a=2 a=1", "b", "a=2"]
    columns = {"answer": ["2", 2, "2", None]}
    assert regex(completions, pattern=r"a=(\d)", column="answer", **columns) == [1.0, 0.0, 0.0, None]
    assert regex(["x 2"], pattern=r"\d", column="answer", answer=["2"]) == [1.0]
    # A group that took no part in the match is no answer.
    assert regex(["b"], pattern=r"a=(\d)|b", column="answer", answer=["None"]) == [0.0]


def test_conversational_completions() -> None:
    chat = [{"role": "assistant", "content": "The answer is 4"}]
    assert completion_text(chat) == "The answer is 4"
    assert last_number([chat], answer=["4"]) == [1.0]


def test_bad_input() -> None:
    for function in (exact, last_number):
        with pytest.raises(BadInputError, match="no column 'answer' to compare with; the columns are solution"):
            function(["1"], solution=["1"])
    with pytest.raises(BadInputError, match="is no regular expression"):
        regex(["1"], pattern="(")
