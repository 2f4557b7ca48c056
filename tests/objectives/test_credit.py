"""Advantages relative to the group."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo.objectives import group_advantages, token_advantages, turn_advantages

SCALES = ("std", "sample_std", "none")


def advantages(rewards: list[float], ids: list[int], scale: str = "std") -> list[float]:
    return group_advantages(torch.tensor(rewards), torch.tensor(ids), scale=scale).tolist()


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("std", [math.sqrt(2), -1 / math.sqrt(2), -1 / math.sqrt(2)]),
        ("sample_std", [2 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3)]),
        ("none", [2 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_one_of_three_right(scale: str, expected: list[float]) -> None:
    assert advantages([1.0, 0.0, 0.0], [0, 0, 0], scale) == pytest.approx(expected, rel=5e-6)


groups = st.lists(st.tuples(st.integers(0, 3), st.integers(-8, 8)), min_size=1, max_size=20)


@given(groups, st.sampled_from(SCALES))
def test_groups_of_any_size_in_any_order(pairs: list[tuple[int, int]], scale: str) -> None:
    ids, rewards = [p[0] * 17 - 5 for p in pairs], [p[1] / 4 for p in pairs]
    found = advantages(rewards, ids, scale)
    for key in set(ids):
        members = np.array([r for r, i in zip(rewards, ids, strict=True) if i == key])
        mine = [a for a, i in zip(found, ids, strict=True) if i == key]
        if members.max() == members.min():
            assert mine == [0.0] * len(members)
            continue
        spread = {"none": 1.0, "std": members.std(), "sample_std": members.std(ddof=1)}[scale]
        np.testing.assert_allclose(mine, (members - members.mean()) / spread, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", SCALES)
def test_no_variance_is_exactly_zero(scale: str) -> None:
    assert advantages([0.1] * 8 + [0.7], [0] * 8 + [1], scale) == [0.0] * 9


def test_rewards_that_differ_by_rounding_alone_are_not_blown_up() -> None:
    low = torch.tensor(0.1)
    high = torch.nextafter(low, torch.tensor(1.0))
    found = group_advantages(torch.stack([low, high]), torch.zeros(2, dtype=torch.int64))
    assert 0 < found[1].item() < 0.01


def test_a_dropped_rollout_counts_as_not_sampled() -> None:
    keep = [0, 1, 3]
    rewards, ids = [1.0, 0.0, 5.0, 0.0], [0, 0, 0, 0]
    assert advantages([rewards[i] for i in keep], [ids[i] for i in keep]) == advantages([1.0, 0.0, 0.0], [7, 7, 7])


def test_no_rows_and_unknown_scale() -> None:
    empty = group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert empty.shape == (0,)
    assert empty.dtype == torch.float32
    with pytest.raises(Exception, match="scale"):
        group_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.int64), scale="variance")


@pytest.mark.parametrize("ids", [[0, 0, 1], [[0], [0]]])
def test_every_reward_needs_its_group(ids: object) -> None:
    with pytest.raises(ValueError, match=r"rewards and group_ids: found shapes \[2\] and"):
        inspect.unwrap(group_advantages)(torch.tensor([1.0, 0.0]), torch.tensor(ids))


def test_nothing_waits_for_the_device() -> None:
    """On `meta` there are no values: anything that asks for one raises."""
    ids = torch.zeros(4, dtype=torch.int64, device="meta")
    assert group_advantages(torch.zeros(4, device="meta"), ids).is_meta
    turns = torch.zeros(4, 7, dtype=torch.int64, device="meta")
    assert turn_advantages(torch.zeros(4, 2, device="meta"), ids, turns, discount=0.5).is_meta


def test_a_step_can_be_right_and_the_next_wrong() -> None:
    """One response's first step at +0.7, its second at -0.3."""
    found = turn_advantages(
        torch.tensor([[1.4, 0.0], [0.0, 0.6]]),
        torch.tensor([0, 0]),
        torch.tensor([[0, 0, 1, -1], [0, 1, 1, 1]]),
        scale="none",
    )
    torch.testing.assert_close(found, torch.tensor([[0.7, 0.7, -0.3, 0.0], [-0.7, 0.3, 0.3, 0.3]]))


def test_the_baseline_is_that_of_the_same_turn_among_those_who_reached_it() -> None:
    rewards = torch.tensor([[1.0, 5.0, 9.0], [3.0, 7.0, math.nan], [2.0, math.inf, 1e4], [8.0, 1.0, 0.0]])
    turns = torch.tensor([[0, 1, 2], [0, 1, -1], [0, -1, -1], [0, 1, 2]])
    found = turn_advantages(rewards, torch.tensor([4, 4, 4, 9]), turns, scale="none")
    expected = [[-1.0, -1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    torch.testing.assert_close(found, torch.tensor(expected))


@given(st.integers(0, 1000), st.sampled_from(SCALES), st.sampled_from([0.0, 0.5, 1.0]))
def test_turns_against_a_loop(seed: int, scale: str, discount: float) -> None:
    g = np.random.default_rng(seed)
    rows, most = int(g.integers(1, 7)), int(g.integers(1, 4))
    rewards, ids = g.integers(-3, 4, (rows, most)).astype(float), g.integers(0, 2, rows)
    reached = g.integers(1, most + 1, rows)
    turns = np.array([[t if t < n else -1 for t in (*range(most), 0)] for n in reached])
    returns = np.array(
        [
            [sum(discount ** (j - k) * rewards[i, j] for j in range(k, reached[i])) for k in range(most)]
            for i in range(rows)
        ]
    )
    found = turn_advantages(*map(torch.tensor, (rewards, ids, turns)), scale=scale, discount=discount).numpy()
    for i in range(rows):
        for t, k in enumerate(turns[i]):
            mates = [returns[j, k] for j in range(rows) if ids[j] == ids[i] and reached[j] > k] if k >= 0 else [0.0]
            if max(mates) == min(mates):
                assert found[i, t] == 0
                continue
            spread = {"none": 1.0, "std": np.std(mates), "sample_std": np.std(mates, ddof=1)}[scale]
            expected = (returns[i, k] - np.mean(mates)) / spread
            assert found[i, t] == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_tokens_of_two_responses_by_hand() -> None:
    """Means 1/2 and 1 of the responses: the group's is 3/4, whatever their lengths; the variance is 3/16."""
    rewards = torch.tensor([[1.0, 0.0, 99.0], [1.0, math.nan, 1.0]])
    mask = torch.tensor([[True, True, False], [True, False, True]])
    found = token_advantages(rewards, torch.tensor([0, 0]), mask, scale="none")
    torch.testing.assert_close(found, torch.tensor([[0.25, -0.75, 0.0], [0.25, 0.0, 0.25]]))
    scaled = token_advantages(rewards, torch.tensor([0, 0]), mask)
    torch.testing.assert_close(scaled, found / (math.sqrt(3 / 16) + 1e-6))


@given(st.integers(0, 1000), st.sampled_from(SCALES))
def test_tokens_against_a_loop(seed: int, scale: str) -> None:
    g = np.random.default_rng(seed)
    rows, width = int(g.integers(1, 7)), int(g.integers(1, 5))
    rewards, ids = g.integers(-3, 4, (rows, width)).astype(float), g.integers(0, 2, rows)
    mask = g.random((rows, width)) < 0.7
    found = token_advantages(torch.tensor(rewards), torch.tensor(ids), torch.tensor(mask), scale=scale).numpy()
    assert not found[~mask].any()
    for i, t in zip(*np.nonzero(mask), strict=True):
        mates = [rewards[j][mask[j]] for j in range(rows) if ids[j] == ids[i] and mask[j].any()]
        mean = np.mean([np.mean(r) for r in mates])
        spread = np.sqrt(np.mean([np.mean((r - mean) ** 2) for r in mates]))
        if np.ptp(np.concatenate(mates)) == 0:
            assert found[i, t] == 0
            continue
        if scale == "sample_std" and len(mates) > 1:
            spread *= math.sqrt(len(mates) / (len(mates) - 1))
        expected = (rewards[i, t] - mean) / (1.0 if scale == "none" else spread)
        assert found[i, t] == pytest.approx(expected, rel=1e-5, abs=1e-6)


@given(st.integers(0, 1000), st.sampled_from(SCALES))
def test_tokens_that_share_their_response_s_reward_get_its_advantage(seed: int, scale: str) -> None:
    g = torch.Generator().manual_seed(seed)
    rewards, ids = torch.randint(-2, 3, (6,), generator=g).float(), torch.randint(0, 3, (6,), generator=g)
    mask = torch.rand((6, 4), generator=g) < 0.6
    mask[:, 0] = True
    found = token_advantages(rewards[:, None].expand(6, 4), ids, mask, scale=scale)
    expected = group_advantages(rewards, ids, scale=scale)[:, None] * mask
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_token_edges() -> None:
    same = torch.full((2, 2), 0.1)
    assert not token_advantages(same, torch.tensor([0, 0]), torch.ones(2, 2, dtype=torch.bool)).any()
    assert token_advantages(torch.zeros(0, 0), torch.zeros(0).long(), torch.zeros(0, 0).bool()).shape == (0, 0)
    empty = token_advantages(same, torch.tensor([0, 0]), torch.zeros(2, 2).bool())
    assert not empty.any()
