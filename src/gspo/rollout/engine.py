"""The protocol that every inference engine keeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from gspo.types import Request, Rollout, Sampling

NOT_FINITE = "log-probs are not finite"
"""How `Rollout.dropped` begins where an engine returned NaN or an infinity for a sampled token."""

UNUSABLE_SUPPORT = "kept support is unusable"
"""How `Rollout.dropped` begins where what truncated sampling kept does not fit the response."""


@runtime_checkable
class Engine(Protocol):
    """Draws responses and takes new weights. An engine never sees the trained model."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """Draws every request's samples; the result is sorted by (slot, sample), whatever finished first.

        `sampler_logprobs` are those of the distribution that was sampled from, in float32. Under truncated sampling
        with `record_support` each rollout carries its support; an engine that cannot do so leaves it out. A failed
        response comes back with finish reason `error` and `dropped` set, never as an exception that costs the others.
        """
        ...

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replaces the weights by checkpoint-format tensors; later tokens carry `version`."""
        ...

    def close(self) -> None:
        """Frees what the engine holds."""
        ...
