"""What is asked of vLLM and made of its answers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from gspo.errors import BadInputError
from gspo.rollout.text import StopStrings
from gspo.rollout.vllm_format import (
    Draw,
    check_sampling,
    draws,
    finished,
    sampling_params,
    version_spans,
    with_output_head,
)
from gspo.types import Prompt, Request, Sampling, VersionSpan

PROMPT = Prompt("k", "", (5, 6))
SPANS = (VersionSpan(0, 7),)
places = st.tuples(*[st.integers(0, 2**40)] * 5)


@given(places, places)
def test_seeds_differ_wherever_the_place_differs(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    seeds = [Draw(PROMPT, *place[1:]).seed(place[0]) for place in (first, second)]
    assert (seeds[0] == seeds[1]) == (first == second)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_turns_of_a_conversation_have_seeds_of_their_own() -> None:
    request = Request(PROMPT, samples=1, step=1, slot=4, turn=2)
    assert list(draws([request])) == [Draw(PROMPT, 1, 4, 0, turn=2)]
    assert len({Draw(PROMPT, 1, 4, 0, turn).seed(0) for turn in range(5)}) == 5


def test_a_request_for_further_samples_goes_on_with_their_numbers() -> None:
    request = Request(PROMPT, samples=2, step=1, slot=4, first_sample=3)
    assert list(draws([request])) == [Draw(PROMPT, 1, 4, 3), Draw(PROMPT, 1, 4, 4)]


def test_a_response_never_outgrows_the_context() -> None:
    draw = Draw(PROMPT, 0, 0, 0)
    assert sampling_params(draw, Sampling(max_tokens=10), context=8)["max_tokens"] == 6
    assert sampling_params(draw, Sampling(max_tokens=3), context=8)["max_tokens"] == 3


def test_a_tied_output_head_is_sent_under_its_own_name() -> None:
    embedding, other, head = torch.zeros(3, 2), torch.ones(2), torch.full((3, 2), 2.0)
    tied = [("model.embed_tokens.weight", embedding), ("model.norm.weight", other)]
    assert list(with_output_head(iter(tied))) == [*tied, ("lm_head.weight", embedding)]
    for untied in ([("lm_head.weight", head), *tied], [*tied, ("lm_head.weight", head)], tied[1:]):
        assert list(with_output_head(iter(untied))) == untied


def span(version: str, start: int, end: int) -> dict[str, object]:
    return {"version": version, "start": start, "end": end}


def test_spans_of_known_weights_become_versions() -> None:
    found = version_spans([span("a", 0, 2), span("b", 2, 5)], 5, {"a": 3, "b": 4})
    assert found == (VersionSpan(0, 3), VersionSpan(2, 4))


@pytest.mark.parametrize(
    "spans",
    [
        None,
        [],
        [span("a", 0, 4)],
        [span("a", 1, 5)],
        [span("default", 0, 5)],
        [span("a", 0, 2), span("a", 3, 5)],
        [span("a", 0, 0), span("a", 0, 5)],
        [span("a", 0, 2), span("default", 2, 5)],
    ],
)
def test_a_token_of_uncertain_origin_makes_the_response_unusable(spans: list[dict[str, object]] | None) -> None:
    assert version_spans(spans, 5, {"a": 3}) is None


def test_text_ends_before_a_stop_string_and_ids_do_not(tokenizer: PreTrainedTokenizerFast) -> None:
    sampling = Sampling(max_tokens=9, stop=("bc",), eos_ids=(2,))
    ids = tokenizer.convert_tokens_to_ids(["aa", "ab", "ca"])
    stops = StopStrings(tokenizer, sampling.stop)
    rollout = finished(Draw(PROMPT, 0, 1, 2), ids, [-1.0, -2.0, -3.0], "stop", SPANS, sampling, stops)
    assert (rollout.text, rollout.response_ids, rollout.finish_reason) == ("aaa", tuple(ids), "stop")
    assert (rollout.slot, rollout.sample, rollout.sampler_logprobs) == (1, 2, (-1.0, -2.0, -3.0))


def test_a_response_of_the_eos_token_alone_has_no_text(tokenizer: PreTrainedTokenizerFast) -> None:
    sampling = Sampling(max_tokens=9, eos_ids=(7, 8))
    rollout = finished(Draw(PROMPT, 0, 0, 0), [8], [-1.0], "stop", SPANS, sampling, StopStrings(tokenizer, ()))
    assert (rollout.text, rollout.response_ids, rollout.truncated) == ("", (8,), False)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf"), -9999.0])
def test_a_log_prob_that_is_not_finite_drops_the_response(tokenizer: PreTrainedTokenizerFast, bad: float) -> None:
    stops = StopStrings(tokenizer, ())
    rollout = finished(Draw(PROMPT, 0, 0, 0), [5, 6], [-1.0, bad], "length", SPANS, Sampling(max_tokens=2), stops)
    assert rollout.dropped == "log-probs are not finite at response token 1"
    assert (rollout.finish_reason, rollout.response_ids) == ("error", ())


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        (Sampling(max_tokens=0), "sampling.max_tokens: found 0"),
        (Sampling(max_tokens=1, stop=("",)), "sampling.stop"),
        (Sampling(max_tokens=1, temperature=0.005), "sampling.temperature: found 0.005"),
    ],
)
def test_settings_that_vllm_would_replace_are_refused(sampling: Sampling, said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        check_sampling(sampling)
