"""The engine that a config names, and that it gets the policy's weights and no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import gspo.training.loop as loop
from gspo.config import Config, RoutingConfig, build_config
from gspo.errors import BadInputError
from gspo.policy.export import named_tensors
from gspo.policy.load import load_policy
from gspo.reporting.journal import read_rollouts
from gspo.rollout.server_engine import ServerEngine
from gspo.training.engine import start_engine
from tests.policy.tiny import save_tiny
from tests.rollout.fake_vllm import FakeVllm
from tests.training.tiny_task import early_words


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "tiny", scale=2.0)


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    server = FakeVllm(vocabulary=40)
    yield server
    server.die()


def settings(folder: Path, tmp_path: Path, **rollout: Any) -> Config:
    return build_config(
        {
            "run": {"dir": str(tmp_path / "runs"), "name": "run"},
            "model": {"path": str(folder)},
            "task": {"kind": "function", "function": "tests.training.tiny_task:rows", "held_out": 2},
            "rollout": {"prompts": 4, "group_size": 4, "max_tokens": 6, **rollout},
            "training": {"steps": 2, "minibatches": 2},
            "optimizer": {"learning_rate": 1e-2},
        }
    )


def test_servers_start_with_the_policys_weights(folder: Path, tmp_path: Path, server: FakeVllm) -> None:
    policy = load_policy(str(folder))
    with torch.no_grad():
        next(policy.model.parameters()).add_(1.0)
    config = settings(folder, tmp_path, engine="server", servers=[server.url])
    engine = start_engine(policy, config, version=6)
    wanted = dict(named_tensors(policy))
    assert server.loaded.keys() == wanted.keys()
    assert all(torch.equal(server.loaded[name], tensor) for name, tensor in wanted.items())
    assert server.label.endswith("version-6")
    engine.close()


def test_a_run_on_servers_hands_over_every_update(folder: Path, tmp_path: Path, server: FakeVllm) -> None:
    config = settings(folder, tmp_path, engine="server", servers=[server.url])
    result = loop.train(config, reward=early_words)
    versions = {
        step: {span.version for r in read_rollouts(path) for span in r.policy_version}
        for step, path in enumerate(sorted((result.run / "rollouts").glob("step-*")), start=1)
    }
    assert versions == {1: {0}, 2: {2}}
    saved = load_file(result.checkpoint / "model.safetensors")
    assert all(torch.equal(server.loaded[name], tensor) for name, tensor in saved.items())
    start = load_file(folder / "model.safetensors")
    assert any(not torch.equal(saved[name], start[name]) for name in saved)


def test_vllm_that_is_not_installed_is_one_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    with pytest.raises(BadInputError, match=r'rollout.engine: "vllm" needs vLLM .* install the extra vllm'):
        start_engine(load_policy(str(folder)), settings(folder, tmp_path, engine="vllm"), version=0)


def test_an_engine_that_cannot_take_the_weights_is_closed(folder: Path, tmp_path: Path) -> None:
    server = FakeVllm(processed=False)
    config = settings(folder, tmp_path, engine="server", servers=[server.url])
    with pytest.raises(BadInputError, match="processed_logprobs"):
        start_engine(load_policy(str(folder)), config, version=0)
    assert list((tmp_path / "runs" / "server-weights").iterdir()) == []
    server.die()


def test_servers_are_asked_for_experts_under_the_policys_names(tmp_path: Path) -> None:
    policy = load_policy(str(save_tiny(tmp_path / "moe", "qwen3_moe")))
    server = FakeVllm(vocabulary=40, reports_experts=True)
    config = settings(tmp_path / "moe", tmp_path, engine="server", servers=[server.url])
    replaying = config.model_copy(update={"routing": RoutingConfig(replay="sampler")})
    for given, wanted in ((config, None), (replaying, {"model.layers.0.mlp": 6, "model.layers.1.mlp": 6})):
        engine = start_engine(policy, given, version=0)
        assert isinstance(engine, ServerEngine)
        assert engine.experts == wanted
        engine.close()
    server.reports_experts = False
    with pytest.raises(BadInputError, match="does not report the experts that it used"):
        start_engine(policy, replaying, version=0)
    server.die()


def test_servers_are_asked_for_supports_where_sampling_truncates(folder: Path, tmp_path: Path) -> None:
    policy = load_policy(str(folder))
    server = FakeVllm(vocabulary=40, reports_supports=True)
    for truncation, wanted in (({}, False), ({"top_p": 0.9, "top_k": 30}, True)):
        config = settings(folder, tmp_path, engine="server", servers=[server.url], **truncation)
        engine = start_engine(policy, config, version=0)
        assert isinstance(engine, ServerEngine)
        assert engine.supports == wanted
        engine.close()
    server.reports_supports = False
    with pytest.raises(BadInputError, match="does not report the tokens that it kept"):
        start_engine(policy, config, version=0)
    server.die()
