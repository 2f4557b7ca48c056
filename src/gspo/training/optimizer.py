"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from gspo.config import OptimizerConfig


def make_optimizer(parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; weight decay acts on matrices, not on biases and norms."""
    trainable = [parameter for _, parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        fused=True,
    )


def learning_rate(config: OptimizerConfig, update: int, total_updates: int) -> float:
    """The rate of update number `update` (from 0): linear warm-up, then constant, or down to 0 at `total_updates`."""
    if update < config.warmup_updates:
        return config.learning_rate * (update + 1) / config.warmup_updates
    progress = (update - config.warmup_updates) / max(1, total_updates - config.warmup_updates)
    match config.schedule:
        case "constant":
            factor = 1.0
        case "linear":
            factor = 1.0 - progress
        case "cosine":
            factor = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate * factor


def optimizer_tensors(optimizer: torch.optim.AdamW, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """The optimizer's state as flat named tensors: `<parameter>.<step | exp_avg | exp_avg_sq>`."""
    return {
        f"{names[parameter]}.{key}": value.detach()
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def load_optimizer_tensors(
    optimizer: torch.optim.AdamW, names: Mapping[Tensor, str], tensors: dict[str, Tensor]
) -> None:
    """Puts back what `optimizer_tensors` took."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            prefix = names[parameter]
            state = {
                key: tensors[f"{prefix}.{key}"]
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"{prefix}.{key}" in tensors
            }
            if state:
                optimizer.state[parameter] = {key: value.to(parameter.device).clone() for key, value in state.items()}
