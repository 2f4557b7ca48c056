"""What truncated sampling kept, put into the order in which tokens are scored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gspo.policy.head import Support
from gspo.types import KeptSupport, Rollout


def sampled_support(rollouts: Sequence[Rollout]) -> Support | None:
    """What was kept for each trainable token, by rollout and by place in its response; None where nothing was left out.

    Raises ValueError where some rollouts have a support and others lack it, or where one does not have an entry for
    each token that the policy sampled and for no other.
    """
    given = [rollout.support for rollout in rollouts]
    joined = KeptSupport.join(given)
    if joined is None:
        if any(support is not None for support in given):
            raise ValueError("some rollouts have a support and others do not")
        return None
    if any(len(r.support.counts) != len(r.response_ids) for r in rollouts if r.support is not None):
        raise ValueError("a support with more or fewer entries than its response has tokens")
    scored = np.concatenate([np.asarray(rollout.trainable, bool) for rollout in rollouts])
    if not np.array_equal(joined.counts > 0, scored):
        raise ValueError("a support for a token that the policy did not sample, or none for one that it did")
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(joined.counts[scored])])
    return Support(torch.from_numpy(joined.ids), torch.from_numpy(offsets))
