"""Environments: loading, rows, threads that may hang."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gspo.config import MultiTurnTask
from gspo.errors import BadInputError
from gspo.tasks.environment_thread import EnvironmentFailure, EnvironmentThread
from gspo.tasks.load import load_task
from gspo.tasks.multi_turn import Observation, Response, as_observation, load_environment
from gspo.tasks.rows import load_rows
from tests.tasks.chat_templates import family_tokenizer

GUESSING = "gspo.tasks.guessing:GuessNumber"


class NotAnEnvironment:
    def reset(self, row: Any) -> str:  # noqa: ARG002
        return "hi"


class BadReset:
    @staticmethod
    def rows() -> list[dict[str, Any]]:
        return [{"n": 1}, {"n": 2}]

    def reset(self, row: Any) -> Any:
        if row["n"] == 2:
            raise ValueError("two is too many")
        return "hi"

    def step(self, response: Response) -> Observation:  # noqa: ARG002
        return Observation(done=True)


def task(environment: str = GUESSING, **settings: Any) -> MultiTurnTask:
    return MultiTurnTask(kind="multi_turn", environment=environment, **{"held_out": 3, **settings})


def test_rows_of_the_same_question_are_told_apart_by_all_their_columns(tmp_path: Path) -> None:
    rows = load_rows(task(row_parameters={"count": 30, "highest": 5}), seed=0)
    assert (len(rows.train), len(rows.held_out)) == (27, 3)
    assert {row.content for row in rows.train} == {"Guess a number from 1 to 5. Answer with the number only.\n"}
    assert rows.default_reward is not None
    assert rows.default_reward.function == "environment"

    path = tmp_path / "games.jsonl"
    path.write_text("".join(json.dumps({"highest": 9, "number": n}) + "\n" for n in (1, 2, 3, 4, 4)))
    rows = load_rows(task(path=path, held_out=1), seed=0)
    assert (len(rows.train) + len(rows.held_out), rows.duplicates) == (4, 1)


def test_prompts_take_the_chat_template_and_the_system_prompt() -> None:
    tokenizer = family_tokenizer("smollm2")
    settings = task(row_parameters={"count": 8, "highest": 5}, system_prompt="Play.")
    found = load_task(settings, tokenizer, seed=0, max_prompt_tokens=1000)
    text = tokenizer.decode(found.train[0].ids)
    assert text.startswith("<|im_start|>system\nPlay.<|im_end|>\n<|im_start|>user\nGuess a number from 1 to 5.")
    assert found.notes == ()
    assert load_task(settings.model_copy(update={"system_prompt": None}), family_tokenizer("qwen3"), seed=0,
                     max_prompt_tokens=1000).notes  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "settings", "message"),
    [
        ("no_such:Thing", {}, "importing no_such failed"),
        (GUESSING, {"parameters": {"bet": 1}}, r"making one failed \(TypeError: .*bet.*task\.parameters \(bet\)"),
        ("tests.tasks.test_multi_turn:NotAnEnvironment", {"path": "x"}, "it has no method step"),
        ("tests.tasks.test_multi_turn:NotAnEnvironment", {}, "it has no `rows` to take rows from; set task.path"),
        (
            "tests.tasks.test_multi_turn:BadReset",
            {},
            r"BadReset\.rows row 1: .*: reset raised ValueError: two is too many",
        ),
        (GUESSING, {"row_parameters": {"count": 5, "size": 2}}, r"rows failed \(TypeError.*task\.row_parameters"),
    ],
)
def test_what_cannot_work_is_said_before_a_run(environment: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        load_rows(task(environment, **settings), seed=0)


def test_the_shipped_tasks_have_what_an_environment_needs() -> None:
    for path in (GUESSING, "gspo.tasks.calculator:Calculator"):
        assert callable(load_environment(task(path)).make().step)
    assert len(load_environment(task("gspo.tasks.calculator:Calculator")).tools) == 1


class Slow:
    """Async, with an object that belongs to one event loop; hangs when told to."""

    def __init__(self) -> None:
        self.lock: asyncio.Lock | None = None
        self.threads: list[int] = []
        self.closed = False

    async def reset(self, row: Any) -> str:
        self.lock = asyncio.Lock()
        self.threads.append(threading.get_ident())
        return str(row)

    async def step(self, what: str) -> Any:
        assert self.lock is not None
        self.threads.append(threading.get_ident())
        if what == "hang":
            await asyncio.sleep(60)
        async with self.lock:
            await asyncio.sleep(0.001)
            return what, len(set(self.threads)), threading.get_ident() != threading.main_thread().ident

    def close(self) -> None:
        self.closed = True


def test_all_calls_of_an_environment_come_from_one_thread_and_one_loop() -> None:
    made: list[Slow] = []
    thread = EnvironmentThread(lambda: made.append(Slow()) or made[-1])
    thread.ask("reset", 5)
    assert thread.answer(10.0) == "5"
    for what in ("a", "b"):
        thread.ask("step", what)
        assert thread.answer(10.0) == (what, 1, True)
    thread.close()
    deadline = time.monotonic() + 10
    while not made[0].closed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert made[0].closed


@pytest.mark.parametrize("error", [ValueError("bad luck"), SystemExit(3), KeyboardInterrupt()])
def test_whatever_an_environment_raises_is_a_failure_of_it_alone(error: BaseException) -> None:
    class Raises:
        def step(self, argument: Any) -> None:  # noqa: ARG002
            raise error

    thread = EnvironmentThread(Raises)
    thread.ask("step", None)
    with pytest.raises(EnvironmentFailure, match=f"step raised {type(error).__name__}"):
        thread.answer(10.0)
    thread.close()


def test_a_call_that_hangs_is_left_behind() -> None:
    thread = EnvironmentThread(Slow)
    thread.ask("reset", 1)
    thread.answer(10.0)
    thread.ask("step", "hang")
    with pytest.raises(EnvironmentFailure, match=r"step did not return within task\.time_limit"):
        thread.answer(0.05)
    thread.close()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"reward": 1}, "returned a dict"),
        (Observation(reward=float("nan")), "the reward nan"),
        (Observation(messages=[{"role": "user"}]), 'a message without "role" and "content"'),
    ],
)
def test_an_observation_is_checked(value: Any, message: str) -> None:
    with pytest.raises(EnvironmentFailure, match=message):
        as_observation(value)
