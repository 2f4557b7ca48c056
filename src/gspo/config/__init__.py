"""Every setting, validated before anything heavy loads. TOML in, JSON out.

Precedence: defaults < file < flags (`--section.key value`). Nothing here imports torch or transformers, so that
a wrong setting is reported at once.
"""

from gspo.config.data import (
    FUNCTION_PATH,
    REWARD_NAMES,
    DatasetsTask,
    FunctionTask,
    JsonlTask,
    MultiTurnTask,
    ReasoningGymTask,
    RewardConfig,
    RewardFunctionConfig,
    TaskBase,
    TaskConfig,
)
from gspo.config.distributed import DistributedConfig
from gspo.config.loading import build_config, load_config, read_settings
from gspo.config.model import LoraConfig, ModelConfig
from gspo.config.schema import (
    CheckpointConfig,
    Config,
    EvaluationConfig,
    LikelihoodsConfig,
    ObjectiveConfig,
    ObjectiveName,
    OptimizerConfig,
    RolloutConfig,
    RoutingConfig,
    RunConfig,
    TrackingConfig,
    TrainingConfig,
)

__all__ = [
    "FUNCTION_PATH",
    "REWARD_NAMES",
    "CheckpointConfig",
    "Config",
    "DatasetsTask",
    "DistributedConfig",
    "EvaluationConfig",
    "FunctionTask",
    "JsonlTask",
    "LikelihoodsConfig",
    "LoraConfig",
    "ModelConfig",
    "MultiTurnTask",
    "ObjectiveConfig",
    "ObjectiveName",
    "OptimizerConfig",
    "ReasoningGymTask",
    "RewardConfig",
    "RewardFunctionConfig",
    "RolloutConfig",
    "RoutingConfig",
    "RunConfig",
    "TaskBase",
    "TaskConfig",
    "TrackingConfig",
    "TrainingConfig",
    "build_config",
    "load_config",
    "read_settings",
]
