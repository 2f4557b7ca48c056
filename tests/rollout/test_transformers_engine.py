from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedTokenizerFast

from gspo.errors import BadInputError
from gspo.rollout.decoder_choice import choose_decoder
from gspo.rollout.engine import Engine
from gspo.rollout.transformers_engine import TransformersEngine
from gspo.types import Prompt, Request, Rollout, Sampling
from tests.rollout.families import EOS, FAMILIES, VOCABULARY, tiny_model

# Many EOS ids make random models stop at all lengths.
ENDS = (EOS, *range(9, 100, 9))
LENGTHS = (3, 11, 7, 7, 1)
READS = {"tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"}


def _requests(lengths: tuple[int, ...] = LENGTHS, samples: int = 3, seed: int = 0) -> list[Request]:
    draw = random.Random(seed)
    prompts = [tuple(draw.randrange(3, VOCABULARY) for _ in range(n)) for n in lengths]
    return [Request(Prompt(str(i), "", ids), samples, step=7, slot=i) for i, ids in enumerate(prompts)]


def _reference(model: Any, rollout: Rollout, temperature: float = 1.0) -> list[float]:
    """Log-probs of the response from one plain forward over the whole sequence."""
    n = len(rollout.prompt.ids)
    model.eval()
    with torch.no_grad():
        ids = torch.tensor([rollout.prompt.ids + rollout.response_ids[:-1]])
        logprobs = (model(ids, use_cache=False).logits[0].float() / temperature).log_softmax(-1)
    return [logprobs[n - 1 + t, token].item() for t, token in enumerate(rollout.response_ids)]


@pytest.mark.filterwarnings("ignore")  # what families say of kernels that are not installed
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_a_plain_forward(family: str, tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny_model(family)
    engine: Engine = TransformersEngine(model, tokenizer, max_concurrent=6)
    rollouts = engine.generate(_requests(), Sampling(max_tokens=14, temperature=0.7, eos_ids=ENDS, seed=3))
    assert [(r.slot, r.sample) for r in rollouts] == [(slot, sample) for slot in range(5) for sample in range(3)]
    assert len({len(r.response_ids) for r in rollouts}) > 2
    # The delta rule is computed in chunks over a prompt and recurrently afterwards: other sums, other rounding.
    tolerance = 2e-4 if family == "qwen3_next" else 3e-5
    for rollout in rollouts:
        assert rollout.sampler_logprobs == pytest.approx(_reference(model, rollout, 0.7), abs=tolerance)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_responses_depend_on_their_key_alone(family: str, tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny_model(family)
    sampling = Sampling(max_tokens=14, eos_ids=ENDS, seed=3)

    def sample(requests: list[Request], max_concurrent: int) -> dict[tuple[int, int], tuple[int, ...]]:
        rollouts = TransformersEngine(model, tokenizer, max_concurrent=max_concurrent).generate(requests, sampling)
        return {(r.slot, r.sample): r.response_ids for r in rollouts}

    requests = _requests()
    expected = sample(requests, 16)
    assert len(set(expected.values())) > 10
    assert all(sample(requests, n) == expected for n in (1, 4))
    assert sample(requests[::-1], 5) == expected
    split = [sample([request], 8) for request in requests]
    assert {key: ids for part in split for key, ids in part.items()} == expected
    halves = [
        Request(r.prompt, n, r.step, r.slot, first_sample=first) for r in requests for first, n in ((0, 1), (1, 2))
    ]
    assert sample(halves, 16) == expected
    later = [Request(r.prompt, r.samples, r.step + 1, r.slot) for r in requests]
    assert sample(later, 16) != expected


def test_each_prompt_is_computed_once_and_finished_rows_cost_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny_model("llama")
    requests = _requests((5, 5, 5))
    engine = TransformersEngine(model, tokenizer, max_concurrent=16)
    engine.generate(requests[:1], Sampling(max_tokens=1))  # the check of the cache, done once
    fed: list[int] = []
    hook = model.model.layers[0].register_forward_pre_hook(lambda _, inputs: fed.append(inputs[0].shape[:2].numel()))
    rollouts = engine.generate(requests, Sampling(max_tokens=14, eos_ids=ENDS, seed=3))
    hook.remove()
    assert sum(fed) == sum(len(r.prompt.ids) for r in requests) + sum(len(r.response_ids) - 1 for r in rollouts)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_host_waits_for_the_device_once_a_token(family: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """Whatever reads a tensor's value, here or in the model's own code, would wait for all work that was queued."""
    reads: list[str] = []

    class Reading(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if getattr(func, "__name__", "") in READS:
                reads.append(func.__name__)
            return func(*args, **(kwargs or {}))

    engine = TransformersEngine(tiny_model(family), tokenizer, max_concurrent=16)
    engine.generate(_requests()[:1], Sampling(max_tokens=1))  # the check of the cache, done once
    with Reading():
        rollouts = engine.generate(_requests(), Sampling(max_tokens=14, eos_ids=ENDS, seed=3))
    assert reads == ["tolist"] * max(len(r.response_ids) for r in rollouts)


def test_prompts_are_prefilled_together_with_little_padding(llama: Any) -> None:
    decoder = choose_decoder(llama.eval())(8, 4)
    assert decoder.wave([64] * 9) == 9
    assert decoder.wave([64] * 70) == 64  # 4096 tokens
    assert decoder.wave([64, 60, 50]) == 2  # 128 tokens are enough to keep a processor busy
    assert decoder.wave([9, 8, 7, 6]) == 4
    assert decoder.wave([9000, 8]) == 1


def test_only_one_column_per_row_goes_through_the_head(tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny_model("llama")
    requests = _requests()
    engine = TransformersEngine(model, tokenizer, max_concurrent=16)
    engine.generate(requests[:1], Sampling(max_tokens=1))
    projected: list[int] = []
    hook = model.lm_head.register_forward_hook(lambda *args: projected.append(args[2].shape[:2].numel()))
    rollouts = engine.generate(requests, Sampling(max_tokens=14, eos_ids=ENDS, seed=3))
    hook.remove()
    assert sum(projected) == len(requests) + sum(len(r.response_ids) - 1 for r in rollouts)


def test_greedy_takes_the_most_likely_token(llama: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    engine = TransformersEngine(llama, tokenizer, max_concurrent=3)
    for rollout in engine.generate(_requests(samples=1), Sampling(max_tokens=9, temperature=0.0, eos_ids=ENDS)):
        ids = list(rollout.prompt.ids)
        for token in rollout.response_ids:
            assert token == llama(torch.tensor([ids])).logits[0, -1].argmax().item()
            ids.append(token)
        assert rollout.sampler_logprobs == pytest.approx(_reference(llama, rollout), abs=3e-5)


def test_every_eos_id_ends_a_response_and_stays_in_its_ids(llama: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    engine = TransformersEngine(llama, tokenizer, max_concurrent=8)
    rollouts = engine.generate(_requests(samples=6), Sampling(max_tokens=14, eos_ids=ENDS, seed=3))
    last = {r.response_ids[-1] for r in rollouts if r.finish_reason == "stop"}
    assert len(last) > 3
    assert last <= set(ENDS)
    for rollout in rollouts:
        assert not set(rollout.response_ids[:-1]) & set(ENDS)
        stopped = rollout.response_ids[-1] in ENDS
        assert rollout.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(rollout.response_ids) == 14
        body = rollout.response_ids[:-1] if stopped else rollout.response_ids
        assert rollout.text == tokenizer.decode(body, skip_special_tokens=True)
        assert len(rollout.response_ids) == len(rollout.sampler_logprobs) == len(rollout.trainable)
        assert rollout.dropped is None


def test_a_response_may_be_its_eos_alone(llama: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    engine = TransformersEngine(llama, tokenizer, max_concurrent=8)
    every = tuple(range(VOCABULARY))
    for rollout in engine.generate(_requests(), Sampling(max_tokens=14, eos_ids=every)):
        assert (len(rollout.response_ids), rollout.text, rollout.finish_reason) == (1, "", "stop")


def test_max_tokens_cuts_and_no_eos_is_needed(llama: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    engine = TransformersEngine(llama, tokenizer, max_concurrent=8)
    for length in (1, 2, 5):
        rollouts = engine.generate(_requests(), Sampling(max_tokens=length))
        assert {(len(r.response_ids), r.finish_reason, r.truncated) for r in rollouts} == {(length, "length", True)}


def test_more_tokens_do_not_change_the_first_ones(llama: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    engine = TransformersEngine(llama, tokenizer, max_concurrent=9)
    short = engine.generate(_requests(), Sampling(max_tokens=6, seed=1))
    long = engine.generate(_requests(), Sampling(max_tokens=110, seed=1))  # the cache grows several times
    assert all(b.response_ids[:6] == a.response_ids for a, b in zip(short, long, strict=True))
    assert all(b.sampler_logprobs == pytest.approx(_reference(llama, b), abs=3e-5) for b in long[::7])


@pytest.mark.parametrize("stop", [("b",), ("ab", "ea"), ("eaf", "jb"), ("ca",)])
def test_a_stop_string_ends_the_response_at_the_token_that_completes_it(
    stop: tuple[str, ...], llama: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    engine = TransformersEngine(llama, tokenizer, max_concurrent=8)
    free = engine.generate(_requests(samples=6), Sampling(max_tokens=20, seed=3, eos_ids=(EOS,)))
    stopped = engine.generate(_requests(samples=6), Sampling(max_tokens=20, seed=3, eos_ids=(EOS,), stop=stop))
    hits = 0
    for a, b in zip(free, stopped, strict=True):
        texts = [tokenizer.decode(a.response_ids[:n], skip_special_tokens=True) for n in range(len(a.response_ids) + 1)]
        ends = [n for n, text in enumerate(texts) if any(s in text for s in stop)]
        if not ends:
            assert (a.response_ids, a.text, a.finish_reason) == (b.response_ids, b.text, b.finish_reason)
            continue
        hits += 1
        assert b.response_ids == a.response_ids[: ends[0]]
        assert b.finish_reason == "stop"
        assert b.text == min((texts[ends[0]].split(s)[0] for s in stop if s in texts[ends[0]]), key=len)
    assert hits > 2


def test_prompts_without_room_fail_alone(llama: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    engine = TransformersEngine(llama, tokenizer, max_concurrent=8)
    requests = _requests((5, 128, 0, 120), samples=2)
    rollouts = engine.generate(requests, Sampling(max_tokens=14))
    assert [r.finish_reason for r in rollouts] == ["length"] * 2 + ["error"] * 4 + ["length"] * 2
    assert [len(r.response_ids) for r in rollouts] == [14, 14, 0, 0, 0, 0, 8, 8]
    assert "128" in (rollouts[2].dropped or "")
    assert "empty" in (rollouts[4].dropped or "")


def test_non_finite_logits_drop_their_response_only(llama: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    with torch.no_grad():
        llama.model.embed_tokens.weight[40] = torch.nan
    engine = TransformersEngine(llama, tokenizer, max_concurrent=4)
    rollouts = engine.generate(_requests(samples=8, seed=1), Sampling(max_tokens=16, seed=3))
    failed = [r for r in rollouts if r.finish_reason == "error"]
    assert 0 < len(failed) < len(rollouts)
    assert all(r.dropped and not r.response_ids for r in failed)
    for rollout in rollouts:
        if rollout.finish_reason != "error":
            assert 40 not in rollout.response_ids[:-1]
            assert rollout.sampler_logprobs == pytest.approx(_reference(llama, rollout), abs=3e-5)


def test_the_policy_is_left_as_found_and_can_be_trained(llama: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    llama.model.layers[1].eval()
    flags = {name: module.training for name, module in llama.named_modules()}
    weights = {name: weight.clone() for name, weight in llama.state_dict().items()}
    engine = TransformersEngine(llama, tokenizer, max_concurrent=4)
    engine.generate(_requests(), Sampling(max_tokens=5))
    assert {name: module.training for name, module in llama.named_modules()} == flags
    assert all(torch.equal(weights[name], weight) for name, weight in llama.state_dict().items())
    assert not any(weight.is_inference() for weight in llama.state_dict().values())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in llama.modules())
    llama(torch.tensor([[5, 6, 7]])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in llama.parameters())


def test_attention_is_switched_for_generation_only(llama: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    seen = []
    hook = llama.model.layers[0].register_forward_hook(lambda *_: seen.append(llama.config._attn_implementation))
    TransformersEngine(llama, tokenizer, max_concurrent=4).generate(_requests(), Sampling(max_tokens=2))
    hook.remove()
    assert set(seen) == {"gspo_grouped"}
    assert llama.config._attn_implementation == "sdpa"


def test_new_weights_are_used_at_once_and_named(llama: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    engine = TransformersEngine(llama, tokenizer, max_concurrent=4)
    before = engine.generate(_requests(), Sampling(max_tokens=5))
    assert {r.policy_version[0].version for r in before} == {0}
    with torch.no_grad():
        llama.lm_head.weight.mul_(-1)

    def exploding() -> Any:
        raise AssertionError("the engine shares the policy's weights and must not ask for them")
        yield

    engine.update_weights(exploding(), version=3)
    after = engine.generate(_requests(), Sampling(max_tokens=5))
    assert {(s.start, s.version) for r in after for s in r.policy_version} == {(0, 3)}
    assert all(r.sampler_logprobs == pytest.approx(_reference(llama, r), abs=3e-5) for r in after)
    assert [r.response_ids for r in before] != [r.response_ids for r in after]


def test_under_autocast_logits_are_produced_in_float32(llama: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    engine = TransformersEngine(llama, tokenizer, max_concurrent=4, autocast_dtype=torch.bfloat16)
    types = []
    hook = llama.lm_head.register_forward_hook(lambda _, inputs, output: types.append((inputs[0].dtype, output.dtype)))
    rollouts = engine.generate(_requests(), Sampling(max_tokens=8))
    hook.remove()
    assert set(types[-8:]) == {(torch.float32, torch.float32)}
    for rollout in rollouts:
        gap = torch.tensor(rollout.sampler_logprobs) - torch.tensor(_reference(llama, rollout))
        assert 0 < gap.abs().max() < 1.0
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("sampling", [Sampling(max_tokens=0), Sampling(max_tokens=3, stop=("x", ""))])
def test_settings_that_cannot_work_are_refused(
    sampling: Sampling, llama: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(BadInputError, match="sampling"):
        TransformersEngine(llama, tokenizer, max_concurrent=4).generate(_requests(), sampling)
