"""What vLLM says truncated sampling kept (`return_sampling_mask`), and where it can say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gspo.errors import BadInputError
from gspo.types import KeptSupport, Sampling


def check_reports_support(*, on_cpu: bool) -> None:
    """Raises BadInputError where vLLM cannot report what training with truncated sampling keeps."""
    if on_cpu:
        raise BadInputError(
            "rollout.top_p, rollout.top_k, rollout.min_p: vLLM on a CPU does not report the tokens that it kept (that "
            "needs its model runner V2, and with it a Triton with a backend for the CPU, which its wheels lack); use "
            'rollout.engine = "transformers", or set them to 1, 0 and 0'
        )


def askable(sampling: Sampling) -> Sampling:
    """The sampling as a vLLM that reports supports accepts it: greedy as the draw of one candidate.

    Greedy responses then have log-prob 0 throughout, which nothing is computed from.
    """
    return replace(sampling, temperature=1.0, top_p=1.0, top_k=1, min_p=0.0) if sampling.temperature == 0 else sampling


def read_support(reported: Sequence[Sequence[int]] | None, tokens: int) -> KeptSupport:
    """`Rollout.support` of a response of `tokens` tokens from vLLM's lists of ids.

    Raises ValueError where there is not one list for each token; what is in them is checked with the responses of
    every engine.
    """
    if reported is None or len(reported) != tokens:
        found = "none" if reported is None else f"{len(reported)} of them"
        raise ValueError(f"no kept tokens for each of {tokens} sampled ones (found {found})")
    return KeptSupport.of([np.sort(np.asarray(ids, np.int32)) for ids in reported])
