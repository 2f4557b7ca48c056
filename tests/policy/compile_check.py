"""Compiled layers against plain ones; run as a program, where annotations are not checked at run time.

Takes the cases to run: a family, then words of `inductor`, `padded`, `checkpointing`, `lora`, `autocast`,
joined by `+`. Under autocast, compiled layers round to bfloat16 in other places than plain ones, and are held to that.
"""

from __future__ import annotations

import functools
import sys
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import counters

from gspo.config import LoraConfig
from gspo.policy.adapters import add_lora
from gspo.policy.compiling import CompiledLayers
from gspo.policy.load import enable_activation_checkpointing
from gspo.policy.model import Policy, ScoringModel
from gspo.types import Rollout
from tests.policy.tiny import gradients, random_rollouts, tiny_model, worst

GROUPS = [[(9, (6, 1, 10, 0)), (3, (4, 12))], [(7, (3, 9, 4)), (5, (8, 8))], [(30, (13, 29, 4)), (5, (8, 2, 8))]]


def run(policy: Policy, rollouts: list[Rollout]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs, and the gradients of a loss over them and the entropies."""
    with policy.forward(policy.layout(rollouts), temperature=0.7) as scores:
        generator = torch.Generator().manual_seed(5)
        first, second = torch.randn(2, *scores.logprobs.shape, generator=generator)
        (scores.logprobs * first + scores.entropy * second).sum().backward()
    return scores.logprobs.detach(), gradients(policy.model)


def check(case: str) -> None:
    family, *words = case.split("+")
    model: Any = tiny_model(family)
    if "lora" in words:
        torch.manual_seed(0)
        add_lora(model, LoraConfig(rank=2))
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.05)
    if "checkpointing" in words:
        enable_activation_checkpointing(model)
    kind = "padded" if "padded" in words else "shared"
    autocast = torch.bfloat16 if "autocast" in words else None
    close, apart = ({"rtol": 2e-2, "atol": 2e-2}, 5e-2) if autocast else ({"rtol": 1e-5, "atol": 5e-6}, 1e-5)
    plain = Policy(ScoringModel(model, True, kind == "shared", autocast), None, (1,), 0, 128, kind)
    torch.compiler.reset()
    counters.clear()
    backend = "inductor" if "inductor" in words else "aot_eager"
    with mock.patch("torch.compile", functools.partial(torch.compile, backend=backend)):
        layers = CompiledLayers(model)
    compiled = Policy(ScoringModel(model, True, kind == "shared", autocast, layers), None, (1,), 0, 128, kind)
    graphs = []
    for seed, groups in enumerate(GROUPS):
        rollouts = random_rollouts(groups, seed=seed)
        expected, expected_gradients = run(plain, rollouts)
        found, found_gradients = run(compiled, rollouts)
        torch.testing.assert_close(found, expected, **close)
        assert worst(found_gradients, expected_gradients) < apart, case
        scored = compiled.score(compiled.layout(rollouts), temperature=0.7).logprobs
        torch.testing.assert_close(scored, expected, **close)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 1, f"{case}: nothing was compiled"
    assert graphs[1:] == graphs[:1] * 2, f"{case}: other lengths were compiled anew, {graphs} graphs"
    print(f"{case}: compiled as eager, {graphs[0]} graphs", flush=True)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        check(argument)
