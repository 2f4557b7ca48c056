from __future__ import annotations

import pytest

from gspo.config import REWARD_NAMES, RewardFunctionConfig
from gspo.rewards.calls import BUILT_IN, ENVIRONMENT


def test_names_in_the_config_are_the_built_in_functions() -> None:
    assert set(REWARD_NAMES) == {*BUILT_IN, ENVIRONMENT}


@pytest.mark.parametrize("name", ["lastnumber", "my.module.reward", "my.module:"])
def test_config_refuses_unknown_names(name: str) -> None:
    with pytest.raises(ValueError, match="function"):
        RewardFunctionConfig(function=name)
