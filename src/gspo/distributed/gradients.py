"""Gradients of whole copies of a policy, added up over the processes that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from gspo.distributed.world import World

BUCKET_BYTES = 128 * 2**20
"""Gradients travel in flat pieces of about this size: few enough calls, and little memory beside the gradients."""


def sum_gradients(parameters: Sequence[nn.Parameter], world: World) -> None:
    """Puts the sum over all processes into every gradient; all hold the same bits afterwards.

    A sum, not a mean: a loss is divided by the totals of all processes already. A gradient that no process has stays
    None, so that an optimizer leaves its parameter alone as it does with one process; one that only others have counts
    as 0 here.
    """
    if world.size == 1:
        return
    holders = world.sum(torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32))
    held = [parameter for parameter, count in zip(parameters, holders.tolist(), strict=True) if count]
    for bucket in _buckets(held):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([grad.flatten() for grad in grads])
        world.add_up(flat)
        for parameter, grad in zip(bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True):
            parameter.grad = grad.view_as(parameter)


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Consecutive parameters of one dtype, about `BUCKET_BYTES` together."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if bucket and (size >= BUCKET_BYTES or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
    if bucket:
        yield bucket
