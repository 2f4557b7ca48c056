"""The update against a derivation that shares no code with it: one rollout per forward, plain logits, eq. 10."""

import copy
import dataclasses

import pytest
import torch

from gspo.config import build_config
from gspo.distributed.world import World
from gspo.policy.load import load_policy
from gspo.training.credit import make_batch
from gspo.training.learner import Learner
from gspo.training.update_metrics import UpdateMetrics
from tests.policy.tiny import gradients, plain_scores, random_rollouts, save_tiny, worst

GROUPS = [(9, (6, 1, 10)), (3, (4, 12, 7)), (12, (2, 5, 5)), (4, (8, 3, 3))]
REWARDS = [1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 0.25, 0.0, 1.0, 0.0, 0.0, 1.0]


def settings(**sections):
    base = {
        "model": {"path": "x"},
        "task": {"kind": "function", "function": "a:b"},
        "rollout": {"prompts": 4, "group_size": 3, "temperature": 0.8},
        "training": {"minibatches": 2},
        "objective": {"name": "gspo", "clip_low": 0.02, "clip_high": 0.03},
        "optimizer": {"learning_rate": 3e-3, "max_grad_norm": 1e9},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return build_config(base)


def rewarded(rewards=REWARDS):
    rollouts = random_rollouts(GROUPS, seed=3)
    scored = [dataclasses.replace(r, reward=v) for r, v in zip(rollouts, rewards, strict=True)]
    return [scored[i : i + 3] for i in range(0, 12, 3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"), scale=2.0)


def make_learner(folder, config, **options):
    policy = load_policy(folder, layout=config.model.layout, reference=config.objective.kl_weight > 0, **options)
    return Learner(policy, config, world=World())


def run_update(learner, groups):
    metrics = UpdateMetrics()
    minibatches = learner.prepare(make_batch(groups, learner.config), metrics)
    learner.update(1, minibatches, metrics)
    return metrics.as_metrics()


def derived_gradient(model, old, rollouts, advantages, config):
    """-(1/B) sum_i A_i s_i [kept] grad mean_t log pi(y_t), each mean over trainable tokens (paper, eq. 10)."""
    logprobs, _ = plain_scores(model, rollouts, config.rollout.temperature)
    total = 0.0
    for i, rollout in enumerate(rollouts):
        trainable = torch.tensor(rollout.trainable)
        mine = logprobs[i, : len(trainable)][trainable]
        s = float((mine.detach() - old[i, : len(trainable)][trainable]).double().mean().exp())
        a = advantages[i]
        clipped = (a > 0 and s > 1 + config.objective.clip_high) or (a < 0 and s < 1 - config.objective.clip_low)
        total = total - (0.0 if clipped else a * s) * mine.mean() / len(rollouts)
    total.backward()
    return gradients(model), logprobs.detach()


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@pytest.mark.parametrize("tokens", [40, 10_000])
def test_second_update_has_the_derived_gradient(folder, layout, tokens):
    config = settings(model={"layout": layout}, training={"micro_batch_tokens": tokens})
    learner = make_learner(folder, config)
    start = copy.deepcopy(learner.policy.model)
    groups = rewarded()
    metrics = UpdateMetrics()
    minibatches = learner.prepare(make_batch(groups, config), metrics)
    assert sum(len(m.micro_batches) for m in minibatches) > 2 if tokens == 40 else len(minibatches) == 2

    learner.update(1, minibatches[:1], metrics)
    moved = copy.deepcopy(learner.policy.model)
    learner.update(1, minibatches[1:], metrics)
    found = gradients(learner.policy.model)

    rollouts = groups[2] + groups[3]
    with torch.no_grad():
        old, _ = plain_scores(start, rollouts, 0.8)
    advantages = []
    for group in groups[2:]:
        r = torch.tensor([x.reward for x in group], dtype=torch.float64)
        advantages += ((r - r.mean()) / (r.var(correction=0).sqrt() + 1e-6)).tolist()
    expected, _ = derived_gradient(moved, old, rollouts, advantages, config)
    assert worst(found, expected) < 2e-5
    figures = metrics.as_metrics()
    assert figures["optimizer/updates"] == 2
    assert 0 < figures["clip/sequence_removed"].sum < 12


def test_without_signal_nothing_moves_and_it_is_counted(folder):
    config = settings(training={"minibatches": 4})
    learner = make_learner(folder, config)
    before = copy.deepcopy(learner.policy.model.state_dict())
    metrics = run_update(learner, rewarded([0.1] * 12))
    assert (metrics["optimizer/skipped"], metrics["optimizer/updates"]) == (4, 0)
    assert all(torch.equal(before[k], v) for k, v in learner.policy.model.state_dict().items())
    assert learner.version == 0


def test_old_from_the_sampler_needs_no_scoring_pass(folder, monkeypatch):
    config = settings(likelihoods={"old": "sampler"})
    learner = make_learner(folder, config)
    groups = rewarded()
    for g, group in enumerate(groups):
        with torch.no_grad():
            logprobs, _ = plain_scores(learner.policy.model, group, 0.8)
        groups[g] = [
            dataclasses.replace(r, sampler_logprobs=tuple(row[: len(r.response_ids)].tolist()))
            for r, row in zip(group, logprobs, strict=True)
        ]
    reference = make_learner(folder, settings())
    expected = run_update(reference, groups)
    monkeypatch.setattr(type(learner.policy), "score", lambda *_, **__: pytest.fail("scored"))
    found = run_update(learner, groups)
    assert found["clip/sequence_removed"] == expected["clip/sequence_removed"]
    assert found["mismatch/token"].value < 1e-5
    for a, b in zip(learner.policy.model.parameters(), reference.policy.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=0)


def test_first_minibatch_has_ratio_one_and_is_scored_once(folder, monkeypatch):
    config = settings(training={"minibatches": 1})
    learner = make_learner(folder, config)
    monkeypatch.setattr(type(learner.policy), "score", lambda *_, **__: pytest.fail("scored twice"))
    metrics = run_update(learner, rewarded())
    assert (metrics["ratio/log_min"], metrics["ratio/log_max"]) == (0.0, 0.0)


def fed_tokens(learner, groups):
    """Tokens that the model computes in one whole update."""
    fed = []
    handle = learner.policy.model.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: fed.append(args[0].numel())
    )
    run_update(learner, groups)
    handle.remove()
    return sum(fed)


@pytest.mark.parametrize("minibatches", [1, 2, 4])
@pytest.mark.parametrize("old", ["recompute", "sampler"])
@pytest.mark.parametrize("kl_weight", [0.0, 0.1])
def test_nothing_is_scored_twice(folder, monkeypatch, minibatches, old, kl_weight):
    """One pass for the update; one more for old log-probs, but of the first mini-batch and of a sampler's never."""
    config = settings(
        training={"minibatches": minibatches}, likelihoods={"old": old}, objective={"kl_weight": kl_weight}
    )
    learner = make_learner(folder, config)
    references = []
    reference = type(learner.policy).reference
    monkeypatch.setattr(
        type(learner.policy), "reference", lambda *a, **k: references.append(a[1].fed_tokens) or reference(*a, **k)
    )
    groups = rewarded()
    # The tokens of a group, its prompt once, no response's last.
    sizes = [9 + 5 + 0 + 9, 3 + 3 + 11 + 6, 12 + 1 + 4 + 4, 4 + 7 + 2 + 2]
    scored_before = sum(sizes[4 // minibatches :]) if old == "recompute" else 0
    assert fed_tokens(learner, groups) == sum(sizes) + scored_before
    assert sum(references) == (sum(sizes) if kl_weight else 0)


def test_masked_truncated_and_dropped_rollouts(folder):
    """A masked truncated response counts in the baseline and in B, a dropped one in neither."""
    config = settings(training={"minibatches": 1}, reward={"truncated": "mask"})
    learner = make_learner(folder, config)
    groups = rewarded()
    groups[0][0] = dataclasses.replace(groups[0][0], finish_reason="length")
    groups[1][2] = dataclasses.replace(groups[1][2], reward=None, dropped="the verifier crashed")
    batch = make_batch(groups, config)
    minibatch = learner.prepare(batch, UpdateMetrics())[0]
    assert minibatch.totals.sequences == 11
    assert minibatch.totals.tokens == sum(sum(r.trainable) for g in groups for r in g) - sum(
        sum(r.trainable) for r in (groups[0][0], groups[1][2])
    )
    # Rewards 1, 0, .5: the baseline of the other two is .5 with the truncated one in it.
    assert batch.advantages[:3].tolist() == pytest.approx([1.5**0.5, -(1.5**0.5), 0.0], abs=1e-4)
    # Two are left of the second group: rewards 0 and 1.
    assert batch.advantages[3:5].tolist() == pytest.approx([-1.0, 1.0], abs=1e-4)


def test_kl_gradient_pulls_back_to_the_reference(folder):
    """Without signal the loss is the KL alone: its first gradient at the reference is 0, then it is not."""
    config = settings(objective={"kl_weight": 0.5}, training={"minibatches": 1})
    learner = make_learner(folder, config)
    metrics = run_update(learner, rewarded([0.1] * 12))
    assert metrics["policy/kl"].value == pytest.approx(0.0, abs=1e-6)
    with torch.no_grad():
        for p in learner.policy.model.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    moved = copy.deepcopy(learner.policy.model)
    metrics = UpdateMetrics()
    groups = rewarded([0.1] * 12)
    minibatches = learner.prepare(make_batch(groups, config), metrics)
    learner.update(1, minibatches, metrics)
    found = gradients(learner.policy.model)
    rollouts = [r for g in groups for r in g]
    with torch.no_grad():
        reference, _ = plain_scores(learner.policy.frozen.model, rollouts, 0.8)
    logprobs, _ = plain_scores(moved, rollouts, 0.8)
    mask = torch.zeros_like(logprobs, dtype=torch.bool)
    for i, r in enumerate(rollouts):
        mask[i, : len(r.trainable)] = torch.tensor(r.trainable)
    # d k3 / d log pi = 1 - pi_ref / pi, a constant weight on each token's log-prob.
    weight = 1 - (reference - logprobs.detach()).exp()
    (0.5 * (weight * logprobs)[mask].sum() / mask.sum()).backward()
    assert worst(found, gradients(moved)) < 2e-5


def test_a_non_finite_gradient_is_not_applied(folder):
    config = settings(training={"minibatches": 1})
    learner = make_learner(folder, config)
    before = copy.deepcopy(learner.policy.model.state_dict())
    groups = rewarded()
    parameter = learner._parameters[0]
    handle = parameter.register_hook(lambda g: g * float("nan"))
    metrics = run_update(learner, groups)
    handle.remove()
    assert (metrics["optimizer/non_finite"], learner.version) == (1, 0)
    assert all(torch.equal(before[k], v) for k, v in learner.policy.model.state_dict().items())


def noisy_rollouts(model, std):
    """Groups whose sampler log-probs are the model's plus noise of `std` nats a token."""
    generator = torch.Generator().manual_seed(0)
    groups = rewarded()
    for g, group in enumerate(groups):
        with torch.no_grad():
            logprobs, _ = plain_scores(model, group, 0.8)
        noisy = logprobs + std * torch.randn(logprobs.shape, generator=generator)
        groups[g] = [
            dataclasses.replace(r, sampler_logprobs=tuple(row[: len(r.response_ids)].tolist()))
            for r, row in zip(group, noisy, strict=True)
        ]
    return groups


@pytest.mark.parametrize(("std", "says"), [(0.5, True), (1e-4, False)])
def test_a_clip_range_below_the_engines_noise_is_said_at_the_first_update(folder, std, says):
    learner = make_learner(folder, settings(likelihoods={"old": "sampler"}, training={"minibatches": 1}))
    rollouts = noisy_rollouts(learner.policy.model, std)
    dull = make_batch([[dataclasses.replace(r, reward=0.0) for r in group] for group in rollouts], learner.config)
    metrics = UpdateMetrics()
    learner.update(1, learner.prepare(dull, metrics), metrics)
    assert metrics.warning is None  # nothing was scored
    batch = make_batch(rollouts, learner.config)
    metrics = UpdateMetrics()
    learner.update(2, learner.prepare(batch, metrics), metrics)
    assert (metrics.warning is not None) == says
    if metrics.warning is not None:
        assert "below the numerical noise" in metrics.warning
    later = UpdateMetrics()
    learner.update(3, learner.prepare(batch, later), later)
    assert later.warning is None


def test_dual_clip_bounds_the_ratio_of_bad_responses(folder):
    config = settings(training={"minibatches": 1, "epochs": 2}, optimizer={"learning_rate": 3e-2})
    bounded = settings(
        training={"minibatches": 1, "epochs": 2}, optimizer={"learning_rate": 3e-2}, objective={"dual_clip": 1.05}
    )
    removed = [run_update(make_learner(folder, c), rewarded())["clip/sequence_removed"].sum for c in (config, bounded)]
    assert removed[1] > removed[0]


def test_a_minibatch_whose_rollouts_were_all_dropped_is_skipped(folder):
    config = settings(training={"minibatches": 4})
    groups = rewarded()
    groups[1] = [dataclasses.replace(r, reward=None, dropped="x") for r in groups[1]]
    metrics = run_update(make_learner(folder, config), groups)
    assert (metrics["optimizer/skipped"], metrics["optimizer/updates"]) == (1, 3)
    nothing = [[dataclasses.replace(r, reward=None, dropped="x") for r in g] for g in groups]
    assert run_update(make_learner(folder, config), nothing)["optimizer/skipped"] == 4


def emptied(groups, number):
    """The groups with the responses of one of them cut to nothing."""
    empty = {"response_ids": (), "sampler_logprobs": (), "trainable": ()}
    groups = list(groups)
    groups[number] = [dataclasses.replace(r, **empty) for r in groups[number]]
    return groups


@pytest.mark.parametrize("sections", [{}, {"objective": {"kl_weight": 0.1}}])
def test_a_micro_batch_of_empty_responses_changes_nothing(folder, sections):
    """Cut apart from the others, the empty responses make a micro-batch without a forward pass."""
    found = []
    for tokens in (30, 10_000):
        config = settings(training={"minibatches": 2, "micro_batch_tokens": tokens}, **sections)
        learner = make_learner(folder, config)
        batch = make_batch(emptied(rewarded(), 0), config)
        if tokens == 30:
            micro = [m for m in learner.prepare(batch, UpdateMetrics())[0].micro_batches if not m.batch.mask.any()]
            assert len(micro) == 1
            assert len(micro[0].batch) == 3
        found.append((run_update(learner, emptied(rewarded(), 0)), list(learner.policy.model.parameters())))
    (apart, mine), (together, others) = found
    assert apart["optimizer/updates"] == together["optimizer/updates"] == 2
    assert apart["objective/loss"].value == pytest.approx(together["objective/loss"].value, abs=1e-6)
    for a, b in zip(mine, others, strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=0)
