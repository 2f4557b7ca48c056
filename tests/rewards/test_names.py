from __future__ import annotations

import pytest

from gspo.config import REWARD_NAMES, RewardFunctionConfig
from gspo.rewards.calls import BUILT_IN


def test_names_in_the_config_are_the_built_in_functions() -> None:
    assert set(REWARD_NAMES) == set(BUILT_IN)


def test_config_refuses_unknown_names() -> None:
    with pytest.raises(ValueError, match="did you mean last_number"):
        RewardFunctionConfig(function="lastnumber")
    with pytest.raises(ValueError, match=r"package\.module:function"):
        RewardFunctionConfig(function="my.module.reward")
