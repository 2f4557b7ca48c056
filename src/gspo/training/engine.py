"""The inference engine that a config names. Only the one that is wanted is imported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gspo.config import Config, MultiTurnTask
from gspo.distributed.sharding import gathered
from gspo.distributed.world import World
from gspo.errors import BadInputError
from gspo.policy.export import named_tensors
from gspo.policy.model import Policy
from gspo.policy.moe import moe_layers
from gspo.rollout.engine import Engine
from gspo.rollout.relay import RelayEngine
from gspo.rollout.vllm_support import check_reports_support
from gspo.training.bitwise import check_bitwise
from gspo.types import Request, Rollout, Sampling


def start_engine(policy: Policy, config: Config, version: int, world: World | None = None) -> Engine:
    """Starts the engine and gives it the policy's weights, whatever it has started from.

    A multi-turn task is played over it. Servers are the main process's to talk to, for all of them.
    """
    world = world or World()
    relayed = world.size > 1 and config.rollout.engine == "server"
    engine: Engine = RelayEngine(None, world)
    if world.is_main or not relayed:
        engine = _own_engine(policy, config)
        engine = RelayEngine(engine, world) if relayed else engine
    try:
        engine.update_weights(named_tensors(policy), version)
    except BaseException:
        engine.close()
        raise
    return engine


def check_engine(config: Config, device: torch.device, world: World | None = None) -> None:
    """Raises BadInputError, before any weight is read, where the engine cannot do what the config asks of it."""
    if config.rollout.truncated and config.rollout.engine == "vllm":
        check_reports_support(on_cpu=device.type == "cpu")
    if world is not None and world.size > 1 and config.rollout.engine == "vllm":
        raise BadInputError(
            f'rollout.engine = "vllm" with {world.size} processes: vLLM in the same process serves one alone; use '
            '"transformers", or "server" with a vLLM server for them all'
        )


def _own_engine(policy: Policy, config: Config) -> Engine:
    start = {"transformers": _embedded, "vllm": _vllm, "server": _servers}[config.rollout.engine]
    engine = start(policy, config)
    try:
        if policy.scorer.batch_invariant:
            check_bitwise(_whole(engine, policy, config), policy)
        if isinstance(config.task, MultiTurnTask):
            engine = _conversations(engine, config.task, policy)
    except BaseException:
        engine.close()
        raise
    return _whole(engine, policy, config)


def _whole(engine: Engine, policy: Policy, config: Config) -> Engine:
    """The engine, of a sharded policy's own weights with all of them at hand."""
    return _GatheredEngine(engine, policy) if policy.sharded and config.rollout.engine == "transformers" else engine


class _GatheredEngine:
    """Samples from a sharded policy's own weights, of which every process holds all while it generates."""

    def __init__(self, engine: Engine, policy: Policy) -> None:
        self.engine = engine
        self.policy = policy

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """See `Engine.generate`; for all processes together, however little one of them has to draw."""
        with gathered(self.policy.model):
            return self.engine.generate(requests, sampling)

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `Engine.update_weights`."""
        self.engine.update_weights(named_tensors, version)

    def close(self) -> None:
        """See `Engine.close`."""
        self.engine.close()


def _conversations(engine: Engine, task: MultiTurnTask, policy: Policy) -> Engine:
    from gspo.rollout.conversation import ConversationEngine

    return ConversationEngine(
        engine, task, policy.tokenizer, eos_ids=policy.eos_ids, context_length=policy.context_length
    )


def _embedded(policy: Policy, config: Config) -> Engine:
    from gspo.rollout.transformers_engine import TransformersEngine

    return TransformersEngine(
        policy.model,
        policy.tokenizer,
        max_concurrent=config.rollout.max_concurrent,
        autocast_dtype=policy.scorer.autocast,
        record_routes=config.routing.replay == "sampler",
        batch_invariant=policy.scorer.batch_invariant,
    )


def _vllm(policy: Policy, config: Config) -> Engine:
    from gspo.rollout.vllm_engine import VllmEngine

    return VllmEngine(
        policy.model.name_or_path,
        policy.tokenizer,
        device=policy.device,
        dtype=policy.scorer.autocast or torch.float32,
        max_concurrent=config.rollout.max_concurrent,
        cache_gib=config.rollout.cache_gib,
        trust_remote_code=config.model.trust_remote_code,
        batch_invariant=config.likelihoods.batch_invariant,
        experts=_experts(policy, config),
        supports=config.rollout.truncated,
    )


def _servers(policy: Policy, config: Config) -> Engine:
    from gspo.rollout.server_engine import ServerEngine

    return ServerEngine(
        config.rollout.servers,
        policy.tokenizer,
        weights_folder=config.rollout.weights_dir or config.run.dir / "server-weights",
        max_concurrent=config.rollout.max_concurrent,
        request_timeout=config.rollout.request_timeout,
        server_wait=config.rollout.server_wait,
        overlap=config.rollout.lag > 0,
        experts=_experts(policy, config),
        supports=config.rollout.truncated,
    )


def _experts(policy: Policy, config: Config) -> dict[str, int] | None:
    """By MoE layer how many experts it has, where an engine must report those that it used."""
    if config.routing.replay != "sampler":
        return None
    return {name: layer.num_experts for name, layer in moe_layers(policy.model).items()}
