from __future__ import annotations

from typing import Any

import pytest

from gspo.config import RewardConfig
from gspo.errors import BadInputError
from gspo.rewards.math_verifier import math
from gspo.rewards.runner import RewardRunner
from gspo.types import Prompt, Rollout

pytest.importorskip("math_verify")


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("1/2", "so it is $\\frac{1}{2}$", 1.0),
        ("\\frac{1}{2}", "The answer is \\boxed{0.5}.", 1.0),
        ("$\\sqrt{8}$", "\\boxed{2\\sqrt{2}}", 1.0),
        ("x^2+1", "\\boxed{1+x^2}", 1.0),
        ("\\{1, 2\\}", "\\boxed{\\{2, 1\\}}", 1.0),
        ("1,234", "It is 1234", 1.0),
        ("He has 3 + 4 = 7 left.\n#### 7", "The answer is 7.", 1.0),
        (-3, "= $-3$", 1.0),
        ("12", "so 13.", 0.0),
        ("12", "", 0.0),
        ("12", "I do not know", 0.0),
        ("", "12", None),
        (None, "12", None),
    ],
)
def test_math(answer: Any, response: str, reward: float | None) -> None:
    assert math([response], answer=[answer]) == [reward]


def test_math_takes_chat_completions_and_another_column() -> None:
    chat = [{"role": "assistant", "content": "\\boxed{4}"}]
    assert math([chat], column="solution", solution=["4"]) == [1.0]
    with pytest.raises(BadInputError, match="no column 'answer'"):
        math([chat], solution=["4"])


def test_an_endless_computation_counts_as_wrong_in_a_worker() -> None:
    prompt = Prompt("k", "q", (1,), {"answer": "3"})
    texts = ["\\boxed{9^{9^{9^9}}}", "\\boxed{3}"]
    rollouts = [Rollout(prompt, 0, i, (1,), (0.0,), (True,), "stop", (), text) for i, text in enumerate(texts)]
    config = RewardConfig.model_validate({"functions": [{"function": "math"}], "time_limit": 60})
    with RewardRunner(config) as runner:
        assert [(r.reward, r.dropped) for r in runner.score(rollouts)] == [(0.0, None), (1.0, None)]
