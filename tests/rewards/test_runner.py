from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gspo.config import RewardConfig, RewardFunctionConfig
from gspo.errors import BadInputError
from gspo.rewards.guard import MAX_LOST
from gspo.rewards.runner import RewardRunner
from gspo.tasks.rows import Row
from gspo.types import FinishReason, Prompt, Rollout

USER_MODULE = """
import json, os, pathlib, sys, time


def length(completions, **columns):
    return [float(len(completion)) for completion in completions]


def picky(completions, answer):
    return [float(completion == expected) for completion, expected in zip(completions, answer)]


def faulty(completions, log=None, **columns):
    if log:
        with open(log, "a") as file:
            file.write(json.dumps(completions) + "\\n")
    rewards = []
    for completion in completions:
        if completion == "raise":
            raise ValueError("no\\nsuch answer")
        if completion == "hang":
            time.sleep(60)
        if completion == "crash":
            os._exit(3)
        if completion == "exit":
            sys.exit("bye")
        if completion == "short":
            continue
        rewards.append({"nan": float("nan"), "inf": float("inf"), "text": "1", "none": None}.get(completion, 1.0))
    return rewards


def process(completions, **columns):
    return [float(os.getpid())] * len(completions)


def has_torch(completions, **columns):
    return [float("torch" in sys.modules)] * len(completions)


def always_short(completions, **columns):
    return [1.0]


def not_a_list(completions, **columns):
    return 1.0


async def later(completions, **columns):
    return [2.0] * len(completions)
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_rewards.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rollout(text: str, content: Any = "q", finish: FinishReason = "stop", **columns: Any) -> Rollout:
    prompt = Prompt("key", content, (1, 2), columns)
    return Rollout(prompt, 0, 0, (7, 8), (-0.5, -0.5), (True, True), finish, (), text)


def row(**columns: Any) -> Row:
    return Row(where="data.jsonl:1", key="key", question="q", content="q", columns=columns)


def config(*functions: str | dict[str, Any], time_limit: float = 20.0) -> RewardConfig:
    entries = [{"function": entry} if isinstance(entry, str) else entry for entry in functions]
    return RewardConfig.model_validate({"functions": entries, "time_limit": time_limit})


def score(runner: RewardRunner, texts: Sequence[str], **columns: Any) -> list[Rollout]:
    with runner:
        return runner.score([rollout(text, **columns) for text in texts])


def test_weighted_sum_skips_what_does_not_apply() -> None:
    def first(completions: list[str], **_: Any) -> list[float | None]:
        return [None if text == "b" else 1.0 for text in completions]

    functions = config(
        {"function": "last_number", "weight": 2.0}, {"function": "regex", "weight": 0.5, "parameters": {"pattern": "b"}}
    )
    with RewardRunner(functions, functions=[first]) as runner:
        assert runner.names == ["last_number", "regex", "first"]
        scored = runner.score([rollout("b 4", answer="4"), rollout("b", answer="none"), rollout("3", answer="4")])
    # Weights: last_number 2, regex 0.5, first 1; None of one function takes no part.
    assert [r.reward for r in scored] == [2 + 0.5 + 1, 0.5, 0 + 0 + 1]
    assert scored[1].rewards == {"last_number": None, "regex": 1.0, "first": None}
    assert all(r.dropped is None for r in scored)


def test_none_from_all_drops() -> None:
    (scored,) = score(RewardRunner(config("exact")), ["x"], answer=None)
    assert scored.reward is None
    assert scored.dropped == "no reward function applies to it (None from all)"


def test_default_is_used_only_without_functions() -> None:
    default = RewardFunctionConfig(function="exact")
    with RewardRunner(config(), default=default) as runner:
        assert runner.names == ["exact"]
    with RewardRunner(config("last_number"), default=default) as runner:
        assert runner.names == ["last_number"]
    with RewardRunner(config(), default=default, functions=[lambda completions: [1.0] * len(completions)]) as runner:
        assert runner.names == ["<lambda>"]
    with pytest.raises(BadInputError, match=r"reward\.functions: none given"):
        RewardRunner(config())


def test_two_of_a_name_are_told_apart() -> None:
    entries = [{"function": "regex", "parameters": {"pattern": pattern}} for pattern in ("a", "b")]
    (scored,) = score(RewardRunner(config(*entries)), ["a"])
    assert scored.rewards == {"regex": 1.0, "regex_2": 0.0}


def test_reward_arguments_are_those_of_trl() -> None:
    calls: list[dict[str, Any]] = []

    def record(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        calls.append({"prompts": prompts, "completions": completions, "ids": completion_ids, **columns})
        return [0.0] * len(prompts)

    messages = [{"role": "user", "content": "2+2="}]
    with RewardRunner(config(), functions=[record]) as runner:
        runner.score([rollout("4", answer="4"), rollout("5", content=messages, level=2)])
    assert calls == [
        {
            "prompts": ["q", messages],
            "completions": ["4", [{"role": "assistant", "content": "5"}]],
            "ids": [[7, 8], [7, 8]],
            "answer": ["4", None],
            "level": [None, 2],
        }
    ]


@pytest.mark.usefixtures("user_module")
def test_functions_are_given_only_what_they_take() -> None:
    scored = score(RewardRunner(config("my_rewards:picky", "my_rewards:later")), ["4"], answer="4", level=2)
    assert scored[0].rewards == {"picky": 1.0, "later": 2.0}


def test_async_callable() -> None:
    async def judge(completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(0)
        return [3.0] * len(completions)

    assert score(RewardRunner(config(), functions=[judge]), ["a", "b"])[1].reward == 3.0


def test_results_of_other_number_types() -> None:
    torch = pytest.importorskip("torch")
    results: list[Any] = [torch.tensor([1.0, 2.0]), [torch.tensor(1.0), True], (1, None)]
    runner = RewardRunner(config(), functions=[lambda completions, r=r: [completions, r][1] for r in results])
    scored = score(runner, ["a", "b"])
    assert [r.reward for r in scored] == [1.0 + 1.0 + 1.0, 2.0 + 1.0]


REASONS = {
    "raise": r"reward faulty: raised ValueError: no such answer at my_rewards\.py:\d+",
    "nan": r"reward faulty: returned nan; rewards must be finite",
    "inf": r"reward faulty: returned inf; rewards must be finite",
    "text": r"reward faulty: returned a str as a reward",
    "short": r"reward faulty: returned 0 rewards for 1 responses",
    "exit": r"reward faulty: raised SystemExit: bye",
    "none": r"no reward function applies",
}


def check_culprits(runner: RewardRunner, bad: dict[str, str]) -> None:
    texts = ["good", *bad, "fine"]
    scored = score(runner, texts)
    assert [r.text for r in scored] == texts
    assert [r.text for r in scored if r.dropped is None] == ["good", "fine"]
    assert all(r.reward == 1.0 for r in scored if r.dropped is None)
    for r in scored[1:-1]:
        assert r.reward is None
        assert r.dropped is not None
        assert re.match(bad[r.text], r.dropped), r.dropped
        assert "\n" not in r.dropped


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize("text", REASONS)
def test_a_bad_rollout_costs_only_itself(text: str) -> None:
    namespace: dict[str, Any] = {}
    exec(compile(USER_MODULE, "my_rewards.py", "exec"), namespace)
    check_culprits(RewardRunner(config(), functions=[namespace["faulty"]]), {text: REASONS[text]})


@pytest.mark.usefixtures("user_module")
def test_bad_rollouts_in_a_worker_cost_only_themselves() -> None:
    bad = {
        **REASONS,
        "hang": r"reward faulty: did not return \(reward\.time_limit\) within 2 s",
        "crash": "reward faulty: its worker process died",
    }
    check_culprits(RewardRunner(config("my_rewards:faulty", time_limit=2.0)), bad)


def test_a_hanging_thread_is_left_behind() -> None:
    def hang(completions: list[str], **_: Any) -> list[float]:
        if "hang" in completions:
            time.sleep(5)
        return [1.0] * len(completions)

    start = time.monotonic()
    scored = score(RewardRunner(config(time_limit=0.3), functions=[hang]), ["a", "hang", "b"])
    assert time.monotonic() - start < 4
    assert [r.reward for r in scored] == [1.0, None, 1.0]
    assert scored[1].dropped == "reward hang: did not return (reward.time_limit) within 0.3 s"


def test_no_rollout_is_sent_a_third_time(user_module: Path) -> None:
    log = user_module / "calls.jsonl"
    entry = {"function": "my_rewards:faulty", "parameters": {"log": str(log)}}
    score(RewardRunner(config(entry)), ["a", "raise", "b"])
    assert log.read_text().splitlines() == ['["a", "raise", "b"]', '["a"]', '["raise"]', '["b"]']


def test_a_function_that_always_hangs_is_given_up() -> None:
    calls: list[int] = []

    def hang(completions: list[str], **_: Any) -> list[float]:
        calls.append(len(completions))
        time.sleep(2)
        return [1.0] * len(completions)

    scored = score(RewardRunner(config(time_limit=0.1), functions=[hang]), ["x"] * 20)
    assert calls == [20] + [1] * MAX_LOST
    assert all(r.reward is None and r.dropped for r in scored)
    assert scored[-1].dropped == f"reward hang: not called: {MAX_LOST} calls in a row before hung or crashed"


def test_dropped_rollouts_are_left_alone() -> None:
    gone = dataclasses.replace(rollout("4", answer="4"), dropped="too many tokens")
    with RewardRunner(config("exact")) as runner:
        scored = runner.score([gone, rollout("4", answer="4"), rollout("4", finish="error", answer="4")])
        assert runner.score([]) == []
        assert runner.score([gone]) == [gone]
    assert scored[0] is gone
    assert scored[1].reward == 1.0


@pytest.mark.usefixtures("user_module")
def test_worker_is_another_process_without_torch_and_stays() -> None:
    with RewardRunner(config("my_rewards:process", "my_rewards:has_torch", "exact")) as runner:
        first, second = (runner.score([rollout("x", answer="x")])[0] for _ in range(2))
    assert first.rewards["process"] == second.rewards["process"] != float(os.getpid())
    assert first.rewards["has_torch"] == 0.0


@pytest.mark.usefixtures("user_module")
def test_validate_accepts_what_works() -> None:
    with RewardRunner(config("my_rewards:picky", "exact", "my_rewards:later")) as runner:
        assert runner.validate([row(answer="4")]) == []
        assert runner.validate(row(answer=str(i)) for i in range(5)) == []


def raises(completions: list[str], **_: Any) -> list[float]:
    raise KeyError(f"no {completions[0]}")


def test_validate_warns_of_a_function_that_raises() -> None:
    with RewardRunner(config(), functions=[raises]) as runner:
        (warning,) = runner.validate([row()])
    assert warning.startswith("reward.functions: raises: raised KeyError: 'no The answer is 0.' at test_runner.py:")


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("no_such_module:f", "importing no_such_module failed"),
        ("my_rewards:missing", "my_rewards has no function 'missing'"),
        ("my_rewards:always_short", "always_short: returned 1 rewards for 2 responses"),
        ("my_rewards:not_a_list", "not_a_list: returned a float; it must return a list"),
        ({"function": "my_rewards:picky"}, "picky: it needs 'answer', which is no column of the data"),
        ({"function": "my_rewards:picky", "parameters": {"x": 1}}, "takes no parameter 'x'; it takes answer"),
        ({"function": "exact", "parameters": {"colum": "x"}}, "exact takes no parameter 'colum'; it takes column"),
        ({"function": "exact", "parameters": {"column": "gold"}}, "exact: no column 'gold' to compare with"),
        ({"function": "regex", "parameters": {"pattern": "("}}, r"regex: pattern = '\(' is no regular expression"),
        ({"function": "regex"}, "regex: it needs 'pattern'"),
        ({"function": "reasoning_gym"}, "reasoning_gym: it needs 'question'"),
    ],
)
def test_validate_refuses(entry: Any, message: str) -> None:
    with RewardRunner(config(entry)) as runner, pytest.raises(BadInputError, match=message) as caught:
        runner.validate([row(level=1)])
    assert "\n" not in str(caught.value)
    assert str(caught.value).count("reward.functions") == 1
    assert "frozen" not in str(caught.value)
    assert "completion_ids" not in str(caught.value)


@pytest.mark.usefixtures("user_module")
def test_validate_refuses_a_function_that_does_not_return() -> None:
    def slow(completions: list[str], **_: Any) -> list[float]:
        time.sleep(2)
        return [1.0] * len(completions)

    message = r"slow: did not return \(reward\.time_limit\) within 0\.1 s"
    with RewardRunner(config(time_limit=0.1), functions=[slow]) as runner, pytest.raises(BadInputError, match=message):
        runner.validate([row()])


def conversation(*turn_rewards: float) -> Rollout:
    messages = (
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "7"},
        {"role": "assistant", "content": "4"},
    )
    return dataclasses.replace(
        rollout("4", answer="4"),
        messages=messages,
        turns=(0, 1),
        turn_rewards=turn_rewards,
    )


def test_the_environments_rewards_come_with_the_rollout() -> None:
    default = RewardFunctionConfig(function="environment")
    with RewardRunner(config(), default=default) as runner:
        assert runner.names == ["environment"]
        assert runner.validate([row()]) == []
        (scored,) = runner.score([conversation(0.25, 0.5)])
    assert (scored.reward, scored.rewards, scored.turn_rewards) == (0.75, {"environment": 0.75}, (0.25, 0.5))


def test_functions_add_to_the_last_turn_and_read_what_the_policy_said_last() -> None:
    seen = []

    def first(completions: list[Any], **_: Any) -> list[float]:
        seen.extend(completions)
        return [8.0] * len(completions)

    entries = config({"function": "environment", "weight": 2.0}, {"function": "exact", "weight": 0.5})
    with RewardRunner(entries, functions=[first]) as runner:
        (scored,) = runner.score([conversation(0.25, 0.5)])
    assert (scored.reward, scored.turn_rewards) == (1.5 + 0.5 + 8.0, (0.5, 1.0 + 0.5 + 8.0))
    assert scored.rewards == {"environment": 0.75, "exact": 1.0, "first": 8.0}
    assert [m["role"] for m in seen[0]] == ["assistant", "user", "assistant"]
    (replaced,) = score(
        RewardRunner(config(), default=RewardFunctionConfig(function="environment"), functions=[first]), ["4"]
    )
    assert replaced.reward == 8.0


def test_a_function_may_judge_every_token() -> None:
    def by_token(completions: list[str], **_: Any) -> list[Any]:
        return [
            {"two": [1.0, 0.5], "one": [1.0], "number": 3.0, "nan": [1.0, float("nan")]}[text] for text in completions
        ]

    def whole(completions: list[str], **_: Any) -> list[float]:
        return [1.0] * len(completions)

    texts = ["two", "one", "number", "nan"]
    found = score(
        RewardRunner(config({"function": "exact", "weight": 2.0}), functions=[by_token, whole]), texts, answer="two"
    )
    assert (found[0].token_rewards, found[0].reward) == ((2 + 1.0 + 1.0, 2 + 0.5 + 1.0), 2 + 0.75 + 1.0)
    assert found[1].dropped == "reward by_token: returned 1 numbers for a response of 2 tokens; it must be one for each"
    assert (found[2].token_rewards, found[2].reward) == (None, 4.0)
    assert "rewards must be finite" in str(found[3].dropped)
    masked = dataclasses.replace(rollout("two", answer=""), trainable=(True, False))
    with RewardRunner(config(), functions=[by_token]) as runner:
        assert runner.score([masked])[0].reward == 1.0
