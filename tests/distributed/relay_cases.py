"""What the test of the relay runs in each process."""

import torch

from gspo.distributed.world import World
from gspo.rollout.relay import RelayEngine
from gspo.types import Prompt, Request, Sampling
from tests.policy.tiny import make_rollout


class Servers:
    """An engine that remembers what it was asked for."""

    def generate(self, requests, _):
        self.slots = [request.slot for request in requests]
        return [make_rollout(request.slot, 0, request.prompt.ids, (7,)) for request in requests]

    def update_weights(self, named_tensors, version):
        self.version = version
        self.names = [name for name, _ in named_tensors]

    def close(self):
        pass


def relayed():
    world = World.from_environment(60, device="cpu")
    servers = Servers() if world.is_main else None
    engine = RelayEngine(servers, world)
    made = []

    def tensors():
        made.append("w")
        yield "w", torch.zeros(1)

    engine.update_weights(tensors(), 7)
    mine = [Request(Prompt(str(slot), "", (5,)), 1, step=1, slot=slot) for slot in range(3)][world.rank :: 2]
    drawn = [[r.slot, r.sample] for r in engine.generate(mine, Sampling(max_tokens=2))]
    engine.close()
    world.close()
    return {"drawn": drawn, "tensors": made, "asked": None if servers is None else [servers.slots, servers.version]}
