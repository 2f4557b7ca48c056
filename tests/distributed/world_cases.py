"""What the tests of `World` run in each process."""

import time

import torch

from gspo.distributed import gradients
from gspo.distributed.world import World
from gspo.errors import LostProcessError


def collectives():
    world = World.from_environment(60)
    try:
        mine = torch.tensor([1.0, float(world.rank)])
        total = world.sum(mine)
        seen = {
            "rank": world.rank,
            "main": world.is_main,
            "sum": total.tolist(),
            "own": mine.tolist(),
            "gathered": world.gather([(world.rank, i) for i in range(world.rank)]),
            "told": world.broadcast({"said by": world.rank}),
        }
        again = World.from_environment(60)
        again.close()  # the group is the first world's and stays open
        world.barrier()
        return seen
    finally:
        world.close()


def lose_the_other():
    """Process 1 does not answer for longer than process 0 is ready to wait; what 0 says of it, and after how long."""
    world = World.from_environment(3)
    if world.rank == 1:
        time.sleep(10)
        return None
    start = time.monotonic()
    try:
        world.gather([1])
    except LostProcessError as error:
        return [str(error), time.monotonic() - start]


def sum_some_gradients():
    """Each process has gradients that the other lacks; one parameter has none anywhere."""
    world = World.from_environment(60)
    gradients.BUCKET_BYTES = 16
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (4,), (), (2,))]
    if world.rank == 0:
        parameters[0].grad = torch.arange(6.0).view(2, 3)
    parameters[1].grad = torch.full((4,), 1.0 + world.rank)
    if world.rank == 1:
        parameters[2].grad = torch.tensor(5.0)
    gradients.sum_gradients(parameters, world)
    world.close()
    return [None if p.grad is None else p.grad.tolist() for p in parameters]
