"""Settings of a policy that several processes train together."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gspo.config.section import Section


class DistributedConfig(Section):
    """Several processes that train one policy, started by `torchrun` or on Ray."""

    shard: Literal["none", "full"] = Field(
        "none",
        description="`none`: every process holds the whole policy; `full`: weights, gradients and optimizer state are "
        "divided among the processes (FSDP2).",
    )
    reshard_after_forward: bool = Field(
        True,
        description='With `shard = "full"`: give a layer\'s gathered weights back after the forward pass, and gather '
        "them once more in the backward pass: less memory, more communication.",
    )
    timeout: float = Field(
        1800.0,
        gt=0,
        description="Seconds that a process waits for the others before the run ends with an error. One that dies is "
        "noticed at once; this bounds those that hang, and must exceed the longest wait for a slower process.",
    )
