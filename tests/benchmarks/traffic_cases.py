"""What two processes with slices of a policy really receive, for the test of the cost model."""

import torch
import torch.distributed as dist

from gspo.distributed.sharding import gathered
from gspo.distributed.world import World
from gspo.policy.load import load_policy
from tests.policy.tiny import random_rollouts


def received(folder):
    """Bytes that this process receives in one update pass (layers kept or not), one scoring pass, one gathering."""
    torch.set_num_threads(1)
    world = World.from_environment(60, device="cpu")
    counted = Counter(world.size)
    try:
        figures = {}
        for reshard in (True, False):
            policy = load_policy(
                folder, device="cpu", dtype="float32", world=world, shard="full", reshard_after_forward=reshard
            )
            layout = policy.layout(random_rollouts()[:4])
            for _ in range(2):  # the first backward pass after scoring gathers one layer too many
                counted.take()
                with policy.forward(layout, temperature=1.0) as scores:
                    scores.logprobs.sum().backward()
            figures[f"update, reshard {reshard}"] = counted.take()
            policy.score(layout, temperature=1.0, entropy=False)
            figures["score"] = counted.take()
            with gathered(policy.model):
                figures["rollout"] = counted.take()
        return figures
    finally:
        world.close()


class Counter:
    """Adds up what the collectives of FSDP2 bring in from other processes."""

    def __init__(self, size):
        self.bytes = 0.0
        self.share = (size - 1) / size
        gather, scatter = dist.all_gather_single, dist.reduce_scatter_single

        def counted_gather(output, *args, **options):
            self.bytes += self.share * output.nbytes
            return gather(output, *args, **options)

        def counted_scatter(*, input, **options):
            self.bytes += self.share * input.nbytes
            return scatter(input=input, **options)

        dist.all_gather_single, dist.reduce_scatter_single = counted_gather, counted_scatter

    def take(self):
        """The bytes since the last time."""
        taken, self.bytes = self.bytes, 0.0
        return taken
