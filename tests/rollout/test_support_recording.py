"""Supports that the embedded engine records, against one plain forward per response."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from gspo.rollout import transformers_engine as engines
from gspo.rollout.decoding import CohortDecoder
from gspo.rollout.sampling import truncate
from gspo.rollout.support_checks import checked_supports
from gspo.rollout.transformers_engine import TransformersEngine
from gspo.types import Rollout, Sampling
from tests.rollout.families import tiny_model
from tests.rollout.test_transformers_engine import ENDS, _requests

SAMPLING = Sampling(14, temperature=0.9, top_p=0.9, top_k=30, eos_ids=ENDS, seed=3, record_support=True)


def assert_plain(model: Any, rollouts: list[Rollout], sampling: Sampling) -> None:
    """Each token's support and log-prob are those of the truncated distribution of a forward over its sequence."""
    assert checked_supports(rollouts, sampling) == rollouts
    model.eval()
    for rollout in rollouts:
        ids = torch.tensor([rollout.prompt.ids + rollout.response_ids[:-1]])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, len(rollout.prompt.ids) - 1 :].float()
        kept = truncate(logits / sampling.temperature, sampling)
        expected = [row.isfinite().nonzero()[:, 0].tolist() for row in kept]
        assert rollout.support is not None
        assert rollout.support.ids.dtype == np.int32
        parts = np.split(rollout.support.ids, rollout.support.offsets[1:-1])
        assert [part.tolist() for part in parts] == expected
        logprobs = kept.log_softmax(-1).gather(1, torch.tensor(rollout.response_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(rollout.sampler_logprobs), logprobs, atol=3e-5, rtol=0)


def test_recorded_supports_are_those_of_a_plain_forward(tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny_model("llama")
    rollouts = TransformersEngine(model, tokenizer, max_concurrent=4).generate(_requests(), SAMPLING)
    assert len({len(r.response_ids) for r in rollouts}) > 2  # rows leave, and others take their places
    assert_plain(model, rollouts, SAMPLING)


@pytest.mark.parametrize("cached", [True, False])
def test_rows_in_lockstep_keep_their_supports(
    cached: bool, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "choose_decoder", lambda _: lambda *_: CohortDecoder(model, cached=cached))
    model = tiny_model("llama")
    assert_plain(
        model, TransformersEngine(model, tokenizer, max_concurrent=8).generate(_requests(), SAMPLING), SAMPLING
    )


def test_supports_come_only_where_they_are_asked_for(tokenizer: PreTrainedTokenizerFast) -> None:
    engine = TransformersEngine(tiny_model("llama"), tokenizer, max_concurrent=8)
    for sampling in (Sampling(3, top_p=0.9), Sampling(3, record_support=True), Sampling(3, temperature=0.0, top_k=4)):
        assert all(r.support is None for r in engine.generate(_requests((3,), 2), sampling))


def test_a_response_that_is_given_up_has_none(tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    rollouts = TransformersEngine(model, tokenizer, max_concurrent=8).generate(_requests((3,), 2), SAMPLING)
    assert all(r.dropped and r.support is None for r in rollouts)
    assert checked_supports(rollouts, SAMPLING) == rollouts
