import dataclasses

import pytest
import torch

from gspo.config import build_config
from gspo.training.credit import has_signal, make_batch
from tests.policy.tiny import make_rollout


def settings(**reward):
    return build_config({"model": {"path": "x"}, "task": {"kind": "function", "function": "a:b"}, "reward": reward})


def group(*rewards, **changes):
    return [
        dataclasses.replace(make_rollout(0, i, (5, 6), (7,) * (i + 1)), reward=r, **changes)
        for i, r in enumerate(rewards)
    ]


def test_rows_are_padded_and_groups_keep_their_place():
    dropped = [dataclasses.replace(r, reward=None, dropped="x") for r in group(0.0, 0.0)]
    batch = make_batch([group(1.0, 0.0), dropped, group(0.0, 3.0)], settings())
    assert batch.group_ids.tolist() == [0, 0, 2, 2]
    assert batch.mask.tolist() == [[True, False], [True, True]] * 2
    assert batch.advantages.tolist() == pytest.approx([1.0, -1.0, -1.0, 1.0], abs=1e-5)


def test_penalty_is_subtracted_before_the_baseline():
    cut = group(1.0, 1.0)
    cut[1] = dataclasses.replace(cut[1], finish_reason="length")
    assert make_batch([cut], settings()).advantages.tolist() == [0.0, 0.0]
    batch = make_batch([cut], settings(truncated="penalize", truncated_penalty=0.5))
    assert batch.rewards.tolist() == [1.0, 0.5]
    assert batch.advantages.tolist() == pytest.approx([1.0, -1.0], abs=1e-5)


def test_a_masked_truncated_response_leaves_the_loss_and_stays_in_the_baseline():
    cut = group(1.0, 0.0)
    cut[1] = dataclasses.replace(cut[1], finish_reason="length")
    batch = make_batch([cut], settings(truncated="mask"))
    assert batch.mask.tolist() == [[True, False], [False, False]]
    assert batch.advantages.tolist() == pytest.approx([1.0, -1.0], abs=1e-5)


def test_signal_ignores_dropped_rollouts():
    rollouts = group(1.0, 0.0)
    assert has_signal(rollouts, settings())
    rollouts[1] = dataclasses.replace(rollouts[1], reward=None, dropped="x")
    assert not has_signal(rollouts, settings())
    assert not has_signal([], settings())


def test_select_cuts_to_the_longest_response():
    batch = make_batch([group(1.0, 0.0, 0.5)], settings())
    part = batch.select([1, 0])
    assert part.mask.tolist() == [[True, True], [True, False]]
    assert torch.equal(part.rewards, torch.tensor([0.0, 1.0]))
    assert [r.sample for r in part.rollouts] == [1, 0]


def credit(objective, **reward):
    """A config for conversations, or for judged tokens."""
    task = (
        {"kind": "multi_turn", "environment": "a:b"}
        if "turn" in objective.values()
        else {"kind": "function", "function": "a:b"}
    )
    return build_config(
        {
            "model": {"path": "x"},
            "task": task,
            "objective": {"name": "gspo_token", "advantage_scale": "none", **objective},
            "reward": reward,
        }
    )


def conversations(**changes):
    """Two: turns of 2, 1 and 1 tokens with an environment's between, rewards 1, 0, 2; one turn with reward 0."""
    long = make_rollout(0, 0, (5, 6), (7,) * 6, (True, True, False, True, False, True))
    long = dataclasses.replace(long, reward=3.0, turns=(0, 0, -1, 1, -1, 2), turn_rewards=(1.0, 0.0, 2.0))
    short = make_rollout(0, 1, (5, 6), (7,) * 3, (True, True, True))
    short = dataclasses.replace(short, reward=0.0, turns=(0, 0, 0), turn_rewards=(0.0,), **changes)
    return [long, short]


def test_turns_are_credited_against_the_same_turn():
    batch = make_batch([conversations()], credit({"credit": "turn"}))
    assert batch.advantages.tolist() == [[0.5, 0.5, 0, 0, 0, 0], [-0.5, -0.5, -0.5, 0, 0, 0]]
    assert batch.spans is None
    to_go = make_batch([conversations()], credit({"credit": "turn", "discount": 1.0}))
    assert to_go.advantages[:, 0].tolist() == [1.5, -1.5]


def test_spans_are_the_turns_and_are_cut_with_the_rows():
    batch = make_batch([conversations()], credit({"ratio_span": "turn"}))
    assert batch.advantages.tolist() == [1.5, -1.5]
    assert batch.spans.tolist() == [[0, 0, -1, 1, -1, 2], [0, 0, 0, -1, -1, -1]]
    assert batch.select([1]).spans.tolist() == [[0, 0, 0]]


def test_the_penalty_of_a_cut_conversation_is_its_last_turns():
    cut = conversations(finish_reason="length")
    config = credit({"credit": "turn"}, truncated="penalize", truncated_penalty=0.5)
    assert make_batch([cut], config).advantages[1, 0] == -0.75
    whole, _ = conversations()
    cut = dataclasses.replace(whole, sample=1, finish_reason="length")
    assert make_batch([[whole, cut]], config).advantages.tolist() == [[0, 0, 0, 0, 0, 0.25], [0, 0, 0, 0, 0, -0.25]]


def test_a_group_of_equal_sums_may_have_signal_by_turn():
    a, b = conversations()
    b = dataclasses.replace(a, reward=3.0, turn_rewards=(0.0, 1.0, 2.0))
    assert not has_signal([a, b], credit({"ratio_span": "turn"}))
    assert has_signal([a, b], credit({"credit": "turn"}))


def test_tokens_are_credited_by_what_was_said_of_them():
    judged, whole = group(0.5, 1.0)
    judged = dataclasses.replace(make_rollout(0, 0, (5, 6), (7, 8)), reward=0.5, token_rewards=(1.0, 0.0))
    batch = make_batch([[judged, whole]], credit({"credit": "token"}))
    assert batch.advantages.tolist() == [[0.25, -0.75], [0.25, 0.25]]
    assert has_signal([judged, whole], credit({"credit": "token"}))
    assert not has_signal([], credit({"credit": "token"}))
