import itertools
from contextlib import contextmanager, nullcontext

import pytest
import torch

from gspo.config import LoraConfig
from gspo.policy.adapters import add_lora
from gspo.policy.layout import build_layout
from gspo.policy.load import enable_activation_checkpointing, join_tied_gradients
from gspo.policy.model import Policy, ScoringModel
from gspo.policy.routing import replay_routing
from gspo.types import Rollout
from tests.policy.tiny import (
    FAMILIES,
    HYBRIDS,
    cut_routes,
    gradients,
    make_rollout,
    plain_scores,
    random_rollouts,
    tiny_model,
    worst,
)

TEMPERATURE = 0.7


def policy_of(model, kind="shared", *, exact_head=True, layout_attention=True) -> Policy:
    return Policy(ScoringModel(model, exact_head, layout_attention), None, (1,), 0, 128, kind)


def loss_of(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    first, second = torch.randn(2, *logprobs.shape, generator=generator)
    return (logprobs * first + entropy * second).sum()


def compare_with_plain(model, policy: Policy, rollouts: list[Rollout] | None = None) -> None:
    """Log-probs, entropies and every gradient against one forward per rollout."""
    rollouts = rollouts or random_rollouts()
    expected = plain_scores(model, rollouts, TEMPERATURE)
    loss_of(*expected).backward()
    reference = gradients(model)
    with policy.forward(policy.layout(rollouts), temperature=TEMPERATURE) as scores:
        loss_of(scores.logprobs, scores.entropy).backward()
    torch.testing.assert_close(scores.logprobs, expected[0], rtol=1e-5, atol=5e-6)
    torch.testing.assert_close(scores.entropy, expected[1], rtol=1e-5, atol=5e-6)
    assert worst(gradients(model), reference) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_prompts_give_the_scores_and_gradients_of_one_rollout_at_a_time(family):
    model = tiny_model(family)
    compare_with_plain(model, policy_of(model))


@pytest.mark.parametrize("exact_head", [True, False])
@pytest.mark.parametrize(("family", "tied"), [("llama_tied", True), ("gemma3", True), ("llama", False)])
def test_a_lookup_that_adds_to_the_heads_gradient_leaves_it_equal_and_dense(family, tied, exact_head):
    model = tiny_model(family)
    policy, rollouts = policy_of(model, exact_head=exact_head), random_rollouts()
    parts = [policy.layout([r for r in rollouts if r.slot == slot]) for slot in sorted({r.slot for r in rollouts})]

    def accumulated() -> dict[str, torch.Tensor]:
        for layout in parts:
            with policy.forward(layout, temperature=TEMPERATURE) as scores:
                loss_of(scores.logprobs, scores.entropy).backward()
        assert {p.grad.layout for p in model.parameters()} == {torch.strided}
        return gradients(model)

    expected = accumulated()
    join_tied_gradients(model)
    assert model.get_input_embeddings().sparse == tied
    assert worst(accumulated(), expected) < 1e-6


@pytest.mark.parametrize(("kind", "ours"), [("packed", True), ("packed", False), ("padded", False)])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe"])
def test_so_do_packed_and_padded(family, kind, ours):
    model = tiny_model(family)
    compare_with_plain(model, policy_of(model, kind, layout_attention=ours))


@pytest.mark.parametrize("kind", ["shared", "packed", "padded"])
def test_an_eos_that_pads_too_is_scored_and_learned_like_any_other_token(kind):
    eos = 1
    responses = [(5, 9, eos), (eos,), (7, eos, 8, 4, eos)]
    rollouts = [make_rollout(0, sample, (4, eos, 6), response) for sample, response in enumerate(responses)]
    model = tiny_model("llama")
    policy = Policy(ScoringModel(model, True, kind != "padded"), None, (eos,), eos, 128, kind)
    compare_with_plain(model, policy, rollouts)
    assert policy.score(policy.layout(rollouts), temperature=1.0).mask.sum(1).tolist() == [3, 1, 5]


@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrids_are_exact_when_padded(family):
    model = tiny_model(family, scale=2.0)
    compare_with_plain(model, policy_of(model, "padded", layout_attention=False))


@pytest.mark.parametrize("kind", ["shared", "padded"])
def test_a_head_that_is_not_understood_gives_the_same_through_logits(kind):
    model = tiny_model("gemma2")
    compare_with_plain(model, policy_of(model, kind, exact_head=False))


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "qwen3_moe"])
def test_checkpointing_and_lora_change_no_gradient_and_feed_no_token_twice(family, checkpointing, lora):
    model = tiny_model(family)
    adapter = grown_adapter(model) if lora else None
    rollouts = random_rollouts()
    expected = plain_scores(model, rollouts, TEMPERATURE)
    loss_of(*expected).backward()
    reference = gradients(model)
    assert len(reference) == sum(p.requires_grad for p in model.parameters())
    if checkpointing:
        enable_activation_checkpointing(model)
    policy = policy_of(model)
    policy.adapter = adapter
    counting = feeding(model, rollouts, checkpointing)
    with counting, policy.forward(policy.layout(rollouts), temperature=TEMPERATURE) as scores:
        loss_of(scores.logprobs, scores.entropy).backward()
    torch.testing.assert_close(scores.logprobs, expected[0], rtol=1e-5, atol=5e-6)
    assert worst(gradients(model), reference) < 1e-5


@contextmanager
def feeding(model, rollouts, checkpointing):
    """One update inside must feed each prompt once and each response but its last token, twice if recomputed."""
    fed = []
    # A module inside the layer: releases differ in whether a layer's own hooks run in the recompute.
    inside = model.model.layers[0].input_layernorm
    hook = inside.register_forward_pre_hook(lambda _, args: fed.append(args[0].shape[:-1].numel()))
    yield
    hook.remove()
    prompts = {r.slot: len(r.prompt.ids) for r in rollouts}
    needed = sum(prompts.values()) + sum(max(len(r.response_ids) - 1, 0) for r in rollouts)
    assert fed == [needed] * (2 if checkpointing else 1)


def grown_adapter(model, size=0.05):
    """An adapter as training would leave it: no factor is zero."""
    adapter = add_lora(model, LoraConfig(rank=2))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    return adapter


@pytest.mark.parametrize(
    ("family", "lora", "checkpointing", "kind"),
    [
        *itertools.product(["qwen3_moe", "gpt_oss"], [False, True], [False, True], ["shared"]),
        ("qwen3_moe", False, False, "packed"),
        ("qwen3_moe", False, True, "padded"),
    ],
)
def test_replayed_routes_give_the_scores_and_gradients_of_one_rollout_at_a_time(family, lora, checkpointing, kind):
    model = tiny_model(family)
    rollouts = random_rollouts(seed=1)
    policy = policy_of(model, kind)
    layout = policy.layout(rollouts)
    routes = policy.score(layout, temperature=TEMPERATURE, record=True).routes
    with torch.no_grad():  # the routers as an update would leave them: some tokens now choose other experts
        for name, parameter in model.named_parameters():
            if name.endswith(("router.weight", "mlp.gate.weight")):
                parameter.add_(
                    0.3 * parameter.std() * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
                )
    natural = policy.score(layout, temperature=TEMPERATURE, record=True).routes
    assert any(not torch.equal(natural[name], routes[name]) for name in routes)
    if lora:
        grown_adapter(model, 0.02)
    expected = [torch.zeros(layout.rows, layout.columns) for _ in range(2)]
    cut = {name: cut_routes(layout, chosen.long().numpy()) for name, chosen in routes.items()}
    for row, rollout in enumerate(rollouts):
        alone = build_layout([rollout], "padded")
        if alone.places.numel():
            own = {name: torch.from_numpy(cut[name][row]) for name in cut}
            with replay_routing(model, own, min_agreement=None):
                logits = model(input_ids=alone.input_ids, use_cache=False).logits[0][alone.source]
            logs = torch.log_softmax(logits / TEMPERATURE, -1)
            expected[0][row, alone.places] = logs.gather(1, alone.targets[:, None]).squeeze(1)
            expected[1][row, alone.places] = -(logs.exp() * logs).sum(-1)
    loss_of(*expected).backward()
    reference = gradients(model)
    if checkpointing:
        enable_activation_checkpointing(model)
    counting = feeding(model, rollouts, checkpointing) if kind == "shared" else nullcontext()
    with counting, policy.forward(layout, temperature=TEMPERATURE, routes=routes) as scores:
        loss_of(scores.logprobs, scores.entropy).backward()
    torch.testing.assert_close(scores.logprobs, expected[0], rtol=1e-5, atol=5e-6)
    assert worst(gradients(model), reference) < 1e-5


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("family", "replay"),
    [("llama", False), ("gemma3", False), ("gpt_oss", False), ("qwen3_moe", False), ("qwen3_moe", True)],
)
def test_a_prompt_token_reaches_all_its_responses_and_no_other_group(family, replay, checkpointing, lora):
    """In the forward of an update, where checkpointing would drop a cache and the responses with it their prompt."""
    model = tiny_model(family)
    policy = policy_of(model)
    rollouts = random_rollouts([(3, (4, 5)), (3, (6, 2, 3)), (4, (5,))])
    policy.adapter = grown_adapter(model, 0.02) if lora else None
    routes = policy.score(policy.layout(rollouts), temperature=TEMPERATURE, record=True).routes if replay else None
    if checkpointing:
        enable_activation_checkpointing(model)
    changed = [
        make_rollout(r.slot, r.sample, (7, *r.prompt.ids[1:]), r.response_ids, r.trainable) if r.slot == 1 else r
        for r in rollouts
    ]
    found = []
    for each in (rollouts, changed):
        with policy.forward(policy.layout(each), temperature=TEMPERATURE, routes=routes) as scores:
            scores.logprobs.sum().backward()
        found.append(scores.logprobs.detach())
    moved = (found[0] - found[1]).abs()
    for row, rollout in enumerate(rollouts):
        scored = moved[row][scores.mask[row]]
        assert bool((scored > 1e-4).all()) if rollout.slot == 1 else bool((scored < 1e-5).all())


def test_a_backward_outside_the_context_fails_under_checkpointing():
    model = tiny_model("llama")
    enable_activation_checkpointing(model)
    policy = policy_of(model)
    with policy.forward(policy.layout(random_rollouts()), temperature=TEMPERATURE) as scores:
        pass
    with pytest.raises(RuntimeError, match=r"checkpoint|saved"):
        scores.logprobs.sum().backward()


def test_the_reference_is_the_model_without_its_adapter():
    model = tiny_model("llama")
    rollouts = random_rollouts()
    layout = policy_of(model).layout(rollouts)
    before = policy_of(model).score(layout, temperature=TEMPERATURE).logprobs
    policy = policy_of(model)
    policy.adapter = grown_adapter(model)
    assert torch.equal(policy.reference(layout, temperature=TEMPERATURE).logprobs, before)
    assert not torch.allclose(policy.score(layout, temperature=TEMPERATURE).logprobs, before)


def test_bfloat16_autocast_scores_in_float32_and_trains_float32_masters():
    model = tiny_model("llama")
    rollouts = random_rollouts()
    expected, _ = plain_scores(model, rollouts, TEMPERATURE)
    policy = policy_of(model)
    policy.scorer = ScoringModel(model, True, True, torch.bfloat16)

    def update() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        with policy.forward(policy.layout(rollouts), temperature=TEMPERATURE) as scores:
            scores.logprobs.sum().backward()
        return scores.logprobs.detach(), gradients(model)

    logprobs, found = update()
    assert logprobs.dtype == torch.float32
    assert 1e-5 < (logprobs - expected).abs().max() < 0.2
    assert {name: g.dtype for name, g in found.items()} == {n: torch.float32 for n, _ in model.named_parameters()}
    enable_activation_checkpointing(model)  # layers are recomputed in bfloat16 too
    again, recomputed = update()
    assert torch.equal(again, logprobs)
    assert worst(recomputed, found) < 1e-6


def test_score_holds_no_graph_and_equals_forward():
    policy = policy_of(tiny_model("llama"))
    layout = policy.layout(random_rollouts())
    scores = policy.score(layout, temperature=TEMPERATURE)
    with policy.forward(layout, temperature=TEMPERATURE) as grown:
        assert torch.equal(scores.logprobs, grown.logprobs)
    assert not scores.logprobs.requires_grad
    assert scores.logprobs.dtype == torch.float32


def test_columns_widen_the_result():
    policy = policy_of(tiny_model("llama"))
    rollouts = random_rollouts()
    wide = policy.score(policy.layout(rollouts, columns=20), temperature=TEMPERATURE)
    narrow = policy.score(policy.layout(rollouts), temperature=TEMPERATURE)
    assert wide.logprobs.shape == (len(rollouts), 20)
    assert torch.equal(wide.logprobs[:, :12], narrow.logprobs)


def test_rollouts_without_a_scored_token_score_zero():
    policy = policy_of(tiny_model("llama"))
    scores = policy.score(policy.layout(random_rollouts([(3, (0, 0))]), columns=2), temperature=1.0)
    assert not scores.logprobs.any()
    assert not scores.mask.any()
    layout = policy.layout(random_rollouts([(3, (0, 0))]), columns=2)
    with policy.forward(layout, temperature=1.0) as grown:
        grown.logprobs.sum().backward()
    assert all(parameter.grad is None for parameter in policy.model.parameters())
