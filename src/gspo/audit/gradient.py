"""How much of an update's gradient changes when the old log-probs come from the other engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gspo.audit.measure import Contender
from gspo.objectives import LOSSES
from gspo.policy.model import Policy
from gspo.training.minibatch import MiniBatch


@dataclass(frozen=True, slots=True)
class GradientChange:
    """Two gradients g (old log-probs of the training engine) and h (of the inference engine) over all parameters.

    `norm_ratio` |h| / |g|, `cosine` of the angle between them, `relative` |h - g| / |g|. None where g (for the cosine
    g or h) is 0, which a clip that removes everything makes it.
    """

    norm_ratio: float | None
    cosine: float | None
    relative: float | None


def gradient_change(
    policy: Policy, minibatch: MiniBatch, contender: Contender, *, temperature: float
) -> GradientChange:
    """The gradient of a mini-batch's loss at the policy's present weights, under either engine's old log-probs.

    `old_logprobs` of the mini-batch are the training engine's. Leaves the parameters without gradients.
    """
    training = _gradient(policy, minibatch, contender, temperature, engine=False)
    engine = _gradient(policy, minibatch, contender, temperature, engine=True)
    return compare(training, engine)


def compare(training: Sequence[Tensor], engine: Sequence[Tensor]) -> GradientChange:
    """Norm ratio, cosine and relative change of two gradients, summed in float64.

    >>> compare([torch.tensor([3.0, 4.0])], [torch.tensor([3.0, 0.0])])
    GradientChange(norm_ratio=0.6, cosine=0.6, relative=0.8)
    """
    g2 = h2 = gh = d2 = 0.0
    for g, h in zip(training, engine, strict=True):
        g, h = g.flatten().double(), h.flatten().double()
        g2, h2, gh, d2 = g2 + float(g @ g), h2 + float(h @ h), gh + float(g @ h), d2 + float((h - g).square().sum())
    if g2 == 0:
        return GradientChange(None, None, None)
    cosine = gh / math.sqrt(g2 * h2) if h2 > 0 else None
    return GradientChange(math.sqrt(h2 / g2), cosine, math.sqrt(d2 / g2))


def _gradient(
    policy: Policy, minibatch: MiniBatch, contender: Contender, temperature: float, *, engine: bool
) -> list[Tensor]:
    """The gradient of each trainable parameter, taken away from it."""
    options: dict[str, Any] = {} if contender.dual_clip is None else {"dual_clip": contender.dual_clip}
    parameters = [parameter for _, parameter in policy.trainable_parameters()]
    for parameter in parameters:
        parameter.grad = None
    for micro in minibatch.micro_batches:
        batch = replace(micro.batch, old_logprobs=micro.batch.sampler_logprobs) if engine else micro.batch
        assert batch.old_logprobs is not None
        by_token = contender.by_turn or batch.advantages.ndim == 2
        name = "gspo_token" if contender.objective == "gspo" and by_token else contender.objective
        spans = {"spans": batch.spans} if contender.by_turn else {}
        with policy.forward(micro.layout, temperature=temperature, entropy=False, routes=micro.routes) as scores:
            output = LOSSES[name](
                scores.logprobs,
                batch.old_logprobs,
                batch.advantages,
                batch.mask,
                clip_low=contender.clip_low,
                clip_high=contender.clip_high,
                totals=minibatch.totals,
                **options,
                **spans,
            )
            torch.autograd.backward(output.loss)
    taken = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return taken
