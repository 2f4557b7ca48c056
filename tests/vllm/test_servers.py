"""Two real vLLM servers, started by the printed commands, updated, and killed in the middle of a step."""

from __future__ import annotations

import copy
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from gspo.rollout.serve_command import serve_commands
from gspo.rollout.server_engine import ServerEngine
from gspo.types import Rollout, Sampling, VersionSpan
from tests.vllm.conftest import Policy, assert_agree, requests

pytest.importorskip("vllm", reason="run by `make test-vllm`, in an environment of its own")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500), pytest.mark.filterwarnings("default")]

START_SECONDS = 600.0
SAMPLING = Sampling(max_tokens=200, seed=9)


class Server:
    """A vLLM server in a process group of its own, so that it can be killed with all its workers."""

    def __init__(self, folder: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        (self.command,) = serve_commands(
            str(folder), [self.url], dtype="float32", on_cpu=True, max_concurrent=32, cache_gib=0.1
        )
        self.log = log
        self.start()

    def start(self) -> None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                ["bash", "-c", self.command], stdout=out, stderr=out, env=environment, start_new_session=True
            )

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def servers(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    logs = tmp_path_factory.mktemp("logs")
    running = [Server(folder, logs / f"{name}.log") for name in ("first", "second")]
    yield running
    for server in running:
        if server.process.poll() is None:
            server.kill()


@pytest.fixture(scope="module")
def engine(servers: list[Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerEngine]:
    from tests.rollout.families import tiny_tokenizer

    engine = ServerEngine(
        [server.url for server in servers],
        tiny_tokenizer(),
        weights_folder=tmp_path_factory.mktemp("weights"),
        max_concurrent=16,
        request_timeout=300.0,
        server_wait=START_SECONDS,
    )
    yield engine
    engine.close()


def test_servers_that_die_in_a_step_cost_nothing(servers: list[Server], engine: ServerEngine, policy: Policy) -> None:
    engine.update_weights(policy.tensors(), 0)
    wait_for_all(engine)
    first = engine.generate(requests(), SAMPLING)
    assert_step(first, policy, version=0)

    policy.change(seed=1)
    engine.update_weights(policy.tensors(), 1)
    whole = engine.generate(requests(), SAMPLING)
    assert_step(whole, policy, version=1)

    # One of two dies: the other takes over.
    interrupted = generate_while(engine, lambda: kill_when_busy(engine, servers[0]))
    assert_step(interrupted, policy, version=1)
    assert servers[0].process.poll() is not None

    # It comes back with the weights it was started from, during a step in which the other dies.
    servers[0].start()
    interrupted = generate_while(engine, lambda: kill_when_busy(engine, servers[1]))
    assert_step(interrupted, policy, version=1)
    assert engine.pool.servers[0].ready


def test_weights_that_arrive_inside_a_response_draw_its_later_tokens(
    servers: list[Server], policy: Policy, tmp_path: Path
) -> None:
    """Each token's log-prob is that of the version that its label names, given all tokens before it."""
    old = Policy(copy.deepcopy(policy.model), policy.tokenizer, policy.folder)
    alive = next(server for server in servers if server.process.poll() is None)
    engine = ServerEngine(
        [alive.url],
        policy.tokenizer,
        weights_folder=tmp_path,
        max_concurrent=16,
        request_timeout=300.0,
        server_wait=START_SECONDS,
        overlap=True,
    )
    engine.update_weights(old.tensors(), 0)
    wait_for_all(engine)
    policy.change(seed=2)
    rollouts = generate_while(engine, lambda: update_when_busy(engine, policy))
    engine.close()
    assert [(r.slot, r.sample) for r in rollouts] == [(slot, sample) for slot in range(4) for sample in range(4)]
    mixed = [r for r in rollouts if len(r.policy_version) == 2]
    assert mixed
    for rollout in rollouts:
        assert {span.version for span in rollout.policy_version} <= {0, 1}
        since = next((span.start for span in rollout.policy_version if span.version == 1), len(rollout.response_ids))
        expected = torch.cat([old.logprobs(rollout)[:since], policy.logprobs(rollout)[since:]])
        torch.testing.assert_close(torch.tensor(rollout.sampler_logprobs), expected, atol=1e-3, rtol=0)
    far = [(old.logprobs(r) - torch.tensor(r.sampler_logprobs))[r.policy_version[1].start :].abs().max() for r in mixed]
    assert min(far) > 0.1


def update_when_busy(engine: ServerEngine, policy: Policy) -> None:
    (server,) = engine.pool.servers
    deadline = time.monotonic() + START_SECONDS
    while server.running < 4:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    engine.update_weights(policy.tensors(), 1)


def wait_for_all(engine: ServerEngine) -> None:
    """The servers are still starting when they first get weights; they take them when they are up."""
    deadline = time.monotonic() + START_SECONDS
    while not all(server.ready for server in engine.pool.servers):
        assert time.monotonic() < deadline, [server.problem for server in engine.pool.servers]
        time.sleep(0.5)


def generate_while(engine: ServerEngine, act: Any) -> list[Rollout]:
    thread = threading.Thread(target=act)
    thread.start()
    rollouts = engine.generate(requests(), SAMPLING)
    thread.join()
    return rollouts


def kill_when_busy(engine: ServerEngine, server: Server) -> None:
    (known,) = [s for s in engine.pool.servers if urlsplit(s.url).port == urlsplit(server.url).port]
    while known.running < 4:
        time.sleep(0.001)
    server.kill()


def assert_step(rollouts: list[Rollout], policy: Policy, version: int) -> None:
    assert [(r.slot, r.sample) for r in rollouts] == [(slot, sample) for slot in range(4) for sample in range(4)]
    assert len({r.response_ids for r in rollouts}) == 16
    assert all(r.policy_version == (VersionSpan(0, version),) for r in rollouts)
    assert all(torch.isfinite(torch.tensor(r.sampler_logprobs)).all() for r in rollouts)
    assert_agree(rollouts, policy)
