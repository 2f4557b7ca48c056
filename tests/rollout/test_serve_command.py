"""The commands that start fitting servers."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from gspo.errors import BadInputError
from gspo.rollout.serve_command import serve_commands


def words(**settings: Any) -> list[list[str]]:
    defaults: dict[str, Any] = {"dtype": "bfloat16", "on_cpu": False, "max_concurrent": 64, "cache_gib": 4.0}
    commands = serve_commands("my model", ["http://10.0.0.5:8001", "https://h/v"], **{**defaults, **settings})
    return [shlex.split(command) for command in commands]


def test_every_server_gets_its_own_address() -> None:
    first, second = words()
    assert first[first.index("--host") + 1] == "10.0.0.5"
    assert first[first.index("--port") + 1] == "8001"
    assert (second[second.index("--host") + 1], second[second.index("--port") + 1]) == ("h", "443")
    assert first[first.index("--model") + 1] == "my model"


def test_what_the_engine_relies_on_is_switched_on() -> None:
    for command in words(trust_remote_code=True):
        assert command[0] == "VLLM_SERVER_DEV_MODE=1"
        assert "--enable-scale-out" in command
        assert command[command.index("--logprobs-mode") + 1] == "processed_logprobs"
        assert command[command.index("--generation-config") + 1] == "vllm"
        assert command[command.index("--max-num-seqs") + 1] == "64"
        assert command[-1] == "--trust-remote-code"


def test_a_cpu_server_starts_fast_and_leaves_memory_to_training() -> None:
    command = words(on_cpu=True, cache_gib=0.5)[0]
    assert "OMP_WAIT_POLICY=PASSIVE" in command
    assert "--enforce-eager" in command
    assert command[command.index("--kv-cache-memory-bytes") + 1] == str(2**29)
    assert "--enforce-eager" not in words()[0]


def test_experts_are_reported_where_they_are_wanted() -> None:
    command = words(experts=True)[0]
    assert {"VLLM_USE_V2_MODEL_RUNNER=1", "--enable-return-routed-experts", "--enable-prefix-caching"} < set(command)
    assert not {"VLLM_USE_V2_MODEL_RUNNER=1", "--enable-return-routed-experts"} & set(words()[0])
    with pytest.raises(BadInputError, match="vLLM on a CPU does not report experts"):
        words(experts=True, on_cpu=True)


def test_batch_invariance_is_asked_for_where_vllm_has_it() -> None:
    assert "VLLM_BATCH_INVARIANT=1" in words(batch_invariant=True)[0]
    assert "VLLM_BATCH_INVARIANT=1" not in words()[0]
    with pytest.raises(BadInputError, match=r"likelihoods\.batch_invariant = true: vLLM has .* for GPUs alone"):
        words(batch_invariant=True, on_cpu=True)


def test_kept_tokens_are_reported_where_they_are_wanted() -> None:
    command = words(supports=True)[0]
    assert {"VLLM_USE_V2_MODEL_RUNNER=1", "--return-sampling-mask"} < set(command)
    assert not {"VLLM_USE_V2_MODEL_RUNNER=1", "--return-sampling-mask"} & set(words()[0])
    with pytest.raises(BadInputError, match="vLLM on a CPU does not report the tokens that it kept"):
        words(supports=True, on_cpu=True)
