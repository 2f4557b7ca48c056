"""A model spread over all processes by FSDP2: each holds a slice of every weight, gradient and optimizer moment.

Every decoder layer is one unit, gathered when its turn comes; embeddings, last norm and head are the root's own.
Gradients are *summed* over processes, because a loss is already divided by the totals of all of them, and they are
summed after every backward pass: what a process keeps between micro-batches is its slice alone.

All processes must run the same passes in the same order. A process that has nothing to contribute runs
`Policy.take_part`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from gspo.distributed.world import World
from gspo.errors import GspoError

Result = TypeVar("Result")

RUN = "run_as_forward"
"""The method of a sharded model that gathers its root, and then calls the function that it is given."""


@dataclass(frozen=True, slots=True)
class Shards:
    """A sharded model. `reshard_after_forward`: whether layers are let go of after the forward pass of training, and
    gathered again for the backward pass; the root never is. Without gradients they always are. `used` has the names of
    the parameters that this process has put a gradient to since `leave_unused`."""

    root: FSDPModule
    reshard_after_forward: bool
    used: set[str] = field(default_factory=set)

    def run(self, function: Callable[[], Result]) -> Result:
        """Runs `function` as a forward pass of the model: the root's own weights can be used in it directly.

        Their gradients reach the slices like those of any other weight.
        """
        run: Callable[[Callable[[], Result]], Result] = getattr(self.root, RUN)
        if not torch.is_grad_enabled():
            return run(function)
        for unit in units(self.root):
            unit.set_reshard_after_forward(self.reshard_after_forward and unit is not self.root, recurse=False)
        try:
            return run(function)
        finally:
            self.root.set_reshard_after_forward(True)

    def leave_unused(self, world: World) -> None:
        """Takes the gradient from parameters that no process has put one to, so that an optimizer leaves them alone.

        The collective makes it 0, and AdamW would let the weight decay all the same. For all processes together, after
        the backward passes of an update.
        """
        trained = [(name, p) for name, p in cast(nn.Module, self.root).named_parameters() if p.requires_grad]
        held = [name in self.used or (p.grad is not None and bool(local(p.grad).any())) for name, p in trained]
        holders = world.sum(torch.tensor(held, dtype=torch.int32))
        for (_, parameter), count in zip(trained, holders.tolist(), strict=True):
            if not count:
                parameter.grad = None
        self.used.clear()

    def watch(self) -> None:
        """From now on `used` is kept: every unit that is trained is gathered once, to be told of its gradients."""
        for unit in units(self.root):
            if not any(parameter.requires_grad for parameter in cast(nn.Module, unit).parameters()):
                continue
            unit.unshard()
            for name, parameter in cast(nn.Module, self.root).named_parameters():
                if parameter.requires_grad and not isinstance(parameter, DTensor):
                    _on_gradient(parameter, partial(self.used.add, name))
            unit.reshard()


def place(
    model: Any, device: torch.device, world: World, *, shard: bool = False, reshard_after_forward: bool = True
) -> Shards | None:
    """Puts the main process's weights on every process's device, spread over all of them if `shard`.

    Other processes bring the same model on the meta device. Weights travel one at a time and are cut one layer at a
    time, so that besides the main process none ever holds a whole model in its host's memory, and no device does
    unless it is to keep it.

    Raises:
        GspoError: the processes have built different models.
    """
    if world.size == 1:
        model.to(device)
        return None
    _check_same_everywhere(model, device)
    if not shard:
        _receive(model, device)
        return None
    mesh = init_device_mesh(device.type, (world.size,))
    for unit in [*reversed([m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]), model]:
        _receive(unit, device)
        # Whatever runs outside `Shards.run` leaves nothing gathered behind.
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    # Experts that no token of one process visits have no gradient there; the collective needs all of them.
    model.set_reduce_scatter_unused_params(True)
    setattr(model, RUN, MethodType(lambda _, function: function(), model))
    register_fsdp_forward_method(model, RUN)
    shards = Shards(model, reshard_after_forward)
    with torch.no_grad():
        shards.run(lambda: None)  # The first unit that runs is taken for the root.
    shards.watch()
    return shards


def units(model: Any) -> list[FSDPModule]:
    """The pieces of a sharded model that are gathered as one, the root among them; none if it is not sharded."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextmanager
def gathered(model: Any, *, layers: bool = True) -> Iterator[None]:
    """Inside, every process holds the whole model, and forward passes communicate nothing: each may run its own.

    Entering is for all processes together. No weight may change inside. `layers=False` gathers the root's own weights
    only. Does nothing for a model that is not sharded.
    """
    held = [unit for unit in units(model) if layers or unit is model]
    for unit in held:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in held:
            unit.set_reshard_after_forward(True, recurse=False)
        if held:
            # FSDP gathers ahead in the order of the last passes, which here may differ from process to process.
            model.reset_iter_state()


def parts(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The model's state, whole: all of it where it is not sharded, else a unit at a time, gathered until the next one.

    For all processes together, each to the end.
    """
    state = model.state_dict()
    paths = {path: module for path, module in model.named_modules() if isinstance(module, FSDPModule)}
    if not paths:
        yield state
        return
    names: dict[str, list[str]] = {path: [] for path in paths}
    for name in state:
        path = name
        while path not in paths:
            path = path.rpartition(".")[0]
        names[path].append(name)
    for path, unit in paths.items():
        unit.unshard()
        try:
            yield {name: _find(model, name) for name in names[path]}
        finally:
            unit.reshard()


def _find(model: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(path), leaf)
    return found.detach()


def rows(parameter: Tensor) -> slice:
    """Which rows of a parameter this process holds."""
    if not isinstance(parameter, DTensor):
        return slice(0, len(parameter) if parameter.ndim else 1)
    each = math.ceil(len(parameter) / parameter.device_mesh.size())
    start = min(len(parameter), each * parameter.device_mesh.get_local_rank())
    return slice(start, min(len(parameter), start + each))


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which each process holds a slice; a collective for such a tensor, else the tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This process's rows of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _on_gradient(parameter: Any, tell: Callable[[], None]) -> None:
    parameter.register_post_accumulate_grad_hook(lambda _: tell())


def _receive(unit: nn.Module, device: torch.device) -> None:
    """Fills the parameters and buffers of a unit from the main process; tied ones once."""
    received: dict[nn.Parameter, nn.Parameter] = {}
    for module in unit.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if parameter not in received:
                data = _broadcast(parameter.data, device)
                if parameter.is_meta:
                    received[parameter] = nn.Parameter(data, requires_grad=parameter.requires_grad)
                else:
                    parameter.data = data
                    received[parameter] = parameter
            module._parameters[name] = received[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _broadcast(buffer, device)


def _broadcast(tensor: Tensor, device: torch.device) -> Tensor:
    data = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device).contiguous()
    dist.broadcast(data.view(-1).view(torch.uint8), src=0)
    return data


def _check_same_everywhere(model: nn.Module, device: torch.device) -> None:
    state = [*model.named_parameters(), *model.named_buffers()]
    text = "\n".join(f"{name} {tuple(t.shape)} {t.dtype} {t.requires_grad}" for name, t in state)
    digest = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8).to(device)
    main = digest.clone()
    dist.broadcast(main, src=0)
    differs = (main != digest).any().to(torch.int32)
    dist.all_reduce(differs)
    if differs:
        raise GspoError(
            f"{type(model).__name__}: its parameters are others in the checkpoint than in a model made from its "
            "config alone; it cannot be loaded by several processes"
        )
