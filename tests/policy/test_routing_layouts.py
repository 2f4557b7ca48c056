"""Routes are carried per rollout: recorded in one layout, they are replayed in another."""

import numpy as np
import pytest
import torch

from gspo.policy.layout import TokenLayout
from gspo.policy.load import enable_activation_checkpointing
from gspo.policy.model import Policy, ScoringModel
from gspo.policy.routing import Routes, record_routing, replay_routing
from tests.policy.moe_families import make
from tests.policy.tiny import cut_routes, make_rollout, random_rollouts

KINDS = ["shared", "packed", "padded"]


def policy_of(model, kind) -> Policy:
    return Policy(ScoringModel(model, True, kind != "padded"), None, (2,), 0, 128, kind)


def padding(layout: TokenLayout) -> torch.Tensor:
    return ~layout.attention_mask.flatten()


def moved(routes: Routes, source: TokenLayout, target: TokenLayout) -> dict[str, torch.Tensor]:
    """Routes of one layout in the order of another, by way of the rollouts."""
    placed = {}
    for name, indices in routes.items():
        rollouts = cut_routes(source, indices.numpy().astype(np.int16))
        placed[name] = torch.from_numpy(target.place_routes(rollouts))
    return placed


def replayed(policy, layout, routes):
    policy.model.zero_grad()
    with (
        replay_routing(policy.model, routes, native_rows=padding(layout)) as proof,
        policy.forward(layout, temperature=1.0) as scores,
    ):
        (scores.logprobs * torch.linspace(-1, 1, layout.columns)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
    return scores.logprobs.detach(), gradients, proof


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_routes_recorded_in_one_layout_replay_in_another(kind, checkpointing):
    model, rollouts = make("qwen3_moe", vocab_size=61), random_rollouts()
    first = policy_of(model, "padded")
    layout = first.layout(rollouts)
    with record_routing(model) as routes:
        native = first.score(layout, temperature=1.0).logprobs
    expected, gradients, _ = replayed(first, layout, moved(routes, layout, layout))
    assert torch.equal(expected, native)

    second = policy_of(model, kind)
    target = second.layout(rollouts)
    if checkpointing:
        enable_activation_checkpointing(model)
    found, others, proof = replayed(second, target, moved(routes, layout, target))
    assert proof.rows == target.fed_tokens
    assert set(proof.recomputes.values()) == {int(checkpointing)}
    torch.testing.assert_close(found, native, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        assert (others[name] - gradient).abs().max() <= 1e-4 * gradient.abs().max(), name


def test_rollouts_without_a_scored_token_need_no_routes():
    policy = policy_of(make("qwen3_moe", vocab_size=61), "shared")
    layout = policy.layout([make_rollout(0, 0, (5, 6, 7), (), ())])
    assert policy.score(layout, temperature=1.0, record=True).routes is None
