"""The commands that start vLLM servers that the server engine can use."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from urllib.parse import urlsplit

import torch

from gspo.config import Config
from gspo.policy.devices import choose_autocast, choose_device
from gspo.policy.sources import resolve_path
from gspo.rollout.vllm_format import check_batch_invariant
from gspo.rollout.vllm_routes import check_reports_experts
from gspo.rollout.vllm_support import check_reports_support


def commands_of(config: Config) -> list[str]:
    """The commands for the servers of a config, or for one on port 8000 of this machine if it names none.

    `auto` devices and dtypes are resolved as on this machine.
    """
    device = choose_device(config.model.device)
    dtype = choose_autocast(config.model.dtype, device) or torch.float32
    return serve_commands(
        resolve_path(config.model.path),
        config.rollout.servers or ["http://127.0.0.1:8000"],
        dtype=str(dtype).removeprefix("torch."),
        on_cpu=device.type == "cpu",
        max_concurrent=config.rollout.max_concurrent,
        cache_gib=config.rollout.cache_gib,
        trust_remote_code=config.model.trust_remote_code,
        batch_invariant=config.likelihoods.batch_invariant,
        experts=config.routing.replay == "sampler",
        supports=config.rollout.truncated,
    )


def serve_commands(
    path: str,
    urls: Sequence[str],
    *,
    dtype: str,
    on_cpu: bool,
    max_concurrent: int,
    cache_gib: float,
    trust_remote_code: bool = False,
    batch_invariant: bool = False,
    experts: bool = False,
    supports: bool = False,
) -> list[str]:
    """One shell command for each URL, to be run on the machine that the URL names.

    `VLLM_SERVER_DEV_MODE` opens the interface that replaces weights to everyone who reaches the port: keep it inside
    a private network. On a CPU compilation, which takes minutes, is left out and waiting threads do not spin. With
    `experts` the servers report those that they used, with `supports` what truncated sampling kept, with
    `batch_invariant` a token's numbers do not depend on what is computed beside it; raises BadInputError where they
    cannot.

    >>> for line in serve_commands("m", ["http://127.0.0.1:8000"], dtype="bfloat16", on_cpu=False, max_concurrent=64,
    ...                            cache_gib=4.0)[0].split(" --"):
    ...     print(line)
    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server
    model m
    host 127.0.0.1
    port 8000
    dtype bfloat16
    max-num-seqs 64
    enable-scale-out
    logprobs-mode processed_logprobs
    generation-config vllm
    """
    if batch_invariant:
        check_batch_invariant(on_cpu=on_cpu)
    if experts:
        check_reports_experts(on_cpu=on_cpu)
    if supports:
        check_reports_support(on_cpu=on_cpu)
    commands = []
    for url in urls:
        parts = urlsplit(url)
        environment = {"VLLM_SERVER_DEV_MODE": "1"}
        arguments = ["--model", path, "--host", parts.hostname or "127.0.0.1"]
        arguments += ["--port", str(parts.port or (443 if parts.scheme == "https" else 80))]
        arguments += ["--dtype", dtype, "--max-num-seqs", str(max_concurrent), "--enable-scale-out"]
        arguments += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
        if on_cpu:
            environment |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
            arguments += ["--enforce-eager", "--kv-cache-memory-bytes", str(int(cache_gib * 2**30))]
        if batch_invariant:
            environment["VLLM_BATCH_INVARIANT"] = "1"
        if experts or supports:
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        if supports:
            arguments.append("--return-sampling-mask")
        if experts:
            arguments += ["--enable-return-routed-experts", "--enable-prefix-caching"]
        if trust_remote_code:
            arguments.append("--trust-remote-code")
        settings = [f"{name}={value}" for name, value in environment.items()]
        commands.append(" ".join([*settings, "python -m vllm.entrypoints.openai.api_server", shlex.join(arguments)]))
    return commands
