"""vLLM in this process, on a CPU in float32, against the model's own forward pass."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gspo.types import Prompt, Request, Sampling, VersionSpan
from tests.vllm.conftest import LONG, Policy, assert_agree, requests

pytest.importorskip("vllm", reason="run by `make test-vllm`, in an environment of its own")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("default")]

PROMPT = Prompt("p", "", LONG[:5])


@pytest.fixture(scope="module")
def started(folder: Path) -> Iterator[tuple[Any, bool]]:
    """The engine, and whether its start left the process's seeds and threads alone."""
    from gspo.rollout.vllm_engine import VllmEngine
    from tests.rollout.families import tiny_tokenizer

    torch.manual_seed(11)
    np.random.seed(11)
    random.seed(11)
    before = (torch.initial_seed(), float(np.random.get_state()[1][0]), random.getstate(), torch.get_num_threads())
    engine = VllmEngine(
        str(folder),
        tiny_tokenizer(),
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_concurrent=32,
        cache_gib=0.1,
    )
    after = (torch.initial_seed(), float(np.random.get_state()[1][0]), random.getstate(), torch.get_num_threads())
    yield engine, before == after
    engine.close()


@pytest.fixture
def engine(started: tuple[Any, bool], policy: Policy) -> Any:
    engine, _ = started
    engine.update_weights(policy.tensors(), 5)
    return engine


def test_seeds_and_threads_of_the_process_are_as_before(started: tuple[Any, bool]) -> None:
    assert started[1]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_log_probs_are_of_the_distribution_that_was_sampled(engine: Any, policy: Policy, temperature: float) -> None:
    rollouts = engine.generate(requests(), Sampling(max_tokens=24, temperature=temperature, seed=3))
    assert [(r.slot, r.sample) for r in rollouts] == [(slot, sample) for slot in range(4) for sample in range(4)]
    assert all(r.policy_version == (VersionSpan(0, 5),) for r in rollouts)
    assert all(len(r.response_ids) == 24 and r.truncated for r in rollouts)
    assert len({r.response_ids for r in rollouts}) == 16
    assert_agree(rollouts, policy, temperature)


def test_greedy_takes_the_most_likely_token(engine: Any, policy: Policy) -> None:
    rollouts = engine.generate(requests(samples=1), Sampling(max_tokens=12, temperature=0.0))
    for rollout in rollouts:
        assert policy.logits(rollout).argmax(-1).tolist() == list(rollout.response_ids)
    assert_agree(rollouts, policy)


def test_truncated_sampling_is_renormalised_over_what_it_keeps(engine: Any, policy: Policy) -> None:
    for rollout in engine.generate(requests(), Sampling(max_tokens=12, top_k=3, seed=3)):
        kept, tokens = policy.logits(rollout).topk(3)
        places = (tokens == torch.tensor(rollout.response_ids)[:, None]).nonzero()[:, 1]
        expected = kept.log_softmax(-1).gather(-1, places[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(rollout.sampler_logprobs), expected, atol=1e-4, rtol=0)


def test_tokens_come_as_often_as_the_distribution_says(engine: Any, policy: Policy) -> None:
    draws = 4000
    rollouts = engine.generate([Request(PROMPT, samples=draws, step=0, slot=0)], Sampling(max_tokens=1, seed=8))
    counts = np.bincount([r.response_ids[0] for r in rollouts], minlength=101)[:101]
    expected = policy.logits(rollouts[0])[0].softmax(-1).double().numpy() * draws
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = len(wanted) - 1
    assert freedom > 5
    assert statistic < freedom + 6 * (2 * freedom) ** 0.5, "six standard deviations of chi-square"


def test_noise_depends_on_the_place_alone(engine: Any) -> None:
    sampling = Sampling(max_tokens=8, seed=4)
    whole = [r.response_ids for r in engine.generate(requests(step=2), sampling)]
    parts = [
        Request(r.prompt, samples=1, step=2, slot=r.slot, first_sample=sample)
        for sample in (3, 1, 0, 2)
        for r in reversed(requests())
    ]
    assert [r.response_ids for r in engine.generate(parts, sampling)] == whole
    assert [r.response_ids for r in engine.generate(requests(step=3), sampling)] != whole


def test_new_weights_are_sampled_from_and_old_prefixes_forgotten(engine: Any, policy: Policy) -> None:
    sampling = Sampling(max_tokens=8, seed=4)
    old = engine.generate(requests(), sampling)
    policy.change(seed=1)
    engine.update_weights(iter(policy.tensors()), 6)
    new = engine.generate(requests(), sampling)
    assert all(r.policy_version == (VersionSpan(0, 6),) for r in new)
    assert_agree(new, policy)
    far = [(policy.logprobs(r) - torch.tensor(r.sampler_logprobs)).abs().max() for r in old]
    assert min(far) > 0.1


def test_any_of_several_eos_ids_ends_a_response(engine: Any, policy: Policy) -> None:
    eos = tuple(range(3, 40))
    rollouts = engine.generate(requests(), Sampling(max_tokens=64, eos_ids=eos, seed=4))
    stopped = [r for r in rollouts if r.finish_reason == "stop"]
    assert len({r.response_ids[-1] for r in stopped}) > 1
    for rollout in rollouts:
        assert not set(rollout.response_ids[:-1]) & set(eos)
        assert (rollout.response_ids[-1] in eos) == (rollout.finish_reason == "stop")
    for rollout in stopped:
        assert rollout.text == policy.tokenizer.decode(list(rollout.response_ids[:-1]), skip_special_tokens=True)
    assert_agree(rollouts, policy)


def test_the_models_own_eos_is_one_only_if_we_say_so(engine: Any, policy: Policy) -> None:
    """The configuration names id 2; drawn often enough, it is met before the end."""
    rollouts = engine.generate([Request(PROMPT, samples=64, step=0, slot=0)], Sampling(max_tokens=64, seed=4))
    assert all(len(r.response_ids) == 64 for r in rollouts)
    assert any(2 in r.response_ids[:-1] for r in rollouts)
    assert policy.model.config.eos_token_id == 2


def test_a_stop_string_ends_a_response_wherever_tokens_begin(engine: Any, policy: Policy) -> None:
    free = engine.generate(requests(), Sampling(max_tokens=24, seed=4))
    text = policy.tokenizer.decode(list(free[0].response_ids[4:6]))
    stop = text[1:3]
    rollouts = engine.generate(requests(), Sampling(max_tokens=24, seed=4, stop=(stop,)))
    assert rollouts[0].finish_reason == "stop"
    for rollout, whole in zip(rollouts, free, strict=True):
        assert whole.response_ids[: len(rollout.response_ids)] == rollout.response_ids
        assert stop not in rollout.text
        if rollout.finish_reason == "stop":
            decoded = policy.tokenizer.decode(list(rollout.response_ids), skip_special_tokens=True)
            assert decoded.startswith(rollout.text + stop)
    assert_agree(rollouts, policy)


def test_a_prompt_that_cannot_be_served_costs_no_other(engine: Any, policy: Policy) -> None:
    prompts = [Prompt("a", "", ()), Prompt("b", "", (5,) * 512), Prompt("c", "", (5, 900)), Prompt("d", "", LONG[:3])]
    wanted = [Request(p, samples=1, step=0, slot=slot) for slot, p in enumerate(prompts)]
    rollouts = engine.generate(wanted, Sampling(max_tokens=4))
    assert [r.finish_reason for r in rollouts] == ["error", "error", "error", "length"]
    assert [bool(r.dropped) for r in rollouts] == [True, True, True, False]
    assert_agree(rollouts[3:], policy)
    assert len(engine.generate(wanted[:3], Sampling(max_tokens=4))) == 3


def test_a_response_ends_where_the_context_is_full(engine: Any, policy: Policy) -> None:
    prompt = Prompt("p", "", (LONG + LONG)[:508])
    (rollout,) = engine.generate([Request(prompt, samples=1, step=0, slot=0)], Sampling(max_tokens=64))
    assert (len(rollout.response_ids), rollout.finish_reason) == (4, "length")
    assert_agree([rollout], policy)
