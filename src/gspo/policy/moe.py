"""Where the experts of a Mixture-of-Experts model are, found by structure and not by family.

A layer is named after its MoE block (`model.layers.0.mlp`); what adapters, FSDP and compilation wrap round
a module is left out of the name, so that a policy and its plain copy in an engine agree on it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from gspo.errors import BadInputError

_WRAPPERS = re.compile(
    r"^base_model\.model\.|\.base_layer\b|\b(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\."
)


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """One MoE block: the module whose forward chooses experts, and the module that runs them.

    `fixed`: experts are looked up by token id, so that there is nothing to force.
    """

    name: str
    block: nn.Module
    experts: nn.Module
    num_experts: int
    fixed: bool


def moe_layers(model: nn.Module) -> dict[str, MoeLayer]:
    """The MoE layers of `model` by name, in the order of its modules; empty for a dense model.

    Raises BadInputError, by class, for a block whose experts cannot be told apart or counted.
    """
    modules = {_plain_name(path): module for path, module in model.named_modules()}
    layers: dict[str, MoeLayer] = {}
    for path, experts in modules.items():
        name, _, leaf = path.rpartition(".")
        if not type(experts).__name__.endswith("Experts") or leaf.startswith("shared"):
            continue
        block = modules[name]
        if name in layers:
            raise cannot_replay(block, name, "it holds several expert modules, where one is needed")
        layers[name] = MoeLayer(name, block, experts, _count(experts, name), getattr(block, "is_hash", False))
    return layers


def require_moe_layers(model: nn.Module) -> dict[str, MoeLayer]:
    """The same; raises BadInputError for a dense model."""
    layers = moe_layers(model)
    if not layers:
        raise cannot_replay(model, "the model", "it has no Mixture-of-Experts layer with an experts module")
    return layers


def route_dtype(num_experts: int) -> torch.dtype:
    """The smallest dtype that routes over `num_experts` are stored in."""
    return torch.uint8 if num_experts <= 256 else torch.int16


def expert_indices(layer: MoeLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Int[Tensor, "N K"]:
    """The one integer matrix among the inputs of an experts module; raises BadInputError without one."""
    found = [
        value
        for value in (*args, *kwargs.values())
        if isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32) and value.ndim >= 2
    ]
    if len(found) != 1:
        raise cannot_replay(layer.experts, layer.name, "it takes no matrix of expert indices")
    if found[0].shape[-1] == layer.num_experts:
        raise cannot_replay(layer.experts, layer.name, "it takes a mask over its experts, or all of them, not a choice")
    return found[0].flatten(0, -2)


def in_backward() -> bool:
    """Whether this runs inside backward, as an activation checkpoint's recompute does."""
    return torch._C._current_graph_task_id() != -1


def cannot_replay(module: nn.Module, name: str, why: str) -> BadInputError:
    """The refusal of a model whose routes cannot be recorded or forced."""
    return BadInputError(
        f"routing.replay: {type(module).__name__} ({name}) cannot be replayed: {why}; "
        "docs/moe_support.md lists the models that can; set routing.replay = 'off' for this one"
    )


def _plain_name(path: str) -> str:
    return _WRAPPERS.sub("", path)


def _count(experts: nn.Module, name: str) -> int:
    for attribute in ("total_experts", "num_experts", "num_local_experts", "n_routed_experts"):
        count = getattr(experts, attribute, None)
        if isinstance(count, int):
            return count
    raise cannot_replay(experts, name, "it does not say how many experts it has")
