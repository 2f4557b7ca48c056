"""The inference engine that a config names. Only the one that is wanted is imported."""

from __future__ import annotations

import torch

from gspo.config import Config, MultiTurnTask
from gspo.policy.export import named_tensors
from gspo.policy.model import Policy
from gspo.policy.moe import moe_layers
from gspo.rollout.engine import Engine
from gspo.rollout.vllm_support import check_reports_support
from gspo.training.bitwise import check_bitwise


def check_engine(config: Config, device: torch.device) -> None:
    """Raises BadInputError, before any weight is read, where the engine cannot do what the config asks of it."""
    if config.rollout.truncated and config.rollout.engine == "vllm":
        check_reports_support(on_cpu=device.type == "cpu")


def start_engine(policy: Policy, config: Config, version: int) -> Engine:
    """Starts the engine and gives it the policy's weights, whatever it has started from.

    A multi-turn task is played over it.
    """
    start = {"transformers": _embedded, "vllm": _vllm, "server": _servers}[config.rollout.engine]
    engine = start(policy, config)
    try:
        if policy.scorer.batch_invariant:
            check_bitwise(engine, policy)
        if isinstance(config.task, MultiTurnTask):
            engine = _conversations(engine, config.task, policy)
        engine.update_weights(named_tensors(policy), version)
    except BaseException:
        engine.close()
        raise
    return engine


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
        experts=_experts(policy, config),
        supports=config.rollout.truncated,
    )


def _experts(policy: Policy, config: Config) -> dict[str, int] | None:
    """By MoE layer how many experts it has, where an engine must report those that it used."""
    if config.routing.replay != "sampler":
        return None
    return {name: layer.num_experts for name, layer in moe_layers(policy.model).items()}
