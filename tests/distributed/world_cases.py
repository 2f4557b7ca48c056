"""What the tests of `World` run in each process."""

import torch

from gspo.distributed.world import World


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
