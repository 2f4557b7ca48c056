"""Group Sequence Policy Optimization (arXiv 2507.18071): sequence-level reinforcement learning of language models.

    config = gspo.load_config(Path("config.toml"))
    result = gspo.train(config, reward=my_reward)
    report = gspo.evaluate(result.run)

Importing this package is cheap: torch is loaded when a name that needs it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gspo.errors import BadInputError, GspoError

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gspo.config import Config, build_config, load_config
    from gspo.objectives import (
        ObjectiveOutput,
        Totals,
        group_advantages,
        grpo_loss,
        gspo_loss,
        gspo_token_loss,
        sequence_log_ratio,
        turn_advantages,
    )
    from gspo.training.evaluate_model import evaluate
    from gspo.training.loop import train

_HOME = {
    "Config": "gspo.config",
    "ObjectiveOutput": "gspo.objectives",
    "Totals": "gspo.objectives",
    "build_config": "gspo.config",
    "evaluate": "gspo.training.evaluate_model",
    "group_advantages": "gspo.objectives",
    "grpo_loss": "gspo.objectives",
    "gspo_loss": "gspo.objectives",
    "gspo_token_loss": "gspo.objectives",
    "load_config": "gspo.config",
    "sequence_log_ratio": "gspo.objectives",
    "train": "gspo.training.loop",
    "turn_advantages": "gspo.objectives",
}

__all__ = [
    "BadInputError",
    "Config",
    "GspoError",
    "ObjectiveOutput",
    "Totals",
    "build_config",
    "evaluate",
    "group_advantages",
    "grpo_loss",
    "gspo_loss",
    "gspo_token_loss",
    "load_config",
    "sequence_log_ratio",
    "train",
    "turn_advantages",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gspo' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
