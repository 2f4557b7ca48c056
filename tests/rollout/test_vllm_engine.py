"""What vLLM is told in this process, by a stand-in for its `LLM`; tests/vllm has the real one."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from gspo.errors import BadInputError, GspoError
from gspo.rollout.vllm_engine import VllmEngine
from gspo.types import Prompt, Request, Sampling, VersionSpan

REQUESTS = [Request(Prompt("p", "", (5, 6)), samples=2, step=0, slot=0)]


@dataclass
class Span:
    version: str
    start: int
    end: int


class StandIn:
    """Answers every prompt with the tokens 7, 8 and keeps what it was asked for."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.calls: list[Any] = []
        self.version = "default"
        self.emptied = True
        self.reason = "length"
        self.routed: np.ndarray | None = None
        self.kept: list[list[int]] | None = None
        self.loaded: dict[str, Tensor] = {}
        self.model_config = SimpleNamespace(max_model_len=64, get_vocab_size=lambda: 101)

    def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        assert len(prompts) == len(params)
        assert not use_tqdm
        self.calls.append("generate")
        self.asked = params
        logprobs = [{7: SimpleNamespace(logprob=-1.0)}, {8: SimpleNamespace(logprob=-2.0)}]
        spans = [Span(self.version, 0, 2)]
        output = {"token_ids": [7, 8], "logprobs": logprobs, "finish_reason": self.reason, "weight_versions": spans}
        output["routed_experts"] = self.routed
        output["sampling_mask"] = None if self.kept is None else SimpleNamespace(token_ids=self.kept)
        return [SimpleNamespace(outputs=[SimpleNamespace(**output)]) for _ in prompts]

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        self.calls.append(method)
        self.loaded = dict(kwargs["weights_iterator"])

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        return self.emptied

    def update_weight_version(self, version: str) -> None:
        self.version = version

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake_up", *tags))

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerFast) -> Any:
    module = SimpleNamespace(LLM=StandIn, SamplingParams=lambda **fields: fields)
    monkeypatch.setitem(sys.modules, "vllm", module)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "")

    def start(device: str, **settings: Any) -> VllmEngine:
        return VllmEngine(
            "m",
            tokenizer,
            device=torch.device(device),
            dtype=torch.bfloat16,
            max_concurrent=16,
            cache_gib=0.5,
            **settings,
        )

    return start


def test_on_a_gpu_it_is_awake_only_while_it_is_needed(start: Any) -> None:
    engine = start("cuda")
    engine.update_weights([("w", torch.ones(1))], 1)
    engine.generate(REQUESTS, Sampling(max_tokens=2))
    engine.generate(REQUESTS, Sampling(max_tokens=2))
    assert engine.llm.calls == [
        ("sleep", 1),
        ("wake_up", "weights"),
        "reload_weights",
        "reset_prefix_cache",
        ("wake_up", "kv_cache"),
        "generate",
        ("sleep", 1),
        ("wake_up", "weights", "kv_cache"),
        "generate",
        ("sleep", 1),
    ]
    assert engine.llm.settings["enable_sleep_mode"]
    assert not engine.llm.settings["enforce_eager"]


def test_on_a_cpu_it_never_sleeps(start: Any) -> None:
    engine = start("cpu")
    engine.update_weights([("w", torch.ones(1))], 1)
    engine.generate(REQUESTS, Sampling(max_tokens=2))
    assert engine.llm.calls == ["reload_weights", "reset_prefix_cache", "generate"]
    settings = engine.llm.settings
    assert (settings["dtype"], settings["max_num_seqs"], settings["kv_cache_memory_bytes"]) == ("bfloat16", 16, 2**29)
    assert (settings["logprobs_mode"], settings["generation_config"]) == ("processed_logprobs", "vllm")


def test_rollouts_carry_ids_log_probs_and_the_version_that_sampled_them(start: Any) -> None:
    engine = start("cpu")
    engine.update_weights([("model.embed_tokens.weight", torch.ones(1))], 4)
    assert engine.llm.loaded.keys() == {"model.embed_tokens.weight", "lm_head.weight"}
    for rollout in engine.generate(REQUESTS, Sampling(max_tokens=2)):
        assert (rollout.response_ids, rollout.sampler_logprobs) == ((7, 8), (-1.0, -2.0))
        assert rollout.policy_version == (VersionSpan(0, 4),)
        assert rollout.dropped is None


def test_a_response_of_other_weights_is_dropped(start: Any) -> None:
    engine = start("cpu")
    engine.update_weights([("w", torch.ones(1))], 4)
    engine.llm.version = "3"
    assert {r.finish_reason for r in engine.generate(REQUESTS, Sampling(max_tokens=2))} == {"error"}


def test_a_response_that_vllm_gave_up_is_dropped(start: Any) -> None:
    engine = start("cpu")
    engine.llm.reason = "abort"
    rollouts = engine.generate(REQUESTS, Sampling(max_tokens=2))
    assert [r.dropped for r in rollouts] == ["vLLM ended the response with 'abort'"] * 2


def test_old_prefixes_that_stay_are_an_error(start: Any) -> None:
    engine = start("cpu")
    engine.llm.emptied = False
    with pytest.raises(GspoError, match="prefix cache"):
        engine.update_weights([("w", torch.ones(1))], 1)


def test_experts_come_under_the_names_of_our_layers(start: Any) -> None:
    engine = start("cuda", experts={"model.layers.0.mlp": 8, "model.layers.2.mlp": 8})
    assert engine.llm.settings["enable_return_routed_experts"]
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    engine.update_weights([("w", torch.ones(1))], 1)
    # Two prompt tokens and the first of two response tokens are fed; layer 1 is dense and stays at zero.
    engine.llm.routed = np.array(
        [[[3, 5], [0, 0], [7, 1]], [[2, 0], [0, 0], [4, 6]], [[1, 4], [0, 0], [5, 0]]], np.uint8
    )
    for rollout in engine.generate(REQUESTS, Sampling(max_tokens=2)):
        assert rollout.routes is not None
        found = {name: (rows.dtype, rows.tolist()) for name, rows in rollout.routes.items()}
        assert found == {
            "model.layers.0.mlp": (np.uint8, [[3, 5], [2, 0], [1, 4]]),
            "model.layers.2.mlp": (np.uint8, [[7, 1], [4, 6], [5, 0]]),
        }


def test_experts_are_asked_for_only_where_they_are_wanted(start: Any) -> None:
    engine = start("cuda")
    assert not engine.llm.settings["enable_return_routed_experts"]
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == ""
    engine.update_weights([("w", torch.ones(1))], 1)
    assert all(r.routes is None for r in engine.generate(REQUESTS, Sampling(max_tokens=2)))


def test_experts_that_do_not_come_end_the_run(start: Any) -> None:
    engine = start("cuda", experts={"model.layers.0.mlp": 8})
    engine.update_weights([("w", torch.ones(1))], 1)
    with pytest.raises(GspoError, match="vLLM reports no experts"):
        engine.generate(REQUESTS, Sampling(max_tokens=2))


def test_on_a_cpu_experts_are_refused(start: Any) -> None:
    with pytest.raises(BadInputError, match="vLLM on a CPU does not report experts"):
        start("cpu", experts={"model.layers.0.mlp": 8})


def test_batch_invariance_is_asked_for_on_a_gpu_and_refused_on_a_cpu(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    start("cuda")
    assert "VLLM_BATCH_INVARIANT" not in os.environ
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    start("cuda", batch_invariant=True)
    assert os.environ["VLLM_BATCH_INVARIANT"] == "1"
    with pytest.raises(BadInputError, match=r"likelihoods\.batch_invariant = true: vLLM has such a mode for GPUs"):
        start("cpu", batch_invariant=True)


def test_supports_are_asked_for_and_read(start: Any) -> None:
    engine = start("cuda", supports=True)
    assert engine.llm.settings["return_sampling_mask"]
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    engine.llm.kept = [[9, 7], [8]]
    sampling = Sampling(max_tokens=2, top_k=5, record_support=True)
    for rollout in engine.generate(REQUESTS, sampling):
        assert rollout.support is not None
        assert (rollout.support.ids.tolist(), rollout.support.offsets.tolist()) == ([7, 9, 8], [0, 2, 3])
    (first, _) = engine.generate(REQUESTS, Sampling(max_tokens=2, temperature=0.0))
    assert first.support is None
    assert (engine.llm.asked[0]["temperature"], engine.llm.asked[0]["top_k"]) == (1.0, 1)
    engine.llm.kept = [[9, 7]]
    with pytest.raises(
        GspoError, match=r"^rollout\.top_k: vLLM reports no kept tokens for each of 2 .*found 1 of them"
    ):
        engine.generate(REQUESTS, sampling)


def test_supports_are_refused_on_a_cpu_and_left_out_where_unwanted(start: Any) -> None:
    with pytest.raises(BadInputError, match=r"^rollout\.top_p, .*vLLM on a CPU does not report the tokens"):
        start("cpu", supports=True)
    assert not start("cuda").llm.settings["return_sampling_mask"]
