"""A support that does not fit its response costs that rollout; none at all stops the run, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from gspo.errors import BadInputError
from gspo.rollout.engine import UNUSABLE_SUPPORT
from gspo.rollout.support_checks import checked_supports
from gspo.types import KeptSupport, Rollout, Sampling
from tests.policy.tiny import make_rollout

SAMPLING = Sampling(4, top_p=0.9)
PLAIN = make_rollout(0, 0, (5,), (7, 8, 9), (True, False, True))


def supported(parts: Sequence[Sequence[int]]) -> Rollout:
    return replace(PLAIN, support=KeptSupport.of([np.array(part, np.int32) for part in parts]))


def test_a_support_that_fits_is_left_as_it_is() -> None:
    rollout = supported([(3, 7), (), (9,)])
    assert checked_supports([rollout], SAMPLING) == [rollout]


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([(3, 7), (), ()], "that of response token 2 is empty"),
        ([(3, 7), (), (8, 10)], r"response token 2 \(id 9\) is not in its own"),
        ([(7, 3), (), (9,)], "its ids are negative or do not ascend"),
        ([(7, 7), (), (9,)], "its ids are negative or do not ascend"),
        ([(-1, 7), (), (9,)], "its ids are negative or do not ascend"),
        ([(7,), (8,), (9,)], "response token 1 was not sampled and has one"),
        ([(7,), (9,)], "it does not have one entry for each of 3 response tokens"),
    ],
)
def test_one_that_does_not_drops_its_rollout_alone(parts: Sequence[Sequence[int]], why: str) -> None:
    good = supported([(7,), (), (9,)])
    first, second = checked_supports([supported(parts), good], SAMPLING)
    assert first.dropped is not None
    assert first.dropped == f"{UNUSABLE_SUPPORT}: {why}".replace("\\", "")
    assert first.support is None
    assert second == good


def test_offsets_that_contradict_the_ids_drop_their_rollout() -> None:
    rollout = replace(PLAIN, support=KeptSupport(np.array([7, 9], np.int32), np.array([0, 1, 1, 3])))
    assert (checked_supports([rollout], SAMPLING)[0].dropped or "").startswith(UNUSABLE_SUPPORT)


def test_a_response_without_a_support_is_refused_where_sampling_truncates() -> None:
    with pytest.raises(BadInputError, match=r"^rollout\.top_p, rollout\.top_k, rollout\.min_p: .* without the tokens"):
        checked_supports([PLAIN], SAMPLING)
    assert checked_supports([PLAIN], Sampling(4)) == [PLAIN]
    given_up = replace(PLAIN, finish_reason="error", dropped="the server died")
    assert checked_supports([given_up], SAMPLING) == [given_up]
