"""What the tests of sharding run in each process: a sharded policy beside a plain one of the same weights."""

import math
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from gspo.config import LoraConfig, OptimizerConfig
from gspo.distributed.sharding import gathered, place, units, whole
from gspo.distributed.world import World
from gspo.policy.export import named_tensors, save_policy
from gspo.policy.load import load_policy
from gspo.rollout.transformers_engine import TransformersEngine
from gspo.training.optimizer import clip_gradients, make_optimizer
from gspo.types import Prompt, Request, Sampling
from tests.policy.tiny import random_rollouts, worst

ADAPTER = {"lora": LoraConfig(rank=2)}
# 61 tokens do not divide by the number of processes.
CASES = {
    "dense": ("llama", {}),
    "tied": ("llama_tied", {"layout": "packed"}),
    "kept after the forward pass": ("llama_tied", {"layout": "padded", "reshard_after_forward": False}),
    "recomputed": ("llama", {"activation_checkpointing": True}),
    "adapter": ("llama", ADAPTER),
    "full logits": ("gpt2", {}),
    "batch invariant": ("llama", {"batch_invariant": True}),
    "experts": ("qwen3_moe", {}),
    "experts, recomputed": ("qwen3_moe", {"activation_checkpointing": True}),
    "experts, adapter": ("qwen3_moe", ADAPTER),
}
# The first process makes two passes, the second one and then nothing; the empty response has nothing to score.
SHARES = [[(0, 4), (4, 6)], [(6, 8)]]
STEPS, RATE, MAX_NORM = 4, 0.02, 3.0


def everything(folder):
    """Every case on two processes; figures by case."""
    torch.set_num_threads(1)
    world = World.from_environment(300, device="cpu")
    try:
        figures = {}
        for name in CASES:
            plain, sharded = policies(name, folder, world)
            if name == "dense":
                sample_alone(sharded, world)
            figures[name] = compared(name, plain, sharded, world)
            figures[name] |= exported(plain, sharded, world, Path(folder) / "saved" / name)
            if name in ("dense", "tied", "experts", "adapter"):
                figures[name] |= sampled(plain, sharded, world)
        return figures
    finally:
        world.close()


def policies(name, folder, world):
    family, options = CASES[name]
    settings = {"device": "cpu", "dtype": "float32", "seed": 3, "reference": "adapter" in name or name == "dense"}
    start = f"{folder}/{family}"
    sharded = load_policy(start, **settings, world=world, shard="full", **options)
    plain = load_policy(start, **settings, **{k: v for k, v in options.items() if k != "reshard_after_forward"})
    if name == "full logits":
        plain.scorer, sharded.scorer = (replace(p.scorer, exact_head=False) for p in (plain, sharded))
    return plain, sharded


def sample_alone(sharded, world):
    """A process without a prompt of its own runs fewer passes; the next update must not notice."""
    with gathered(sharded.model):
        if world.is_main:
            drawn(sharded)


def compared(name, plain, sharded, world):
    """Gradients, norms and weights of a few SGD updates, and the reference that none of them moves."""
    everyone = [share for shares in SHARES for share in shares]
    mine = [*SHARES[world.rank], *[None] * (len(SHARES[0]) - len(SHARES[world.rank]))]
    start = weights(plain)
    figures = {"sharded": sharded.sharded, "units": len(units(sharded.model)), "norms": []}
    for step in range(STEPS):
        routes = {share: recorded(plain, share) for share in everyone} if "experts" in name else {}
        backward(plain, everyone, routes)
        backward(sharded, mine, routes)
        expected = {n: p.grad for n, p in plain.trainable_parameters()}
        found = {n: whole(p.grad) for n, p in sharded.trainable_parameters()}
        if step == 0:
            figures["gradient"] = worst(found, expected)
        figures["norms"].append([clip_gradients(_parameters(p), MAX_NORM) for p in (plain, sharded)])
        for policy in (plain, sharded):
            torch.optim.SGD(_parameters(policy), lr=RATE).step()
            policy.model.zero_grad(set_to_none=True)
    figures["moved"] = worst(weights(plain), start)
    figures["weights"] = worst(weights(sharded), weights(plain))
    if plain.frozen is not None or plain.adapter is not None:
        figures["reference"] = reference_difference(plain, sharded, mine)
    return figures


def backward(policy, shares, routes):
    for share in shares:
        if share is None:
            policy.take_part(backward=True)
            continue
        rollouts = random_rollouts()[slice(*share)]
        layout = policy.layout(rollouts)
        with policy.forward(layout, temperature=0.7, routes=routes.get(share)) as scores:
            advantages = torch.tensor([[math.cos(10 * r.slot + r.sample)] for r in rollouts])
            (((scores.logprobs * advantages + 0.1 * scores.entropy) * scores.mask).sum() / 30).backward()


def recorded(policy, share):
    layout = policy.layout(random_rollouts()[slice(*share)])
    return policy.score(layout, temperature=0.7, record=True).routes


def reference_difference(plain, sharded, mine):
    worst_of_all = 0.0
    for share in mine:
        if share is None:
            sharded.take_part(reference=True)
            continue
        layout = plain.layout(random_rollouts()[slice(*share)])
        found, expected = (p.reference(layout, temperature=1.0).logprobs for p in (sharded, plain))
        worst_of_all = max(worst_of_all, float((found - expected).abs().max()))
    return worst_of_all


def exported(plain, sharded, world, folder):
    """The export of a sharded policy beside that of a plain one that is given the very same weights."""
    given = weights(sharded)
    with torch.no_grad():
        for name, parameter in plain.trainable_parameters():
            parameter.copy_(given[name])
    found, expected = dict(named_tensors(sharded)), dict(named_tensors(plain))
    save_policy(sharded, folder, write=world.is_main)
    world.barrier()
    file = "model.safetensors" if plain.adapter is None else "adapter_model.safetensors"
    saved = load_file(folder / file)
    if plain.adapter is not None:
        given = {f"base_model.model.{name.replace('.default', '')}": tensor for name, tensor in given.items()}
    kept = _equal(saved, expected if plain.adapter is None else given)
    return {"exported": _equal(found, expected), "saved": kept, "idle": all_sliced(sharded)}


def _equal(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def sampled(plain, sharded, world):
    """What two engines draw; here the processes call theirs a different number of times."""
    with gathered(sharded.model):
        for _ in range(1 + world.rank):
            found = drawn(sharded)
    expected = drawn(plain)
    layout = plain.layout(random_rollouts()[:2])
    after = [p.score(layout, temperature=1.0).logprobs for p in (plain, sharded)]
    return {
        "same responses": [r.response_ids for r in found] == [r.response_ids for r in expected],
        "log-probs": max(
            abs(a - b)
            for x, y in zip(found, expected, strict=True)
            for a, b in zip(x.sampler_logprobs, y.sampler_logprobs, strict=True)
        ),
        "scores after": float((after[0] - after[1]).abs().max()),
        "idle after": all_sliced(sharded),
    }


def drawn(policy):
    requests = [Request(Prompt(str(n), "", tuple(range(3, 8 + n))), 2, step=1, slot=n) for n in range(3)]
    engine = TransformersEngine(policy.model, policy.tokenizer, max_concurrent=4)
    return engine.generate(requests, Sampling(max_tokens=8, eos_ids=(1,), seed=5))


def weights(policy):
    return {name: whole(p.detach()).clone() for name, p in policy.trainable_parameters()}


def all_sliced(policy):
    """Between passes a process holds its slices and nothing else."""
    return all(hasattr(parameter, "to_local") for parameter in policy.model.parameters())


def _parameters(policy):
    return [p for _, p in policy.trainable_parameters()]


def unused(folder):
    """Updates with weight decay of a model with matrices that nobody or one process uses, beside a plain copy's."""
    torch.set_num_threads(1)
    world = World.from_environment(120, device="cpu")
    try:
        plain, sharded = (with_spare_matrices(folder) for _ in range(2))
        shards = place(sharded, torch.device("cpu"), world, shard=True)
        config = OptimizerConfig(learning_rate=0.01, weight_decay=0.5)
        optimizers = [make_optimizer(model.named_parameters(), config) for model in (plain, sharded)]
        before = {name: p.detach().clone() for name, p in plain.named_parameters()}
        for _ in range(3):
            loss(plain, with_spare=True).backward()
            loss(plain, with_spare=False).backward()
            shards.run(lambda: loss(sharded, with_spare=world.is_main)).backward()
            assert {n for n, p in sharded.named_parameters() if not whole(p.grad).any()} == {IDLE, LAYERS_IDLE}
            shards.leave_unused(world)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found = {name: whole(p.detach()) for name, p in sharded.named_parameters()}
        expected = {name: p.detach() for name, p in plain.named_parameters()}
        return {
            "weights": worst(found, expected),
            "left alone": sorted(name for name, weight in found.items() if torch.equal(weight, before[name])),
            "without state": sorted(n for n, p in sharded.named_parameters() if p not in optimizers[1].state),
        }
    finally:
        world.close()


def stood_in(folder):
    """Which weights count as used after a pass of the first process alone, and after one that both make."""
    torch.set_num_threads(1)
    world = World.from_environment(120, device="cpu")
    try:
        policy = load_policy(f"{folder}/llama", device="cpu", dtype="float32", world=world, shard="full")
        share = SHARES[0][0]
        backward(policy, [share if world.is_main else None], {})
        alone = set(policy.scorer.shards.used)
        backward(policy, [share], {})
        backward(policy, [None], {})
        names = {name for name, _ in policy.trainable_parameters()}
        return {"alone": alone == (names if world.is_main else set()), "both": policy.scorer.shards.used == names}
    finally:
        world.close()


IDLE, LAYERS_IDLE = "idle.weight", "model.layers.1.idle.weight"


def with_spare_matrices(folder):
    model = load_policy(f"{folder}/llama", device="cpu", dtype="float32").model
    torch.manual_seed(0)
    model.idle, model.seldom = torch.nn.Linear(5, 3, bias=False), torch.nn.Linear(5, 3, bias=False)
    model.model.layers[1].idle = torch.nn.Linear(3, 7, bias=False)
    return model


def loss(model, *, with_spare):
    logits = model(input_ids=torch.arange(3, 12)[None], use_cache=False).logits.square().mean()
    return logits + model.seldom.weight.square().sum() if with_spare else logits
