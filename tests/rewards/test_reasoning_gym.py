from __future__ import annotations

from typing import Any

import pytest

from gspo.config import ReasoningGymTask, RewardConfig
from gspo.rewards.runner import RewardRunner
from gspo.tasks.reasoning_gym import answer_in, reward
from gspo.tasks.rows import Row, load_rows
from gspo.types import Prompt, Rollout

pytest.importorskip("reasoning_gym")


def test_answer_in() -> None:
    assert answer_in(" 4\n") == "4"
    assert answer_in("<answer>3</answer> no: <answer>\n4 </answer>.") == "4"
    assert answer_in("<answer>4") == "<answer>4"


def test_score_is_the_datasets_own() -> None:
    # Countdown has many right answers: only its own verifier knows them all.
    columns: dict[str, Any] = {
        "question": ["q"] * 3,
        "answer": ["3 + 4"] * 3,
        "metadata": [{"numbers": [3, 4], "target": 7}] * 3,
    }
    completions = ["4 + 3", "<answer>3 + 4</answer>", "3 * 4"]
    scores = reward(completions, **columns, dataset="countdown", dataset_parameters={})
    assert scores[:2] == [1.0, 1.0]
    assert scores[2] is not None
    assert scores[2] < 1.0


def test_the_task_brings_its_verifier() -> None:
    task = ReasoningGymTask(kind="reasoning_gym", name="chain_sum", size=20, held_out=1)
    rows = load_rows(task, seed=0)

    def rollout(row: Row, text: str) -> Rollout:
        prompt = Prompt(row.key, row.content, (1,), row.columns)
        return Rollout(prompt, 0, 0, (1,), (0.0,), (True,), "stop", (), text)

    # Named without parameters, it scores with those of the task.
    config = RewardConfig.model_validate({"functions": [{"function": "reasoning_gym"}]})
    with RewardRunner(config, default=rows.default_reward) as runner:
        assert runner.validate(rows.train) == []
        first, second = rows.train[:2]
        right = rollout(first, f"<answer>{first.columns['answer']}</answer>")
        scored = runner.score([right, rollout(second, "<answer>x</answer>")])
    assert scored[0].reward == 1.0
    assert scored[1].reward is not None
    assert scored[1].reward < 1.0
