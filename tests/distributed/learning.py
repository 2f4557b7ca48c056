"""One frozen rollout batch through the learner, in many settings; run by one process and by several."""

import dataclasses
import hashlib
from pathlib import Path

import torch
from safetensors.torch import save_file

from gspo.config import build_config
from gspo.distributed.sharding import whole
from gspo.distributed.world import World
from gspo.policy.load import load_policy
from gspo.reporting.journal import read_rollouts, write_rollouts
from gspo.reporting.metrics import as_record
from gspo.training.credit import make_batch
from gspo.training.learner import Learner
from gspo.training.update_metrics import UpdateMetrics
from tests.policy.tiny import random_rollouts

PROMPTS, SAMPLES = 8, 4
# Ragged, one of them empty: (length of the prompt, lengths of the responses).
GROUPS = [
    (9, (6, 1, 10, 0)), (3, (4, 12, 7, 2)), (12, (2, 5, 5, 3)), (4, (8, 3, 3, 14)),
    (7, (5, 5, 9, 2)), (5, (3, 11, 6, 4)), (2, (7, 7, 1, 9)), (10, (4, 2, 8, 6)),
]  # fmt: skip
ZERO_VARIANCE, DROPPED = 2, (5, 1)
# Mini-batches of two groups in which one rollout is as long as all others together.
SKEWED = [(2, (40, 3, 3, 2)), (2, (3, 3, 4, 2))] * 4

DENSE = {"model": "llama", "objective": {"name": "gspo", "clip_low": 0.01, "clip_high": 0.01}}
MOE = {
    "model": "qwen3_moe",
    "objective": DENSE["objective"],
    "routing": {"replay": "old", "figures_every": 1},
}
GRPO = {"objective": {"name": "grpo", "clip_low": 0.03, "clip_high": 0.03}}
TOKEN = {"objective": {"name": "gspo_token", "clip_low": 0.01, "clip_high": 0.01}}
LORA = {"lora": {"rank": 4}}
BOTH = {"budgets": (40, 10_000)}
CASES = {
    "gspo": DENSE | BOTH,
    "gspo packed": DENSE | {"layout": "packed"},
    "gspo padded": DENSE | {"layout": "padded"},
    "gspo_token": DENSE | TOKEN,
    "grpo": DENSE | GRPO | BOTH,
    "gspo lora": DENSE | LORA,
    "grpo lora packed": DENSE | GRPO | LORA | {"layout": "packed"},
    "moe gspo": MOE | BOTH,
    "moe gspo_token": MOE | TOKEN,
    "moe grpo": MOE | GRPO,
    "moe gspo packed": MOE | {"layout": "packed"},
    "moe gspo lora": MOE | LORA,
    "moe balanced": MOE | {"routing": {"replay": "old", "load_balancing_weight": 0.1}},
    "moe balanced native": MOE | {"routing": {"load_balancing_weight": 0.1}},
    "kl": DENSE | {"objective": {**DENSE["objective"], "kl_weight": 0.3}},
    "corrected": DENSE | {"likelihoods": {"correction": "truncate", "correction_high": 1.02}},
    "skewed": DENSE | {"rollouts": "skewed", "budgets": (6,)},
    # Each mini-batch keeps one rollout, so that all other processes have none; the balance makes it worth an update.
    "alone": MOE | {"rollouts": "alone", "routing": {"replay": "old", "load_balancing_weight": 0.1}},
}


SHARDED = ("gspo", "grpo lora packed", "moe gspo", "moe balanced", "kl", "skewed", "alone")


def runs():
    """Every case at each of its budgets: several micro-batches, or one that holds all; some with a sharded policy."""
    found = [(name, budget, "none") for name, case in CASES.items() for budget in case.get("budgets", (40,))]
    return found + [(name, CASES[name].get("budgets", (40,))[0], "full") for name in SHARDED]


def write_batches(folder: Path) -> None:
    """The rollout files that every process reads."""
    write_rollouts(folder / "ragged.jsonl.zst", _rewarded(GROUPS))
    write_rollouts(folder / "skewed.jsonl.zst", _rewarded(SKEWED))
    alone = [
        r if (r.slot % 2, r.sample) == (0, 1) else dataclasses.replace(r, reward=None, dropped="for the test")
        for r in _rewarded(GROUPS)
    ]
    write_rollouts(folder / "alone.jsonl.zst", alone)


def _rewarded(groups):
    generator = torch.Generator().manual_seed(5)
    rollouts = []
    for rollout in random_rollouts(groups, seed=3):
        reward = 0.5 if rollout.slot == ZERO_VARIANCE else float(torch.randint(0, 3, (), generator=generator)) / 2
        noise = torch.randn(len(rollout.response_ids), generator=generator) * 0.1
        rollout = dataclasses.replace(rollout, reward=reward, sampler_logprobs=tuple((noise - 4.1).tolist()))
        if (rollout.slot, rollout.sample) == DROPPED:
            rollout = dataclasses.replace(rollout, reward=None, dropped="for the test")
        rollouts.append(rollout)
    return rollouts


def learn(folder: Path, name: str, budget: int, world: World, shard: str = "none"):
    """Four SGD updates: the gradient of the first, the weights after them, and the metrics."""
    case = CASES[name]
    config = build_config(
        {
            "model": {"path": str(folder / case["model"]), "lora": case.get("lora")},
            "task": {"kind": "function", "function": "a:b"},
            "rollout": {"prompts": PROMPTS, "group_size": SAMPLES, "temperature": 0.8},
            "training": {"minibatches": 4, "micro_batch_tokens": budget},
            "objective": case["objective"],
            "optimizer": {"learning_rate": 0.02, "max_grad_norm": 1e9},
            **{section: case[section] for section in ("routing", "likelihoods") if section in case},
        }
    )
    policy = load_policy(
        config.model.path,
        layout=case.get("layout", "auto"),
        lora=config.model.lora,
        reference=config.objective.kl_weight > 0,
        world=world,
        shard=shard,
    )
    learner = Learner(policy, config, world=world)
    gradients = {}
    sgd = torch.optim.SGD([p for _, p in policy.trainable_parameters()], lr=0.02)
    step = sgd.step

    def remember():
        if not gradients:
            gradients.update({n: whole(p.grad).clone() for n, p in policy.trainable_parameters() if p.grad is not None})
        step()

    sgd.step = remember
    learner.optimizer = sgd
    rollouts = read_rollouts(folder / f"{case.get('rollouts', 'ragged')}.jsonl.zst")
    groups = [rollouts[i : i + SAMPLES] for i in range(0, len(rollouts), SAMPLES)]
    metrics = UpdateMetrics()
    minibatches = learner.prepare(make_batch(groups, config), metrics)
    learner.update(1, minibatches, metrics)
    weights = {n: whole(p.detach()).clone() for n, p in policy.trainable_parameters()}
    return gradients, weights, as_record(metrics.as_metrics()), [len(m.micro_batches) for m in minibatches]


def learn_all(folder: str) -> dict:
    """Every case; the main process leaves the tensors in `folder`, and each returns what it has to compare."""
    torch.set_num_threads(1)
    world = World.from_environment(120)
    seen = {}
    try:
        for name, budget, shard in runs():
            gradients, weights, record, passes = learn(Path(folder), name, budget, world, shard)
            key = f"{name} {budget} {shard}"
            digest = hashlib.sha256(b"".join(w.numpy().tobytes() for w in weights.values())).hexdigest()
            seen[key] = {"metrics": record, "passes": passes, "digest": digest}
            if world.is_main:
                tensors = {f"gradient {n}": g for n, g in gradients.items()}
                tensors |= {f"weight {n}": w for n, w in weights.items()}
                save_file({n: t.contiguous() for n, t in tensors.items()}, f"{folder}/{key}.safetensors")
    finally:
        world.close()
    return seen
