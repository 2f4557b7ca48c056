"""Sums over the vocabulary, of which a tile at a time is there: log-sum-exp, entropy, and their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def slices(length: int, size: int) -> Iterator[slice]:
    """`length` in equal parts of at most `size`."""
    count = max(1, -(-length // size))
    edges = [length * n // count for n in range(count + 1)]
    return (slice(start, stop) for start, stop in pairwise(edges) if stop > start)


def at_targets(ids: Int[Tensor, "C"], columns: slice) -> tuple[Int[Tensor, "C 1"], Bool[Tensor, "C"]]:
    """Column of each target in a tile [C, 1], and whether it lies there; elsewhere the column is any."""
    column, width = ids - columns.start, columns.stop - columns.start
    return column.clamp(0, width - 1)[:, None], (column >= 0) & (column < width)


class Sums:
    """Over the vocabulary seen so far: the largest logit a, sum exp(z - a) and sum exp(z - a) (z - a), per token.

    `masked`: some logits may be -inf.
    """

    def __init__(self, ids: Int[Tensor, "C"], *, masked: bool) -> None:
        self.ids, self.masked = ids, masked
        self.peak = torch.full(ids.shape, torch.finfo(torch.float32).min, device=ids.device)
        self.total, self.dot, self.target = (torch.zeros_like(self.peak) for _ in range(3))

    def add(self, z: Float[Tensor, "C W"], columns: slice, spare: Tensor | None) -> None:
        """Takes a tile in and overwrites it; entropy needs a `spare` buffer of its size."""
        column, here = at_targets(self.ids, columns)
        self.target = torch.where(here, z.gather(1, column).squeeze(1), self.target)
        peak = torch.maximum(self.peak, z.amax(1))
        z -= peak[:, None]
        fade = self.peak - peak
        if spare is None:
            exps = z.exp_()
        else:
            exps = torch.exp(z, out=spare[: z.numel()].view(z.shape))
            finite = z.clamp_min_(torch.finfo(torch.float32).min) if self.masked else z
            self.dot = fade.exp() * (self.dot + self.total * fade) + _row_dot(exps, finite)
        self.total = self.total * fade.exp() + exps.sum(1)
        self.peak = peak

    @property
    def norm(self) -> Float[Tensor, "C"]:
        """log sum exp(z)."""
        return self.peak + self.total.log()

    @property
    def entropy(self) -> Float[Tensor, "C"]:
        """In nats; needs the spare buffer."""
        return self.total.log() - self.dot / self.total


def logit_gradient(
    logs: Tensor, target: tuple[Tensor, Tensor], grad: Tensor, grad_entropy: Tensor | None, entropies: Tensor
) -> Tensor:
    """d(grad . log-prob + grad_entropy . entropy) / dz, from log p [C, V], which it overwrites.

    d log p_target / dz = onehot - p;  d H / dz_j = -p_j (log p_j + H).
    """
    if grad_entropy is None:
        g = logs.exp_().mul_(-grad[:, None])
    else:
        probs = logs.exp()
        weights = logs.nan_to_num_(neginf=0.0).add_(entropies[:, None]).mul_(-grad_entropy[:, None])
        g = weights.sub_(grad[:, None]).mul_(probs)
    column, here = target
    return g.scatter_add_(1, column, (grad * here)[:, None])


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    """sum_j a_ij b_ij without a temporary of their size."""
    return torch.bmm(a.unsqueeze(1), b.unsqueeze(2)).view(-1)
