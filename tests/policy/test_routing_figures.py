import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PhimoeConfig, PhimoeForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from gspo.errors import BadInputError
from gspo.policy.load import enable_activation_checkpointing
from gspo.policy.moe import moe_layers
from gspo.policy.routing import RoutingError, record_routing, replay_routing
from gspo.policy.routing_figures import (
    changed_experts,
    expert_counts,
    load_balancing_loss,
    router_entropy,
    router_logits,
)
from gspo.policy.routing_probe import check_replayable
from tests.policy.moe_families import COMMON, FAMILIES, make, tokens


@given(st.integers(0, 10**6), st.integers(1, 8))
def test_changed_experts_compares_sets(seed, k):
    generator = torch.Generator().manual_seed(seed)
    before, after = (torch.rand(5, 8, generator=generator).argsort(-1)[:, :k] for _ in range(2))
    expected = [1 - len(set(a.tolist()) & set(b.tolist())) / k for a, b in zip(before, after, strict=True)]
    assert changed_experts(before.to(torch.uint8), after).tolist() == pytest.approx(expected)
    assert changed_experts(before, before.flip(-1)).tolist() == [0.0] * 5


def test_expert_counts_by_hand():
    indices = torch.tensor([[0, 3], [3, 1], [2, 3]], dtype=torch.uint8)
    assert expert_counts(indices, 5).tolist() == [1, 1, 1, 3, 0]
    assert expert_counts(indices, 5, torch.tensor([True, False, True])).tolist() == [1, 0, 1, 2, 0]


def test_router_entropy_by_hand():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [100.0, 0.0, 0.0, 0.0], [math.log(3), 0.0, -1e4, -1e4]])
    halves = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert router_entropy(logits).tolist() == pytest.approx([math.log(4), 0.0, halves])


@pytest.mark.parametrize("family", FAMILIES)
def test_router_logits_are_the_routers_own_and_in_the_graph(family):
    model, ids = make(family), tokens()
    with router_logits(model) as logits, record_routing(model) as routes:
        model(ids)
    assert logits.keys() == moe_layers(model).keys()
    for name, value in logits.items():
        assert value.shape == (24, 8)
        assert value.requires_grad
        if family != "deepseek_v3":  # which limits the choice to groups of experts
            assert torch.equal(value.topk(2).indices.sort(-1).values, routes[name].long().sort(-1).values)


def parts(model, ids, cuts, counts):
    """The balance loss of each piece of a mini-batch cut by rows, and the router gradient of their sum."""
    model.zero_grad()
    losses = []
    for piece in ids.split(cuts):
        with router_logits(model) as logits:
            model(piece)
        losses.append(load_balancing_loss(logits, counts, ids.numel()))
        losses[-1].backward()
    return sum(loss.item() for loss in losses), gradients(model)


def gradients(model):
    return {
        name: torch.cat(
            [parameter.grad.flatten() for parameter in layer.block.parameters() if parameter.grad is not None]
        )
        for name, layer in moe_layers(model).items()
    }


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_balance_loss_is_that_of_transformers_and_exact_under_micro_batching(family):
    model, ids = make(family), tokens(6, 12)
    with torch.no_grad(), record_routing(model) as routes:
        model(ids)
    counts = {name: expert_counts(indices, 8) for name, indices in routes.items()}
    model.zero_grad()
    with router_logits(model) as logits:
        model(ids)
    reference = torch.stack([load_balancing_loss_func((value,), 8, 2) for value in logits.values()]).mean()
    reference.backward()
    expected = gradients(model)
    for cuts in ([6], [1, 2, 3], [1] * 6):
        loss, found = parts(model, ids, cuts, counts)
        assert loss == pytest.approx(reference.item(), rel=1e-5)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_the_balance_loss_leaves_padding_out_and_is_k_at_balance():
    rows = torch.tensor([True, True, True, True, False])
    logits = {"mlp": torch.zeros(5, 4, requires_grad=True)}
    routes = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [0, 1]])
    loss = load_balancing_loss(logits, {"mlp": expert_counts(routes, 4, rows)}, 4, rows)
    assert loss.item() == pytest.approx(2.0)
    loss.backward()
    assert logits["mlp"].grad[4].abs().max() == 0


def test_the_balance_loss_survives_checkpointing_and_refuses_logits_without_gradient():
    model, ids = make("qwen3_moe"), tokens()
    with torch.no_grad(), record_routing(model) as routes:
        model(ids)
    counts = {name: expert_counts(indices, 8) for name, indices in routes.items()}
    _, expected = parts(model, ids, [2], counts)
    enable_activation_checkpointing(model)
    model.zero_grad()
    with replay_routing(model, routes), router_logits(model) as logits:
        model(ids)
        load_balancing_loss(logits, counts, 24).backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
    with pytest.raises(RoutingError, match="carry no gradient"):
        load_balancing_loss({name: value.detach() for name, value in logits.items()}, counts, 24)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_probe_passes_what_can_be_replayed(family):
    check_replayable(make(family))


def test_the_probe_refuses_by_class_what_cannot():
    torch.manual_seed(0)
    phimoe = PhimoeForCausalLM(PhimoeConfig(**{**COMMON, "num_local_experts": 8})).eval()
    with pytest.raises(BadInputError, match=r"PhimoeSparseMoeBlock \(model\.layers\.0\.mlp\) cannot be replayed"):
        check_replayable(phimoe)


def test_the_probe_refuses_a_layer_that_does_more_than_its_routes_say():
    model = make("qwen3_moe")
    calls = []
    model.model.layers[0].mlp.register_forward_hook(
        lambda _module, _args, output: calls.append(1) or output * len(calls)
    )
    with pytest.raises(BadInputError, match="replayed, change the output"):
        check_replayable(model)
