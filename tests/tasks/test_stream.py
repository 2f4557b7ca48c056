from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.tasks.stream import PromptStream
from gspo.types import Prompt


def prompts(count: int) -> list[Prompt]:
    return [Prompt(str(index), str(index), (index,)) for index in range(count)]


def keys(taken: list[Prompt]) -> list[str]:
    return [prompt.key for prompt in taken]


def test_every_epoch_is_another_permutation() -> None:
    stream = PromptStream(prompts(20), seed=0)
    epochs = [keys(stream.take(20)) for _ in range(3)]
    assert all(sorted(epoch) == sorted(keys(prompts(20))) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert keys(PromptStream(prompts(20), seed=1).take(20)) != epochs[0]


def test_the_order_is_pinned() -> None:
    # A resumed run relies on this order; it must not change between versions.
    assert keys(PromptStream(prompts(6), seed=0).take(6)) == ["0", "3", "4", "1", "5", "2"]


@given(count=st.integers(1, 12), takes=st.lists(st.integers(1, 15), min_size=1, max_size=8), data=st.data())
def test_resuming_from_the_cursor_changes_nothing(count: int, takes: list[int], data: st.DataObject) -> None:
    stream = PromptStream(prompts(count), seed=5)
    whole = []
    cursors = []
    for n in takes:
        cursors.append(stream.cursor)
        whole.append(keys(stream.take(n)))
    cut = data.draw(st.integers(0, len(takes) - 1))
    resumed = PromptStream(prompts(count), seed=5, cursor=cursors[cut])
    assert [keys(resumed.take(n)) for n in takes[cut:]] == whole[cut:]


@given(count=st.integers(1, 12), takes=st.lists(st.integers(1, 15), min_size=1, max_size=8))
def test_no_prompt_twice_in_a_take_while_avoidable(count: int, takes: list[int]) -> None:
    stream = PromptStream(prompts(count), seed=2)
    for n in takes:
        taken = stream.take(n)
        assert len(taken) == n
        most = max(Counter(keys(taken)).values())
        assert most <= -(-n // count)


def test_no_prompts() -> None:
    with pytest.raises(ValueError, match="prompts"):
        PromptStream([], seed=0)
