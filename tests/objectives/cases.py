"""Inputs for the objective tests."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """Arguments of an objective; `advantages` [B] or [B, T]."""

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Float64 copies for the reference."""
        return (
            self.logprobs.double().numpy(),
            self.old.double().numpy(),
            self.advantages.double().numpy(),
            self.mask.numpy(),
        )

    def rows(self, index) -> Case:
        """Some rows only."""
        return Case(self.logprobs[index], self.old[index], self.advantages[index], self.mask[index])

    def per_token(self) -> Case:
        """The same advantage on every token of a row."""
        return replace(self, advantages=self.advantages[:, None].expand_as(self.logprobs).clone())


def random_case(
    seed: int, *, rows: int = 6, width: int = 9, spread: float = 0.3, drift: float = 0.0, token_advantages=False
) -> Case:
    """Ragged rows of log-probs in float32; `spread` is the noise of token log-ratios, `drift` their row shift."""
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=g) * 3
    shift = drift * torch.randn(rows, 1, generator=g)
    logprobs = old + spread * torch.randn(rows, width, generator=g) + shift
    advantages = torch.randn((rows, width) if token_advantages else (rows,), generator=g)
    lengths = torch.randint(1, width + 1, (rows,), generator=g)
    mask = torch.arange(width)[None] < lengths[:, None]
    return Case(logprobs, old, advantages, mask & (torch.rand(rows, width, generator=g) < 0.9))


def run(loss, case: Case, **options):
    """(output, gradient with respect to the log-probs)."""
    leaf = case.logprobs.clone().requires_grad_()
    output = loss(leaf, case.old, case.advantages, case.mask, **options)
    output.loss.backward()
    return output, leaf.grad


def from_ratios(rows: list[list[float]], advantages: list[float] | list[list[float]]) -> Case:
    """A case whose token ratios are those given."""
    width = max(len(r) for r in rows)
    log_ratio = torch.tensor([[math.log(x) for x in r] + [0.0] * (width - len(r)) for r in rows])
    mask = torch.tensor([[True] * len(r) + [False] * (width - len(r)) for r in rows])
    old = torch.full_like(log_ratio, -1.0)
    return Case(old + log_ratio, old, torch.tensor(advantages), mask)
