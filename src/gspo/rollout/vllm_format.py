"""What vLLM is asked and what it answers, as plain data: the same in this process and over HTTP."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from gspo.errors import BadInputError
from gspo.rollout.engine import NOT_FINITE
from gspo.rollout.sampling import noise_key
from gspo.rollout.text import StopStrings, decode
from gspo.types import Prompt, Request, Rollout, Sampling, VersionSpan

# vLLM samples at 0.01 whatever lies between 0 and 0.01 (its `SamplingParams`).
_LOWEST_TEMPERATURE = 0.01

_HEAD = "lm_head.weight"

# Over HTTP vLLM writes this for a log-prob that is -inf or NaN, which JSON cannot hold.
_NOT_FINITE = -9999.0


@dataclass(frozen=True, slots=True)
class Draw:
    """One response wanted."""

    prompt: Prompt
    step: int
    slot: int
    sample: int
    turn: int = 0

    def seed(self, seed: int) -> int:
        """Seed of the response's own random stream, named by (seed, step, slot, sample, turn) alone; 63 bits."""
        key = np.random.SeedSequence(noise_key(seed, self.step, self.slot, self.sample, self.turn))
        return int(key.generate_state(1, np.uint64)[0] >> np.uint64(1))


def draws(requests: Sequence[Request]) -> Iterator[Draw]:
    """The responses that the requests want, one by one."""
    for request in requests:
        for sample in range(request.first_sample, request.first_sample + request.samples):
            yield Draw(request.prompt, request.step, request.slot, sample, request.turn)


def check_sampling(sampling: Sampling) -> None:
    """Raises BadInputError for settings that vLLM would refuse or silently replace."""
    if "" in sampling.stop:
        raise BadInputError('sampling.stop: found the empty string "", which every text contains; remove it')
    if sampling.max_tokens < 1:
        raise BadInputError(f"sampling.max_tokens: found {sampling.max_tokens}; at least 1 is needed")
    if 0 < sampling.temperature < _LOWEST_TEMPERATURE:
        raise BadInputError(
            f"sampling.temperature: found {sampling.temperature}; vLLM would sample at {_LOWEST_TEMPERATURE}: "
            f"take 0 (greedy) or at least {_LOWEST_TEMPERATURE}"
        )


def check_batch_invariant(*, on_cpu: bool) -> None:
    """Raises BadInputError on a CPU, where vLLM 0.32 takes the wish and does nothing about it."""
    if on_cpu:
        raise BadInputError(
            "likelihoods.batch_invariant = true: vLLM has such a mode for GPUs alone (VLLM_BATCH_INVARIANT); set it to "
            'false, or use rollout.engine = "transformers"'
        )


def problem(prompt: Prompt, context: int) -> str | None:
    """Why no response can be drawn for the prompt by an engine that holds `context` tokens; None if one can."""
    if not prompt.ids:
        return "empty prompt: there is no token to continue"
    if len(prompt.ids) >= context:
        return f"prompt of {len(prompt.ids)} tokens leaves no room in a context of {context}"
    return None


def sampling_params(draw: Draw, sampling: Sampling, context: int) -> dict[str, Any]:
    """Keyword arguments of vLLM's `SamplingParams` for one response.

    Everything that shapes the distribution is named, so that no default of the engine or of the model's
    `generation_config` takes part; `ignore_eos` leaves the end of a response to our EOS ids alone. Under top-p
    together with min-p vLLM applies min-p first (the embedded engine: last).
    """
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": draw.seed(sampling.seed),
        "max_tokens": min(sampling.max_tokens, context - len(draw.prompt.ids)),
        "min_tokens": 0,
        "ignore_eos": True,
        "stop_token_ids": list(sampling.eos_ids),
        "stop": list(sampling.stop),
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": True,
        "logprobs": 0,
    }


def with_output_head(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same tensors, and at the end an output head that is tied to the input embedding, if it is not among them.

    vLLM packs the head for a CPU into a copy of its own, which a reload without a tensor of that name leaves at the
    old weights, in silence.
    """
    embedding: Tensor | None = None
    headless = True
    for name, tensor in named_tensors:
        headless &= name != _HEAD
        if name.endswith("embed_tokens.weight"):
            embedding = tensor
        yield name, tensor
    if headless and embedding is not None:
        yield _HEAD, embedding


def version_spans(
    spans: Sequence[Mapping[str, Any]] | None, tokens: int, versions: Mapping[str, int]
) -> tuple[VersionSpan, ...] | None:
    """The policy versions that sampled a response of `tokens` tokens; None if they are not all known.

    `spans` are vLLM's `{version, start, end}`, whose labels `versions` translates. Labels that are missing, unknown or
    do not cover the response without a gap make the origin of its tokens uncertain.

    >>> version_spans([{"version": "b", "start": 0, "end": 3}], 3, {"b": 7})
    (VersionSpan(start=0, version=7),)
    """
    end = 0
    found = []
    for span in spans or ():
        if span["start"] != end or span["end"] <= end or span["version"] not in versions:
            return None
        end = span["end"]
        found.append(VersionSpan(span["start"], versions[span["version"]]))
    return tuple(found) if found and end == tokens else None


def finished(
    draw: Draw,
    ids: Sequence[int],
    logprobs: Sequence[float],
    reason: str,
    versions: tuple[VersionSpan, ...],
    sampling: Sampling,
    stops: StopStrings,
) -> Rollout:
    """The rollout of a response that vLLM ended with `reason` ("stop" or "length").

    The text is decoded here, from the ids, so that every engine writes the same; it leaves out an EOS token and a
    stop string, the ids keep both. A log-prob that is not finite makes it an `error`.
    """
    for index, logprob in enumerate(logprobs):
        if not math.isfinite(logprob) or logprob <= _NOT_FINITE:
            return failed(draw, f"{NOT_FINITE} at response token {index}", versions)
    body = ids[:-1] if ids and ids[-1] in sampling.eos_ids else ids
    text = stops.cut(ids) if reason == "stop" and body is ids else None
    return Rollout(
        prompt=draw.prompt,
        slot=draw.slot,
        sample=draw.sample,
        response_ids=tuple(ids),
        sampler_logprobs=tuple(logprobs),
        trainable=(True,) * len(ids),
        finish_reason="stop" if reason == "stop" else "length",
        policy_version=versions,
        text=decode(stops.tokenizer, body) if text is None else text,
    )


def failed(draw: Draw, why: str, versions: tuple[VersionSpan, ...]) -> Rollout:
    """The rollout of a response that could not be drawn."""
    return Rollout(
        prompt=draw.prompt,
        slot=draw.slot,
        sample=draw.sample,
        response_ids=(),
        sampler_logprobs=(),
        trainable=(),
        finish_reason="error",
        policy_version=versions,
        text="",
        dropped=why,
    )
