"""`torch.compile` for decoder layers, while rollouts are scored and updated on.

What can gain is what surrounds the matrix products: norms, rotary positions, gates and residuals are several passes
over memory each, which the compiler joins. On a CPU the products outweigh them (four layers of SmolLM2's width, 280
tokens, one thread: 0.61 CPU-seconds compiled, 0.61 plain). Attention over a layout and the head are functions of their
own, which the compiler leaves as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from gspo.errors import BadInputError
from gspo.policy.moe import moe_layers


class CompiledLayers:
    """The decoder layers of a model, and what takes their place inside `active`.

    Compiled at the first pass, once for all lengths and for all layers of a kind; numbers equal those of the plain
    layers to rounding. Not in place for good, because the embedded engine samples from the same layers with a cache.

    Raises:
        BadInputError: a Mixture-of-Experts model, a model without layers that could be compiled, or no compiler
            for its device.
    """

    def __init__(self, model: nn.Module) -> None:
        if moe_layers(model):
            raise BadInputError(
                f"model.compile: {type(model).__name__} is a Mixture-of-Experts model, whose shapes depend on the "
                "choice of experts; set it to false"
            )
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            raise BadInputError(f"model.compile: {type(model).__name__} has no layers to compile; set it to false")
        _require_compiler(layers[0])
        self._forwards: list[tuple[Any, Callable[..., Any]]] = [
            (layer, torch.compile(layer.forward, dynamic=True)) for layer in layers
        ]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Spans the forward and the backward pass: layers that are recomputed must be the ones that ran."""
        for layer, forward in self._forwards:
            layer.forward = forward
        try:
            yield
        finally:
            for layer, _ in self._forwards:
                del layer.forward  # what the class defines comes back


def _require_compiler(layer: nn.Module) -> None:
    """Compiles one line of arithmetic: a missing compiler is known before the first rollout is sampled."""
    device = next(layer.parameters()).device
    try:
        torch.compile(torch.nn.functional.silu)(torch.zeros(8, device=device))
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInputError(
            f"model.compile: nothing can be compiled for {device} here ({reason}); install a C++ compiler, or set it "
            "to false"
        ) from None
