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
