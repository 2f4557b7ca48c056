import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo.policy.layout import build_layout, split_micro_batches
from tests.policy.tiny import cut_routes, make_rollout, random_rollouts

KINDS = ("shared", "packed", "padded")

groups = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(0, 7), min_size=1, max_size=4)), min_size=1, max_size=4
)


def test_a_group_is_its_prompt_and_then_each_response_from_the_prompts_end():
    rollouts = [make_rollout(0, 0, (5, 6), (7, 8, 1)), make_rollout(0, 1, (5, 6), (9, 1))]
    layout = build_layout(rollouts, "shared")
    assert layout.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert layout.position_ids.tolist() == [[0, 1, 2, 3, 2]]
    assert layout.source.tolist() == [1, 2, 3, 1, 4]
    assert layout.targets.tolist() == [7, 8, 1, 9, 1]
    assert layout.mask.tolist() == [[True, True, True], [True, True, False]]


def test_packed_and_padded_repeat_the_prompt():
    rollouts = [make_rollout(0, 0, (5, 6), (7, 8, 1)), make_rollout(0, 1, (5, 6), (9, 1))]
    packed = build_layout(rollouts, "packed")
    assert packed.input_ids.tolist() == [[5, 6, 7, 8, 5, 6, 9]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    padded = build_layout(rollouts, "padded")
    assert padded.input_ids.tolist() == [[5, 6, 7, 8], [5, 6, 9, 0]]
    assert padded.attention_mask.tolist() == [[True] * 4, [True] * 3 + [False]]


@given(groups)
def test_fed_tokens_are_counted_from_the_rollouts(shape):
    rollouts = random_rollouts(shape)
    responses = sum(max(len(r.response_ids) - 1, 0) for r in rollouts)
    shared, packed, padded = (build_layout(rollouts, kind) for kind in KINDS)
    assert shared.fed_tokens == shared.input_ids.numel() == sum(x for x, _ in shape) + responses
    assert packed.fed_tokens == packed.input_ids.numel() == sum(x * len(ys) for x, ys in shape) + responses
    assert padded.fed_tokens == packed.fed_tokens == int(padded.attention_mask.sum())


@given(groups, st.sampled_from(KINDS))
def test_every_scored_token_is_predicted_from_the_token_before_it(shape, kind):
    rollouts = random_rollouts(shape)
    layout = build_layout(rollouts, kind, columns=9)
    fed, positions = layout.input_ids.flatten(), layout.position_ids.flatten()
    expected = [
        (b * 9 + t, token, len(r.prompt.ids) + t - 1, (*r.prompt.ids, *r.response_ids)[len(r.prompt.ids) + t - 1])
        for b, r in enumerate(rollouts)
        for t, token in enumerate(r.response_ids)
        if r.trainable[t]
    ]
    columns = (layout.places, layout.targets, positions[layout.source], fed[layout.source])
    assert list(zip(*(c.tolist() for c in columns), strict=True)) == expected
    assert layout.mask.sum() == len(expected)


@given(groups, st.sampled_from(KINDS))
def test_scatter_and_gather_are_inverse(shape, kind):
    layout = build_layout(random_rollouts(shape), kind)
    values = torch.arange(1.0, len(layout.source) + 1)
    placed = layout.scatter(values)
    assert torch.equal(layout.gather(placed), values)
    assert torch.equal(placed != 0, layout.mask)


@given(groups, st.sampled_from(KINDS))
def test_routes_go_into_the_forwards_order_and_come_back(shape, kind):
    rollouts = random_rollouts(shape)
    layout = build_layout(rollouts, kind)
    rng = np.random.default_rng(0)
    prompts = {r.slot: rng.integers(4, 99, (len(r.prompt.ids), 2)) for r in rollouts}
    responses = [rng.integers(4, 99, (max(len(r.response_ids) - 1, 0), 2)) for r in rollouts]
    routes = [np.concatenate([prompts[r.slot], response]) for r, response in zip(rollouts, responses, strict=True)]
    placed = layout.place_routes(routes)
    assert placed.shape == (layout.input_ids.numel(), 2)
    assert (placed[~layout.attention_mask.flatten().numpy()] == [0, 1]).all()
    assert all(np.array_equal(a, b) for a, b in zip(cut_routes(layout, placed), routes, strict=True))


def test_routes_of_the_wrong_length_are_refused():
    rollouts = random_rollouts([(3, (4,))])
    layout = build_layout(rollouts, "shared")
    with pytest.raises(ValueError, match="7 rows of routes for 6 fed tokens"):
        layout.place_routes([np.zeros((7, 2), int)])


def test_a_slot_with_two_prompts_is_refused():
    with pytest.raises(ValueError, match="two different prompts"):
        build_layout([make_rollout(0, 0, (5,), (7,)), make_rollout(0, 1, (6,), (7,))], "shared")


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="no tokens"):
        build_layout([make_rollout(0, 0, (), (7,))], "packed")


def test_a_response_that_is_too_wide_is_refused():
    with pytest.raises(ValueError, match="3 tokens does not fit into 2"):
        build_layout(random_rollouts([(1, (3,))]), "shared", columns=2)


@given(groups, st.sampled_from(KINDS), st.integers(1, 40))
def test_micro_batches_hold_every_rollout_once_within_the_budget(shape, kind, budget):
    rollouts = random_rollouts(shape)
    batches = split_micro_batches(rollouts, budget, kind)
    assert sorted(index for batch in batches for index in batch) == list(range(len(rollouts)))
    for batch in batches:
        layout = build_layout([rollouts[index] for index in batch], kind)
        fixed = sum(piece.prompt.length for piece in layout.pieces)  # cannot be split further
        assert len(batch) == 1 or layout.input_ids.numel() <= max(budget, fixed if kind == "shared" else 0)


@given(groups)
def test_groups_that_fit_stay_whole(shape):
    rollouts = random_rollouts(shape)
    largest = max(x + sum(max(y - 1, 0) for y in ys) for x, ys in shape)
    for batch in split_micro_batches(rollouts, largest, "shared"):
        slots = {rollouts[index].slot for index in batch}
        assert len(batch) == sum(r.slot in slots for r in rollouts)


def test_micro_batches_are_balanced():
    rollouts = random_rollouts([(2, (n,)) for n in (30, 29, 28, 3, 4, 5)])
    loads = [
        build_layout([rollouts[i] for i in batch], "shared").fed_tokens
        for batch in split_micro_batches(rollouts, 40, "shared")
    ]
    assert len(loads) == 3
    assert max(loads) - min(loads) <= 1


def test_a_group_over_the_budget_is_split_evenly_with_its_prompt_in_each_part():
    rollouts = random_rollouts([(10, (11, 11, 11, 11))])
    batches = split_micro_batches(rollouts, 30, "shared")
    assert [len(batch) for batch in batches] == [2, 2]
