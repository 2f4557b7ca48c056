"""How a rollout batch is cut: mini-batches for the updates, micro-batches for memory."""

from __future__ import annotations

from dataclasses import dataclass

from gspo.objectives import Totals
from gspo.policy.layout import TokenLayout
from gspo.policy.route_checks import Routes
from gspo.types import Batch


@dataclass(slots=True)
class MicroBatch:
    """What one forward and backward pass holds; `routes` are the experts to replay, in the order of the layout."""

    batch: Batch
    layout: TokenLayout
    routes: Routes | None = None


@dataclass(slots=True)
class MiniBatch:
    """The rollouts of one optimizer update, with the denominators of its loss.

    Of several processes each holds its own `micro_batches` alone; all else is of the whole mini-batch: `passes` is
    how many micro-batches the process with the most has, `response_tokens` counts those of every rollout, and
    `has_signal` says whether any trainable token has an advantage.
    """

    number: int
    micro_batches: list[MicroBatch]
    totals: Totals
    passes: int
    response_tokens: int
    has_signal: bool
