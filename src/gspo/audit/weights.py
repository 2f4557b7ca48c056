"""An engine with coarser weights than the policy's, so that the noise of such engines can be seen on any machine.

Only the weights are rounded; the arithmetic stays that of the config. What an engine's own kernels add comes on top.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

EngineWeights = Literal["float32", "bfloat16", "int8"]
"""`bfloat16`: every weight. `int8`: every matrix but the embeddings and the output head, as engines do it."""


@torch.no_grad()
def round_weights(model: Any, to: EngineWeights) -> None:
    """Rounds the weights of a `transformers` model in place; they stay float32."""
    if to == "float32":
        return
    spared = {id(module.weight) for module in _ends(model)} if to == "int8" else set()
    for parameter in model.parameters():
        if to == "bfloat16":
            parameter.copy_(parameter.bfloat16())
        elif parameter.ndim >= 2 and id(parameter) not in spared:
            parameter.copy_(int8_rows(parameter))


def int8_rows(weight: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows n"]:
    """Symmetric 8-bit rounding, each row (output channel) at its own scale max|w| / 127."""
    scale = weight.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (weight / scale).round() * scale, 0.0)


def _ends(model: Any) -> list[Any]:
    return [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None]
