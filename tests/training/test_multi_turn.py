"""Conversations through the whole loop: trained on, recorded, resumed, and updated with the derived gradient."""

import copy
import dataclasses

import pytest
import torch
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoTokenizer

import gspo.training.loop as loop
from gspo.config import build_config
from gspo.reporting.journal import read_rollouts
from gspo.training.credit import make_batch
from gspo.training.update_metrics import UpdateMetrics
from tests.policy.tiny import gradients, make_rollout, plain_scores, save_tiny, worst
from tests.training.test_learner import make_learner
from tests.training.test_loop import lines, weights

BASE = {
    "task": {"kind": "multi_turn", "environment": "tests.rollout.environments:Words", "held_out": 3, "max_turns": 3},
    "rollout": {"prompts": 4, "group_size": 4, "max_tokens": 4, "stop": ["w1", "w2", "w3", "w4"]},
    "optimizer": {"learning_rate": 3e-3},
    "training": {"steps": 3, "minibatches": 2},
    "checkpoint": {"every": 1},
    "objective": {"name": "gspo_token", "credit": "turn", "ratio_span": "turn", "clip_low": 0.1, "clip_high": 0.1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_words(tmp_path_factory.mktemp("tiny"), "llama")


def save_words(folder, family):
    """A tiny model whose tokenizer takes words apart."""
    path = save_tiny(folder, family, scale=2.0)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save_pretrained(path)
    return path


def settings(folder, tmp_path, name="run", **sections):
    data = {**BASE, "model": {"path": str(folder)}, "run": {"dir": str(tmp_path), "name": name}}
    for section, values in sections.items():
        data[section] = {**data.get(section, {}), **values}
    return build_config(data)


def test_a_run_of_conversations_is_recorded_turn_by_turn_and_resumes_to_the_same_bits(folder, tmp_path):
    seen = []
    whole = loop.train(settings(folder, tmp_path, "whole"), callbacks=[seen.append])
    assert whole.after.accuracy.n == 3
    rollouts = read_rollouts(whole.run / "rollouts" / "step-000002.jsonl.zst")
    assert [dataclasses.replace(r, routes=None) for r in rollouts] == seen[1].rollouts
    for rollout in rollouts:
        assert len(rollout.turns) == len(rollout.response_ids)
        assert rollout.reward == pytest.approx(sum(rollout.turn_rewards))
        assert max(rollout.turns) == len(rollout.turn_rewards) - 1
    assert any(-1 in r.turns for r in rollouts)
    metrics = lines(whole.run / "metrics.jsonl")
    assert metrics[0]["sums"]["response/length"][0] == sum(sum(r.trainable) for r in seen[0].rollouts)
    reached = [r.turn_rewards for r in seen[0].rollouts]
    assert metrics[0]["sums"]["conversation/turns"] == [sum(map(len, reached)), 16]
    second = [rewards[1] for rewards in reached if len(rewards) > 1]
    assert metrics[0]["sums"]["conversation/turn_reward/1"] == [pytest.approx(sum(second)), len(second)]
    assert max(m["mismatch/token_max"] for m in metrics) < 1e-4

    class Stop(Exception):  # noqa: N818
        pass

    def stop_after_two(result):
        if result.step == 2:
            raise Stop

    with pytest.raises(Stop):
        loop.train(settings(folder, tmp_path, "cut"), callbacks=[stop_after_two])
    resumed = loop.train(settings(folder, tmp_path, "cut"), resume=tmp_path / "cut")
    a, b = weights(whole.checkpoint), weights(resumed.checkpoint)
    assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("replay", ["old", "sampler"])
def test_conversations_go_with_routing_replay(tmp_path, replay):
    folder = save_words(tmp_path / "moe", "qwen3_moe")
    config = settings(folder, tmp_path, routing={"replay": replay}, training={"steps": 1}, checkpoint={"every": 0})
    (metrics,) = lines(loop.train(config).run / "metrics.jsonl")
    assert metrics["optimizer/updates"] == 2
    assert metrics["conversation/turns"] > 1
    assert metrics["mismatch/token_max"] < 1e-4


@pytest.mark.parametrize("span", ["trajectory", "turn"])
@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_an_update_by_turn_has_the_derived_gradient(folder, span, layout):
    """-(1/B) sum_i (1/|y_i|) sum_t A_it s_it grad log pi(y_t), with s over the trajectory or over t's turn."""
    config = build_config(
        {
            "model": {"path": "x", "layout": layout},
            "task": {"kind": "multi_turn", "environment": "a:b"},
            "rollout": {"prompts": 2, "group_size": 3},
            "training": {"minibatches": 2, "micro_batch_tokens": 30},
            "objective": {
                "name": "gspo_token", "credit": "turn", "discount": 0.5, "advantage_scale": "none", "ratio_span": span,
                "clip_low": 0.02, "clip_high": 0.03,
            },
            "optimizer": {"learning_rate": 3e-3, "max_grad_norm": 1e9},
        }
    )  # fmt: skip
    learner = make_learner(folder, config)
    start = copy.deepcopy(learner.policy.model)
    groups = [[conversation(slot, sample) for sample in range(3)] for slot in range(2)]
    metrics = UpdateMetrics()
    minibatches = learner.prepare(make_batch(groups, config), metrics)
    learner.update(1, minibatches[:1], metrics)
    moved = copy.deepcopy(learner.policy.model)
    learner.update(1, minibatches[1:], metrics)
    found = gradients(learner.policy.model)

    with torch.no_grad():
        old, _ = plain_scores(start, groups[1], 1.0)
    new, _ = plain_scores(moved, groups[1], 1.0)
    returns = [[a + 0.5 * b, b] for a, b in (r.turn_rewards for r in groups[1])]
    total = 0.0
    for i, rollout in enumerate(groups[1]):
        turns = torch.tensor(rollout.turns)
        own = turns >= 0
        gap = (new[i].detach() - old[i])[: len(turns)].double()
        for turn in (0, 1):
            part = own & (turns == turn)
            s = float(gap[part if span == "turn" else own].mean().exp())
            a = returns[i][turn] - sum(r[turn] for r in returns) / 3
            clipped = (a > 0 and s > 1.03) or (a < 0 and s < 0.98)
            weight = 0.0 if clipped else a * s
            total = total - weight * new[i, : len(turns)][part].sum() / own.sum() / 3
    total.backward()
    assert worst(found, gradients(moved)) < 2e-5


def conversation(slot, sample):
    """Two turns of 3 and 1 + sample tokens, with two tokens of the environment between them."""
    generator = torch.Generator().manual_seed(10 * slot + sample)
    turns = (0, 0, 0, -1, -1, *[1] * (1 + sample))
    ids = tuple(torch.randint(3, 60, (len(turns),), generator=generator).tolist())
    rollout = make_rollout(slot, sample, (5, 6 + slot), ids, tuple(t >= 0 for t in turns))
    rewards = ((1.0, 0.0), (0.0, 1.0), (0.5, 0.25))[sample]
    return dataclasses.replace(rollout, turns=turns, turn_rewards=rewards, reward=sum(rewards))
