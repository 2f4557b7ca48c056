"""The processes that train one policy together; every count, sum, barrier and save goes through here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gspo.errors import BadInputError, LostProcessError

T = TypeVar("T")

DEFAULT_TIMEOUT = 1800.0


@dataclass(frozen=True, slots=True)
class World:
    """`size` processes, of which this is number `rank`. Size 1 is the default and needs no launcher.

    Every method but `close` is a collective where `size` exceeds 1: all processes call it, in the same order, or they
    end with LostProcessError, at the latest after the timeout. What is passed between them is pickled in memory; it
    comes from the job's own processes and from nowhere else.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    _owns_group: bool = field(default=False, repr=False, compare=False)

    @classmethod
    def from_environment(
        cls,
        timeout: float = DEFAULT_TIMEOUT,
        *,
        device: str = "auto",
        environment: Mapping[str, str] | None = None,
    ) -> World:
        """The world that `torchrun` started this process in, by the variables it sets; size 1 without a launcher.

        Tensors on a CPU travel over gloo, those on GPUs over NCCL; process LOCAL_RANK of a machine takes its GPU of
        that number. Where a process group exists already, it is used and left open.

        Args:
            timeout: seconds after which a process that waits for the others gives up.
            device: `model.device` of the config.

        Raises:
            BadInputError: the launcher's variables are damaged or incomplete, or there are more processes than GPUs.
        """
        variables = os.environ if environment is None else environment
        size = _number(variables, "WORLD_SIZE", 1)
        rank, local_rank = _number(variables, "RANK", 0), _number(variables, "LOCAL_RANK", 0)
        if not 0 <= rank < size:
            raise BadInputError(f"RANK = {rank} with WORLD_SIZE = {size}: must be below it; start with torchrun")
        if size == 1:
            return cls()
        _check_device(device, local_rank)
        on_gpu = device != "cpu" and torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(local_rank)
        owns = not dist.is_initialized()
        if owns:
            if not {"MASTER_ADDR", "MASTER_PORT"} <= variables.keys():
                raise BadInputError(
                    f"WORLD_SIZE = {size} without MASTER_ADDR and MASTER_PORT: start with torchrun, or unset "
                    "WORLD_SIZE to train with one process"
                )
            with _together():
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                    timeout=timedelta(seconds=timeout),
                    rank=rank,
                    world_size=size,
                )
        return cls(rank, size, local_rank, owns)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and speaks to the user."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        if self.size == 1:
            return tensor
        total = tensor.detach().clone()
        self.add_up(total)
        return total

    def add_up(self, tensor: Tensor) -> None:
        """Replaces a tensor by its sum over all processes."""
        if self.size > 1:
            with _together():
                dist.all_reduce(tensor)

    def gather(self, items: Sequence[T]) -> list[T]:
        """The items of all processes on every process, those of rank 0 first."""
        if self.size == 1:
            return list(items)
        parts: list[Any] = [None] * self.size
        with _together():
            dist.all_gather_object(parts, list(items))
        return [item for part in parts for item in part]

    def broadcast(self, value: T) -> T:
        """The main process's value on every process."""
        return self.from_main(lambda: value)

    def from_main(self, make: Callable[[], T]) -> T:
        """What `make` returns in the main process, the only one to call it, on every process."""
        box: list[Any] = [make() if self.is_main else None]
        if self.size > 1:
            with _together():
                dist.broadcast_object_list(box, src=0)
        made: T = box[0]
        return made

    def barrier(self) -> None:
        """Waits until every process is here."""
        self.add_up(torch.zeros(1))

    def close(self) -> None:
        """Leaves the process group, if this world made it; processes that still wait for this one end then."""
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _together() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise LostProcessError(
            f"another process of the job ended, or did not answer within distributed.timeout ({reason})"
        ) from error


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name, str(default))
    if not text.isdecimal():
        raise BadInputError(f"{name} = {text!r}: must be a whole number from 0 on; start the processes with torchrun")
    return int(text)


def _check_device(device: str, local_rank: int) -> None:
    if device not in ("auto", "cpu", "cuda"):
        raise BadInputError(
            f"model.device = {device!r}: with several processes each takes the GPU of its own number; "
            'use "auto" or "cpu"'
        )
    if device != "cpu" and torch.cuda.is_available() and local_rank >= torch.cuda.device_count():
        raise BadInputError(
            f"torchrun started process number {local_rank} (from 0) on a machine with {torch.cuda.device_count()} "
            "GPU(s): give each process one, with a lower --nproc-per-node"
        )
