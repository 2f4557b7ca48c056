"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from gspo.config import OptimizerConfig
from gspo.distributed.sharding import local, whole

STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of a parameter: the number of its updates, and two moments of its shape."""


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


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> float:
    """Scales gradients down to `max_norm` and returns the norm they had, over all processes of a sharded policy."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return float(whole(norm))


def optimizer_tensors(optimizer: torch.optim.AdamW, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """The optimizer's state as flat named tensors: `<parameter>.<step | exp_avg | exp_avg_sq>`.

    Of a sharded parameter it is this process's rows.
    """
    return {
        f"{names[parameter]}.{key}": local(value.detach())
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def load_optimizer_tensors(
    optimizer: torch.optim.AdamW, names: Mapping[Tensor, str], tensors: Mapping[str, Tensor]
) -> None:
    """Puts back what `optimizer_tensors` took; `tensors` has the rows of each parameter that this process holds."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            prefix = names[parameter]
            state = {
                key: _placed(parameter, key, tensors[f"{prefix}.{key}"])
                for key in STATE_KEYS
                if f"{prefix}.{key}" in tensors
            }
            if state:
                optimizer.state[parameter] = state


def _placed(parameter: nn.Parameter, key: str, value: Tensor) -> Tensor:
    if key == "step":
        return value.to(parameter.device).clone()
    moment = torch.zeros_like(parameter, requires_grad=False)
    local(moment).copy_(value)
    return moment
