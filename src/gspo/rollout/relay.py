"""An engine outside of the processes, to which the main one alone talks, for all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from torch import Tensor

from gspo.distributed.world import World
from gspo.rollout.engine import Engine
from gspo.types import Request, Rollout, Sampling


class RelayEngine:
    """Passes every process's requests to the engine of the main one, and its weights once.

    All processes call `generate` and `update_weights` together. The others have no engine (None).
    """

    def __init__(self, engine: Engine | None, world: World) -> None:
        self.engine = engine
        self.world = world

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """See `Engine.generate`; each process gets the rollouts of its own requests, whose slots are its alone."""
        wanted = self.world.gather(requests)
        drawn = self.world.from_main(lambda: [] if self.engine is None else self.engine.generate(wanted, sampling))
        mine = {request.slot for request in requests}
        return [rollout for rollout in drawn if rollout.slot in mine]

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `Engine.update_weights`. Every process goes through the tensors: to make them may take all of them."""
        if self.engine is None:
            deque(named_tensors, maxlen=0)
        else:
            self.engine.update_weights(named_tensors, version)
        self.world.barrier()

    def close(self) -> None:
        """See `Engine.close`."""
        if self.engine is not None:
            self.engine.close()
