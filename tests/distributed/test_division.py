"""Which process trains on what: everything once, and nobody with much more than the others."""

from hypothesis import given
from hypothesis import strategies as st

from gspo.policy.layout import by_slot, fed_tokens
from gspo.training.division import divide
from tests.policy.tiny import make_rollout

GROUPS = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(0, 60), min_size=1, max_size=6)), min_size=0, max_size=8
)


def rollouts_of(groups):
    return [
        make_rollout(slot, sample, (5,) * prompt, (7,) * length)
        for slot, (prompt, lengths) in enumerate(groups)
        for sample, length in enumerate(lengths)
    ]


def load(rollouts, indices, kind):
    """Fed tokens of one process."""
    chosen = [rollouts[i] for i in indices]
    if kind != "shared":
        return fed_tokens(chosen, range(len(chosen)), kind)
    return sum(fed_tokens(chosen, group, kind) for group in by_slot(chosen).values())


@given(GROUPS, st.integers(1, 5), st.sampled_from(["shared", "packed", "padded"]))
def test_every_rollout_has_one_process(groups, size, kind):
    rollouts = rollouts_of(groups)
    shares = divide(rollouts, size, kind)
    assert len(shares) == size
    assert sorted(index for share in shares for index in share) == list(range(len(rollouts)))


@given(GROUPS, st.integers(2, 5), st.sampled_from(["packed", "padded"]))
def test_the_fullest_has_at_most_one_rollout_more_than_an_even_share(groups, size, kind):
    rollouts = rollouts_of(groups)
    loads = [load(rollouts, share, kind) for share in divide(rollouts, size, kind)]
    largest = max((load(rollouts, [i], kind) for i in range(len(rollouts))), default=0)
    assert max(loads) - min(loads) <= largest


@given(GROUPS, st.integers(2, 5))
def test_a_shared_prompt_is_computed_twice_only_where_that_is_faster(groups, size):
    rollouts = rollouts_of(groups)
    fullest = max(load(rollouts, share, "shared") for share in divide(rollouts, size, "shared"))
    whole = list(by_slot(rollouts).values())
    by_group = [0] * size
    for cost in sorted((load(rollouts, group, "shared") for group in whole), reverse=True):
        by_group[by_group.index(min(by_group))] += cost
    assert fullest <= max(by_group)


def test_one_long_group_is_split_over_the_processes():
    rollouts = rollouts_of([(4, [50] * 8)])
    shares = divide(rollouts, 4, "shared")
    assert [len(share) for share in shares] == [2, 2, 2, 2]


def test_three_equal_groups_on_two_processes_are_not_two_against_one():
    rollouts = rollouts_of([(2, [20] * 4)] * 3)
    loads = [load(rollouts, share, "shared") for share in divide(rollouts, 2, "shared")]
    assert max(loads) <= 1.2 * min(loads)
