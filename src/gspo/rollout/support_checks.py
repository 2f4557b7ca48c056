"""Whether what truncated sampling kept fits the responses, whichever engine they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gspo.errors import BadInputError
from gspo.rollout.engine import UNUSABLE_SUPPORT
from gspo.types import KeptSupport, Rollout, Sampling


def checked_supports(rollouts: Sequence[Rollout], sampling: Sampling) -> list[Rollout]:
    """The rollouts; one whose support does not fit its response is dropped and loses it.

    Raises BadInputError where the sampling truncates and a response came without its support.
    """
    if not sampling.truncated:
        return list(rollouts)
    checked = []
    for rollout in rollouts:
        if rollout.dropped is None and rollout.finish_reason != "error":
            if rollout.support is None:
                raise BadInputError(
                    "rollout.top_p, rollout.top_k, rollout.min_p: the inference engine returned a response without "
                    "the tokens that truncated sampling kept, so that its likelihood is unknown; use "
                    'rollout.engine = "transformers", or set them to 1, 0 and 0'
                )
            if (why := _misfit(rollout, rollout.support)) is not None:
                rollout = replace(rollout, dropped=f"{UNUSABLE_SUPPORT}: {why}", support=None)
        checked.append(rollout)
    return checked


def _misfit(rollout: Rollout, support: KeptSupport) -> str | None:
    """What is wrong with a response's support; None if nothing is."""
    counts, tokens = support.counts, len(rollout.response_ids)
    if (
        len(counts) != tokens
        or (counts < 0).any()
        or support.offsets[0] != 0
        or support.offsets[-1] != len(support.ids)
    ):
        return f"it does not have one entry for each of {tokens} response tokens"
    trainable = np.asarray(rollout.trainable, bool)
    if (counts[~trainable] > 0).any():
        return f"response token {_first(~trainable & (counts > 0))} was not sampled and has one"
    if (counts[trainable] == 0).any():
        return f"that of response token {_first(trainable & (counts == 0))} is empty"
    owners = np.repeat(np.arange(tokens), counts)
    same = owners[1:] == owners[:-1]
    if (support.ids < 0).any() or (np.diff(support.ids)[same] <= 0).any():
        return "its ids are negative or do not ascend"
    found = np.zeros(tokens, bool)
    found[owners[support.ids == np.asarray(rollout.response_ids, np.int64)[owners]]] = True
    if not found[trainable].all():
        missing = _first(trainable & ~found)
        return f"response token {missing} (id {rollout.response_ids[missing]}) is not in its own"
    return None


def _first(flags: np.ndarray) -> int:
    return int(np.flatnonzero(flags)[0])
