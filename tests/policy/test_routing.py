import copy

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from gspo.errors import BadInputError
from gspo.policy.load import enable_activation_checkpointing
from gspo.policy.moe import moe_layers
from gspo.policy.routing import RoutingError, record_routing, replay_routing
from gspo.policy.routing_figures import router_logits
from tests.policy.moe_families import FAMILIES, make, tokens

families = pytest.mark.parametrize("family", FAMILIES)


def record(model, ids):
    with torch.no_grad(), record_routing(model) as routes:
        logits = model(ids).logits
    return dict(routes), logits


def replay(model, ids, routes, **settings):
    with torch.no_grad(), replay_routing(model, routes, **settings) as proof:
        logits = model(ids).logits
    return logits, proof


def other_experts(routes: dict[str, Tensor], num_experts: int = 8) -> dict[str, Tensor]:
    """Distinct experts, none of them the recorded one in the same slot."""
    return {name: (indices.long() + 3) % num_experts for name, indices in routes.items()}


def executed(model, run) -> dict[str, list[Tensor]]:
    """The indices at the inputs of each layer's experts while `run()` runs, read by an own hook."""
    seen: dict[str, list[Tensor]] = {}
    handles = [
        layer.experts.register_forward_pre_hook(
            lambda _module, args, name=name: seen.setdefault(name, []).append(args[1].clone())
        )
        for name, layer in moe_layers(model).items()
    ]
    run()
    for handle in handles:
        handle.remove()
    return seen


@families
def test_own_indices_change_nothing(family):
    model, ids = make(family), tokens()
    routes, native = record(model, ids)
    replayed, proof = replay(model, ids, routes)
    assert torch.equal(native, replayed)
    assert set(proof.forwards.values()) == {1}
    assert set(proof.recomputes.values()) == {0}
    assert set(proof.agreement.values()) == {1.0}
    assert (proof.rows, proof.native_rows) == (24, 0)


@families
def test_own_indices_change_no_gradient(family):
    model, ids = make(family), tokens()
    routes, _ = record(model, ids)
    native = gradients(model, ids)
    with replay_routing(model, routes):
        replayed = gradients(model, ids)
    assert native.keys() == replayed.keys()
    for name, gradient in native.items():
        assert torch.equal(gradient, replayed[name]), name


def gradients(model, ids) -> dict[str, Tensor]:
    model.zero_grad()
    model(ids).logits.log_softmax(-1)[..., 5].mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@families
def test_forced_experts_run_and_change_the_output(family):
    model, ids = make(family), tokens()
    routes, native = record(model, ids)
    forced = other_experts(routes)
    first, _ = replay(model, ids, forced, min_agreement=None)
    seen = executed(model, lambda: replay(model, ids, forced, min_agreement=None))
    second, _ = replay(model, ids, forced, min_agreement=None)
    assert (first - native).abs().max() > 1e-2
    assert torch.equal(first, second)
    assert seen.keys() == forced.keys()
    for name, calls in seen.items():
        assert len(calls) == 1
        assert torch.equal(calls[0], forced[name])


def gate_weights(family: str, model, logits: Tensor, chosen: Tensor) -> Tensor:
    """The published gate of each family in float64, over given experts."""
    logits, forced = logits.double(), logits.double().gather(-1, chosen)
    if family == "gpt_oss":
        return forced.softmax(-1)
    if family == "deepseek_v3":
        scores = forced.sigmoid()
        return scores / scores.sum(-1, keepdim=True) * model.config.routed_scaling_factor
    weights = logits.softmax(-1).gather(-1, chosen)
    if family in ("mixtral", "qwen3_moe"):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights


@families
def test_gate_weights_are_the_current_routers_over_the_forced_experts(family):
    model, ids = make(family), tokens()
    forced = other_experts(record(model, ids)[0])
    received: dict[str, Tensor] = {}
    for name, layer in moe_layers(model).items():
        layer.experts.register_forward_pre_hook(lambda _m, args, name=name: received.update({name: args[2]}))
    with torch.no_grad(), router_logits(model) as logits, replay_routing(model, forced, min_agreement=None):
        model(ids)
    assert received.keys() == forced.keys()
    for name, weights in received.items():
        expected = gate_weights(family, model, logits[name], forced[name])
        torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-7)


@families
def test_router_gradient_equals_finite_difference(family):
    """Under forced experts the output is smooth in the router's weights, so differences are derivatives."""
    model, ids = make(family, dtype=torch.float64, initializer_range=0.2), tokens(1, 6)
    routes, _ = record(model, ids)
    forced = other_experts(routes)

    def value() -> Tensor:
        return model(ids).logits.log_softmax(-1)[..., 5].mean()

    with replay_routing(model, forced, min_agreement=None):
        value().backward()
        for layer in moe_layers(model).values():
            router = next(child for name, child in layer.block.named_children() if name in ("gate", "router"))
            analytic = router.weight.grad
            assert analytic.abs().max() > 0
            row, column = divmod(int(analytic.abs().argmax()), analytic.shape[1])
            numeric = derivative(value, router.weight, row, column)
            torch.testing.assert_close(analytic[row, column], numeric, rtol=2e-4, atol=1e-5)


def derivative(value, weight: Tensor, row: int, column: int, step: float = 2e-2) -> Tensor:
    """Fourth-order central difference: norms and softmax run in float32, which forbids a small step."""
    at = {}
    with torch.no_grad():
        origin = weight[row, column].clone()
        for multiple in (-2, -1, 1, 2):
            weight[row, column] = origin + multiple * step
            at[multiple] = value()
        weight[row, column] = origin
    return (8 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12 * step)


@families
def test_perturbed_router_still_runs_the_recorded_experts(family):
    model, ids = make(family, initializer_range=0.1), tokens(2, 40)
    routes, _ = record(model, ids)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in moe_layers(model).values():
            router = next(child for name, child in layer.block.named_children() if name in ("gate", "router"))
            router.weight += 1e-2 * torch.randn(router.weight.shape, generator=generator)

    seen = executed(model, lambda: replay(model, ids, routes))
    native, _ = record(model, ids)
    changed = []
    for name, indices in routes.items():
        assert torch.equal(seen[name][0], indices.long())
        changed.append((native[name].sort(-1).values != indices.sort(-1).values).any(-1).float().mean())
    assert max(changed) > 0.01


@families
def test_routes_shifted_by_one_token_raise(family):
    model, ids = make(family), tokens(2, 30)
    routes, _ = record(model, ids)
    shifted = {name: indices.roll(1, 0) for name, indices in routes.items()}
    with pytest.raises(RoutingError, match="belong to other tokens"):
        replay(model, ids, shifted)


def test_the_model_is_left_as_found():
    model, ids = make("qwen3_moe"), tokens()
    before = {name: (set(vars(m)), len(m._forward_pre_hooks)) for name, m in model.named_modules()}
    state = copy.deepcopy(model.state_dict())
    routes, native = record(model, ids)
    with replay_routing(model, other_experts(routes), min_agreement=None):
        model(ids)
    with pytest.raises(ZeroDivisionError), replay_routing(model, routes):
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), record_routing(model):
        raise ZeroDivisionError
    after = {name: (set(vars(m)), len(m._forward_pre_hooks)) for name, m in model.named_modules()}
    assert before == after
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, native)


def test_layers_are_named_after_their_blocks_past_dense_ones():
    model = make("qwen3_moe")
    assert list(moe_layers(model)) == ["model.layers.0.mlp", "model.layers.2.mlp"]
    routes, _ = record(model, tokens())
    assert list(routes) == ["model.layers.0.mlp", "model.layers.2.mlp"]
    assert {(r.dtype, tuple(r.shape)) for r in routes.values()} == {(torch.uint8, (24, 2))}


def test_padding_rows_route_natively_and_are_counted():
    model, ids = make("mixtral"), tokens()
    routes, native = record(model, ids)
    forced = other_experts(routes)
    padding = torch.zeros(24, dtype=torch.bool)
    padding[[0, 1, 12]] = True
    for indices in forced.values():
        indices[padding] = -1
    settings = {"native_rows": padding, "min_agreement": None}
    seen = executed(model, lambda: replay(model, ids, forced, **settings))
    first = next(iter(routes))
    assert torch.equal(seen[first][0][padding], routes[first][padding].long())
    for name, calls in seen.items():
        assert torch.equal(calls[0][~padding], forced[name][~padding])
    for indices in routes.values():
        indices[padding] = 255
    replayed, proof = replay(model, ids, routes, native_rows=padding)
    assert torch.equal(replayed, native)
    assert (proof.rows, proof.native_rows) == (21, 3)
    assert set(proof.agreement.values()) == {1.0}


@families
def test_activation_checkpointing_replays_twice(family):
    ids = tokens()
    plain = make(family)
    routes, _ = record(plain, ids)
    forced = other_experts(routes)
    with replay_routing(plain, forced, min_agreement=None):
        expected = gradients(plain, ids)
    model = make(family).train()
    enable_activation_checkpointing(model)
    with replay_routing(model, forced, min_agreement=None) as proof:
        found = gradients(model, ids)
    assert set(proof.forwards.values()) == set(proof.recomputes.values()) == {1}
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def test_checkpointed_backward_after_the_replay_raises():
    model, ids = make("qwen3_moe").train(), tokens()
    routes, _ = record(model, ids)
    enable_activation_checkpointing(model)
    with replay_routing(model, routes):
        loss = model(ids).logits.mean()
    with pytest.raises(RoutingError, match="after the replay had ended"):
        loss.backward()


def test_recompute_does_not_overwrite_a_record():
    model, ids = make("qwen3_moe").train(), tokens()
    enable_activation_checkpointing(model)
    with record_routing(model) as routes:
        loss = model(ids).logits.mean()
        first = dict(routes)
        loss.backward()
    assert all(routes[name] is indices for name, indices in first.items())


def test_a_record_inside_a_replay_holds_what_was_forced():
    model, ids = make("qwen3_moe"), tokens()
    routes, _ = record(model, ids)
    forced = other_experts(routes)
    with replay_routing(model, forced, min_agreement=None):
        inner, _ = record(model, ids)
    assert all(torch.equal(inner[name].long(), forced[name]) for name in forced)


def test_lora_keeps_names_and_gradients():
    peft = pytest.importorskip("peft")
    model, ids = make("qwen3_moe"), tokens()
    routes, _ = record(model, ids)
    config = peft.LoraConfig(
        r=2,
        target_modules=["q_proj"],
        target_parameters=["mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    with replay_routing(adapted, routes, min_agreement=None) as proof:
        adapted(ids).logits.log_softmax(-1)[..., 5].mean().backward()
    assert proof.forwards == dict.fromkeys(routes, 1)
    grads = {n: p.grad for n, p in adapted.named_parameters() if p.requires_grad}
    assert all(g is not None and g.abs().max() > 0 for g in grads.values())
    assert any("gate" in name and "gate_up" not in name for name in grads)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: r.pop("model.layers.2.mlp"), "no routes for layer model.layers.2.mlp"),
        (lambda r: r.update(other=r["model.layers.0.mlp"]), "unknown layer other"),
        (lambda r: r["model.layers.0.mlp"].__setitem__((3, 0), -1), "model.layers.0.mlp: 1 rows lack"),
        (lambda r: r["model.layers.2.mlp"].__setitem__((3, 0), 8), "model.layers.2.mlp: 1 rows lack"),
        (
            lambda r: r["model.layers.2.mlp"].__setitem__((5, 1), r["model.layers.2.mlp"][5, 0].clone()),
            "1 rows name one twice",
        ),
        (lambda r: r.update({"model.layers.2.mlp": r["model.layers.2.mlp"][:-1]}), "integers of shape"),
        (lambda r: r.update({"model.layers.2.mlp": r["model.layers.2.mlp"].float()}), "integers of shape"),
        (lambda r: [r.update({n: i[:-1]}) for n, i in list(r.items())], "24 tokens to 2 experts each"),
        (lambda r: [r.update({n: i[:, :1]}) for n, i in list(r.items())], "24 tokens to 2 experts each"),
    ],
)
def test_routes_that_do_not_fit_raise(spoil, message):
    model, ids = make("qwen3_moe"), tokens()
    routes = {name: indices.to(torch.int16) for name, indices in record(model, ids)[0].items()}
    spoil(routes)
    with pytest.raises(RoutingError, match=message):
        replay(model, ids, routes)


def test_swapped_layers_raise():
    model, ids = make("qwen3_moe"), tokens(2, 30)
    routes, _ = record(model, ids)
    first, last = routes
    swapped = {first: routes[last], last: routes[first]}
    with pytest.raises(RoutingError, match="another layer"):
        replay(model, ids, swapped)


def test_a_replay_that_no_forward_enters_raises():
    model, ids = make("qwen3_moe"), tokens()
    routes, _ = record(model, ids)
    with pytest.raises(RoutingError, match="entered by 0 forwards"), replay_routing(model, routes):
        pass
    with pytest.raises(RoutingError, match="no forward entered"), record_routing(model):
        pass


def test_a_layer_whose_modules_are_bypassed_raises():
    """As by a fused kernel, which computes a block without calling its modules."""
    model, ids = make("qwen3_moe"), tokens()
    routes, _ = record(model, ids)
    model.model.layers[2].register_forward_pre_hook(lambda layer, _args: layer.mlp.__dict__.update(forward=identity))
    with pytest.raises(RoutingError, match=r"model\.layers\.2\.mlp were entered by 0"):
        replay(model, ids, routes)


def identity(hidden: Tensor) -> Tensor:
    return hidden


def test_a_dense_model_is_refused():
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    assert moe_layers(model) == {}
    with (
        pytest.raises(BadInputError, match=r"LlamaForCausalLM .* has no Mixture-of-Experts"),
        record_routing(model),
    ):
        pass
