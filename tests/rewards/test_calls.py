"""What a reward function is given."""

from __future__ import annotations

from gspo.rewards.calls import call_reward, load_reward


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
