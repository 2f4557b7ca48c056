"""Corrections for what the engines disagree by: the update's gradient is that of advantages weighted by hand."""

import copy
import dataclasses
import math

import pytest
import torch

from gspo.errors import BadInputError
from gspo.objectives import group_advantages
from gspo.training.collect import Collected
from gspo.training.credit import make_batch
from gspo.training.rollout_metrics import rollout_metrics
from gspo.training.update_metrics import UpdateMetrics
from tests.policy.tiny import gradients, plain_scores, save_tiny, worst
from tests.training.test_learner import derived_gradient, make_learner, noisy_rollouts, rewarded, settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"), scale=2.0)


def weights_by_hand(training, groups, low, high, *, mask):
    """exp of the mean of log pi_training - log pi_sampler over a response's trainable tokens, cut or rejected."""
    weights = []
    for row, rollout in zip(training.tolist(), (r for g in groups for r in g), strict=True):
        kept = [t for t, flag in enumerate(rollout.trainable) if flag]
        weight = math.exp(sum(row[t] - rollout.sampler_logprobs[t] for t in kept) / len(kept))
        weights.append((weight if low <= weight <= high else 0.0) if mask else min(weight, high))
    return weights


@pytest.mark.parametrize("correction", ["truncate", "mask"])
@pytest.mark.parametrize("minibatches", [1, 2])
def test_gradient_is_that_of_weighted_advantages(folder, correction, minibatches):
    """With one mini-batch the weights come of the update's own pass, with two the last is scored before."""
    likelihoods = {"correction": correction, "correction_low": 0.9, "correction_high": 1.1}
    config = settings(likelihoods=likelihoods, training={"minibatches": minibatches})
    learner = make_learner(folder, config)
    start = copy.deepcopy(learner.policy.model)
    groups = noisy_rollouts(start, 0.4)
    metrics = UpdateMetrics()
    prepared = learner.prepare(make_batch(groups, config), metrics)
    learner.update(1, prepared[:-1], metrics)
    moved = copy.deepcopy(learner.policy.model)
    learner.update(1, prepared[-1:], metrics)
    found = gradients(learner.policy.model)

    rollouts = [r for g in groups for r in g]
    with torch.no_grad():
        old, _ = plain_scores(start, rollouts, 0.8)
    weights = weights_by_hand(old, groups, 0.9, 1.1, mask=correction == "mask")
    rewards = torch.tensor([r.reward for r in rollouts])
    advantages = group_advantages(rewards, torch.arange(12) // 3) * torch.tensor(weights)
    last = slice(0 if minibatches == 1 else 6, 12)
    expected, _ = derived_gradient(moved, old[last], rollouts[last], advantages[last].tolist(), config)
    assert worst(found, expected) < 2e-5
    figures = metrics.as_metrics()
    assert figures["correction/weight"].value == pytest.approx(sum(weights) / 12, rel=1e-4)
    changed = sum(w in (0.0, 1.1) for w in weights)
    assert (figures["correction/changed"].sum, figures["correction/changed"].count) == (changed, 12)
    assert 0 < changed < 12
    assert figures["mismatch/token_max"] > 0.4  # the raw figure


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_minibatch_of_which_all_is_rejected_is_skipped_and_does_not_move_on_momentum(folder, minibatches):
    likelihoods = {"correction": "mask", "correction_low": 0.9999, "correction_high": 1.0001}
    config = settings(likelihoods=likelihoods, training={"minibatches": minibatches})
    learner = make_learner(folder, config)
    exact = make_batch(noisy_rollouts(learner.policy.model, 0.0), config)
    learner.update(1, learner.prepare(exact, UpdateMetrics())[:1], UpdateMetrics())  # makes momentum
    assert learner.version == 1
    before = copy.deepcopy(learner.policy.model.state_dict())

    metrics = UpdateMetrics()
    batch = make_batch(noisy_rollouts(learner.policy.model, 0.4), config)
    learner.update(2, learner.prepare(batch, metrics), metrics)
    figures = metrics.as_metrics()
    assert figures["correction/changed"].sum == figures["correction/changed"].count == 12
    assert (figures["optimizer/skipped"], figures["optimizer/updates"], learner.version) == (minibatches, 0, 1)
    assert all(torch.equal(value, before[name]) for name, value in learner.policy.model.state_dict().items())


def test_weights_by_token_make_advantages_by_token_and_epochs_apply_them_once(folder):
    likelihoods = {"correction": "truncate", "correction_level": "token"}
    config = settings(
        likelihoods=likelihoods, objective={"name": "gspo_token"}, training={"minibatches": 2, "epochs": 2}
    )
    learner = make_learner(folder, config)
    batch = make_batch(noisy_rollouts(learner.policy.model, 0.4), config)
    metrics = UpdateMetrics()
    prepared = learner.prepare(batch, metrics)
    learner.update(1, prepared, metrics)
    for minibatch in prepared:
        for micro in minibatch.micro_batches:
            for row, rollout in enumerate(micro.batch.rollouts):
                length = len(rollout.response_ids)
                given = batch.advantages[batch.rollouts.index(rollout)]
                delta = (micro.batch.old_logprobs - micro.batch.sampler_logprobs)[row, :length]
                weight = torch.where(torch.tensor(rollout.trainable), delta.exp().clamp(max=2), 0)
                torch.testing.assert_close(micro.batch.advantages[row, :length], given * weight)
    assert metrics.as_metrics()["correction/weight"].count == sum(sum(r.trainable) for r in batch.rollouts)


def test_without_correction_nothing_is_reported(folder):
    learner = make_learner(folder, settings())
    metrics = UpdateMetrics()
    learner.update(1, learner.prepare(make_batch(rewarded(), learner.config), metrics), metrics)
    assert not [name for name in metrics.as_metrics() if name.startswith("correction/")]


def test_what_cannot_work_is_one_line_and_what_has_no_effect_is_said():
    with pytest.raises(BadInputError, match=r'needs likelihoods\.old = "recompute"'):
        settings(likelihoods={"old": "sampler", "correction": "mask"})
    with pytest.raises(BadInputError, match='"gspo" takes one per response; use "sequence"'):
        settings(likelihoods={"correction": "mask", "correction_level": "token"})
    settings(likelihoods={"correction": "mask", "correction_level": "token"}, objective={"name": "gspo_token"})
    unused = settings(likelihoods={"correction": "truncate", "correction_low": 0.4}).warnings()
    assert 'likelihoods.correction_low has no effect with likelihoods.correction = "truncate"' in unused


def test_rollouts_without_finite_log_probs_are_counted():
    groups = rewarded()
    groups[1][0] = dataclasses.replace(
        groups[1][0], reward=None, dropped="log-probs are not finite at response token 3", finish_reason="error"
    )
    groups[2][0] = dataclasses.replace(groups[2][0], reward=None, dropped="the verifier crashed")
    metrics = rollout_metrics(Collected(groups, [], 0), settings())
    assert (metrics["mismatch/not_finite"].sum, metrics["mismatch/not_finite"].count) == (1, 12)
    assert metrics["reward/dropped"].sum == 2
