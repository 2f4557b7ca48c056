"""What a reward function is given."""

from __future__ import annotations

import inspect

import pytest

from gspo.errors import BadInputError
from gspo.rewards.calls import as_functions, call_reward, load_reward


def test_a_parameter_of_the_config_wins_over_a_column_of_the_same_name() -> None:
    exact = load_reward("exact", {"column": "gold"})
    arguments = {
        "prompts": ["p"] * 2,
        "completions": ["4", "5"],
        "completion_ids": [[1]] * 2,
        "gold": ["4", "4"],
        "column": ["silver"] * 2,
        "silver": ["5", "5"],
    }
    assert call_reward(exact, arguments) == [1.0, 0.0]


def test_rewards_given_in_python_are_functions() -> None:
    assert as_functions(None) == ()
    assert as_functions(len) == (len,)
    assert as_functions([len, max]) == (len, max)
    for wrong in ("exact", [len, "exact"]):
        with pytest.raises(BadInputError, match=r"^reward: found 'exact', should be a function"):
            # Past the check of types, which users do not have.
            inspect.unwrap(as_functions)(wrong)
