"""Training on top-p, top-k and min-p: what was kept travels with the rollout, and every likelihood is taken over it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gspo.training.loop as loop
from gspo.config import build_config
from gspo.errors import BadInputError
from gspo.objectives import sequence_log_ratio
from gspo.policy.load import load_policy
from gspo.policy.model import Policy
from gspo.policy.sampled_routes import sampled_routes
from gspo.reporting.journal import read_rollouts, supports_file
from gspo.rollout.transformers_engine import TransformersEngine
from gspo.types import KeptSupport, Prompt, Request, Rollout, Sampling
from tests.policy.tiny import VOCABULARY, gradients, save_tiny, worst
from tests.training.test_loop import CutError, cut_after, lines, weights
from tests.training.tiny_task import early_words

FAMILIES = ("llama", "qwen3_moe")
BASE = {
    "task": {"kind": "function", "function": "tests.training.tiny_task:rows", "held_out": 6},
    "rollout": {"prompts": 4, "group_size": 4, "max_tokens": 6, "temperature": 1.3, "top_p": 0.9, "top_k": 20},
    "optimizer": {"learning_rate": 1e-3},
    "training": {"steps": 3, "minibatches": 2},
    "checkpoint": {"every": 2},
    "objective": {"clip_low": 0.05, "clip_high": 0.05},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {name: save_tiny(tmp_path_factory.mktemp(name), name) for name in FAMILIES}


@pytest.fixture(scope="module")
def policies(folders: dict[str, Any]) -> dict[str, Policy]:
    return {name: load_policy(folder, reference=True) for name, folder in folders.items()}


def configured(
    folders: dict[str, Any], tmp_path: Any, name: str = "run", family: str = "llama", **sections: Any
) -> Any:
    data: dict[str, Any] = {**BASE, "model": {"path": str(folders[family])}}
    data["run"] = {"dir": str(tmp_path), "name": name}
    for section, values in sections.items():
        data[section] = {**data.get(section, {}), **values}
    return build_config(data)


def sampled(policy: Policy, sampling: Sampling, seed: int = 0) -> list[Rollout]:
    """Ragged responses to three prompts, with routes where the model has experts."""
    generator = np.random.default_rng(seed)
    prompts = [tuple(generator.integers(3, VOCABULARY, n).tolist()) for n in (5, 2)]
    engine = TransformersEngine(
        policy.model, policy.tokenizer, max_concurrent=4, record_routes=hasattr(policy.model.config, "num_experts")
    )
    requests = [Request(Prompt(str(i), "", ids), 3, step=1, slot=i) for i, ids in enumerate(prompts)]
    return engine.generate(requests, sampling)


def scored(policy: Policy, rollouts: list[Rollout], kind: str, temperature: float) -> Any:
    layout = policy.layout(rollouts, kind=kind)
    routes = None if rollouts[0].routes is None else sampled_routes(layout, rollouts)
    return policy.score(layout, temperature=temperature, routes=routes)


def sampler_logprobs(rollouts: list[Rollout], columns: int) -> torch.Tensor:
    return torch.tensor([[*r.sampler_logprobs, *[0.0] * (columns - len(r.sampler_logprobs))] for r in rollouts])


TRUNCATIONS = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.3, 2.0),
        "top_p": st.sampled_from([1.0, 0.98, 0.9, 0.5]),
        "top_k": st.sampled_from([0, 2, 5, 40, VOCABULARY, 1000]),
        "min_p": st.sampled_from([0.0, 0.1, 0.6]),
    }
)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=15)
@given(truncation=TRUNCATIONS, seed=st.integers(0, 99), kind=st.sampled_from(["shared", "packed", "padded"]))
def test_at_equal_weights_every_ratio_is_one_whatever_the_sampling(
    policies: dict[str, Policy], family: str, truncation: dict[str, Any], seed: int, kind: str
) -> None:
    policy = policies[family]
    sampling = Sampling(max_tokens=9, eos_ids=tuple(range(1, 20)), seed=seed, record_support=True, **truncation)
    rollouts = sampled(policy, sampling, seed)
    assert all((r.support is not None) == sampling.truncated for r in rollouts)
    scores = scored(policy, rollouts, kind, sampling.temperature)
    sampler = sampler_logprobs(rollouts, scores.logprobs.shape[1])
    assert ((scores.logprobs - sampler).abs() <= 1e-5)[scores.mask].all()
    assert sequence_log_ratio(scores.logprobs, sampler, scores.mask).exp().sub(1).abs().max() <= 1e-5


@pytest.mark.parametrize("truncation", [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.7}])
def test_without_the_support_the_ratios_would_be_wrong(policies: dict[str, Policy], truncation: dict[str, Any]) -> None:
    policy = policies["llama"]
    sampling = Sampling(max_tokens=9, temperature=1.5, record_support=True, **truncation)
    rollouts = sampled(policy, sampling)
    bare = [dataclasses.replace(r, support=None) for r in rollouts]
    scores = [policy.score(policy.layout(given), temperature=1.5) for given in (rollouts, bare)]
    sampler = sampler_logprobs(rollouts, scores[0].logprobs.shape[1])
    with_support, without = (sequence_log_ratio(s.logprobs, sampler, s.mask).exp() for s in scores)
    assert with_support.sub(1).abs().max() < 1e-5
    assert without.max() < 0.9  # by what was cut off, each response's ratio


def masked_plain(model: Any, rollout: Rollout, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob and entropy of each response token from masked logits, in the model's own precision."""
    ids = torch.tensor([[*rollout.prompt.ids, *rollout.response_ids]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(rollout.prompt.ids) - 1 : -1] / temperature
    assert rollout.support is not None
    offsets = rollout.support.offsets
    mask = torch.ones_like(logits, dtype=torch.bool)
    for t in range(len(rollout.response_ids)):
        mask[t, torch.from_numpy(rollout.support.ids[offsets[t] : offsets[t + 1]].astype(np.int64))] = False
    logs = logits.masked_fill(mask, -torch.inf).log_softmax(-1)
    entropies = -(logs.exp() * logs.masked_fill(mask, 0.0)).sum(-1)
    return logs[torch.arange(len(mask)), torch.tensor(rollout.response_ids)], entropies


@pytest.mark.parametrize("kind", ["shared", "packed", "padded"])
def test_gradients_are_those_of_masked_logits_in_float64(folders: dict[str, Any], kind: str) -> None:
    policy = load_policy(folders["llama"], layout=kind)
    sampling = Sampling(7, temperature=1.2, top_p=0.9, top_k=12, eos_ids=tuple(range(1, 15)), record_support=True)
    rollouts = sampled(policy, sampling)
    assert len({len(r.response_ids) for r in rollouts}) > 2
    with policy.forward(policy.layout(rollouts), temperature=1.2) as scores:
        columns = scores.logprobs.shape[1]
        first, second = torch.randn(2, len(rollouts), columns, generator=torch.Generator().manual_seed(3))
        (scores.logprobs * first + scores.entropy * second).sum().backward()
    found = gradients(policy.model)
    exact = load_policy(folders["llama"]).model.double()
    loss = torch.zeros((), dtype=torch.float64)
    for n, rollout in enumerate(rollouts):
        logprobs, entropies = masked_plain(exact, rollout, 1.2)
        size = len(logprobs)
        loss = loss + (logprobs * first[n, :size] + entropies * second[n, :size]).sum()
        torch.testing.assert_close(scores.logprobs[n, :size].double(), logprobs, atol=3e-6, rtol=1e-5)
        torch.testing.assert_close(scores.entropy[n, :size].double(), entropies, atol=3e-6, rtol=1e-5)
    loss.backward()
    assert worst({k: v.double() for k, v in found.items()}, gradients(exact)) < 1e-5


def test_the_reference_is_taken_over_the_same_support(policies: dict[str, Policy]) -> None:
    """At the starting weights its KL to the policy is 0, estimate and all."""
    policy = policies["llama"]
    rollouts = sampled(policy, Sampling(6, temperature=1.4, top_p=0.7, record_support=True))
    layout = policy.layout(rollouts)
    current, reference = policy.score(layout, temperature=1.4), policy.reference(layout, temperature=1.4)
    torch.testing.assert_close(reference.logprobs, current.logprobs, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("family", "sections"),
    [
        ("llama", {}),
        ("llama", {"likelihoods": {"old": "sampler"}, "model": {"layout": "packed"}}),
        ("qwen3_moe", {"routing": {"replay": "sampler"}, "objective": {"kl_weight": 0.01}}),
    ],
)
def test_a_run_resumed_from_the_journal_ends_at_the_same_bits(
    folders: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch, family: str, sections: dict[str, Any]
) -> None:
    whole = loop.train(configured(folders, tmp_path, "whole", family, **sections), reward=early_words)
    config = configured(folders, tmp_path, "cut", family, **sections)
    with pytest.raises(CutError):
        loop.train(config, reward=early_words, callbacks=[cut_after(3)])
    for file in (tmp_path / "cut" / "checkpoints").glob("step-000003*"):
        for inside in file.iterdir():
            inside.unlink()
        file.rmdir()
    generate, steps = TransformersEngine.generate, set()

    def remember(engine: Any, requests: Any, sampling: Sampling) -> list[Rollout]:
        steps.update(request.step for request in requests)
        return generate(engine, requests, sampling)

    monkeypatch.setattr(TransformersEngine, "generate", remember)
    resumed = loop.train(config, reward=early_words, resume=tmp_path / "cut")
    assert steps <= {0}  # evaluations: step 3 came from the journal
    assert (resumed.run / "metrics.jsonl").read_text() == (whole.run / "metrics.jsonl").read_text()
    a, b = weights(whole.checkpoint), weights(resumed.checkpoint)
    assert all(torch.equal(a[k], b[k]) for k in a)
    path = whole.run / "rollouts" / "step-000002.jsonl.zst"
    assert supports_file(path).exists()
    for rollout in read_rollouts(path):
        assert rollout.support is not None
        assert rollout.support.counts.min() >= 1
        assert (rollout.support.counts[1:] <= 20).all()  # the first is drawn among many of the very same probability
    metrics = lines(whole.run / "metrics.jsonl")
    assert max(m["mismatch/token_max"] for m in metrics) < 1e-5
    sizes = np.concatenate([r.support.counts for r in read_rollouts(path) if r.support is not None])
    assert metrics[1]["sums"]["support/size"] == [sizes.sum(), len(sizes)]
    assert (metrics[1]["support/size_max"], metrics[1]["support/unusable"]) == (sizes.max(), 0)


def test_evaluations_record_no_support(folders: dict[str, Any], tmp_path: Any) -> None:
    evaluation = {"temperature": 1.0, "top_p": 0.9}
    config = configured(folders, tmp_path, evaluation=evaluation, training={"steps": 1})
    run = loop.train(config, reward=early_words).run
    path = run / "evaluations" / "step-000000.jsonl.zst"
    assert all(r.support is None for r in read_rollouts(path))
    assert not supports_file(path).exists()


def test_an_engine_that_says_the_wrong_thing_costs_its_rollout_and_one_that_says_nothing_the_run(
    folders: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = TransformersEngine.generate

    def faulty(engine: Any, requests: Any, sampling: Sampling) -> list[Rollout]:
        first, *rest = generate(engine, requests, sampling)
        if not sampling.record_support:
            return [first, *rest]
        emptied = KeptSupport.of([np.zeros(0, np.int32)] * len(first.response_ids))
        return [dataclasses.replace(first, support=emptied), *rest]

    monkeypatch.setattr(TransformersEngine, "generate", faulty)
    run = loop.train(configured(folders, tmp_path, training={"steps": 1}), reward=early_words).run
    (line,) = lines(run / "metrics.jsonl")
    assert line["sums"]["support/unusable"] == line["sums"]["reward/dropped"] == [1, 16]
    (dropped, *_) = read_rollouts(run / "rollouts" / "step-000001.jsonl.zst")
    assert dropped.dropped == "kept support is unusable: that of response token 0 is empty"

    def silent(engine: Any, requests: Any, sampling: Sampling) -> list[Rollout]:
        return generate(engine, requests, dataclasses.replace(sampling, record_support=False))

    monkeypatch.setattr(TransformersEngine, "generate", silent)
    with pytest.raises(BadInputError, match=r"^rollout\.top_p, rollout\.top_k, rollout\.min_p: the inference engine"):
        loop.train(configured(folders, tmp_path, "silent"), reward=early_words)
