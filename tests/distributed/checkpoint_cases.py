"""What the tests of sharded checkpoints run in each process."""

import hashlib
import os
from contextlib import closing, contextmanager
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from gspo.config import LoraConfig, build_config
from gspo.distributed.sharding import local, rows, whole
from gspo.distributed.world import World
from gspo.policy.load import load_policy
from gspo.training.checkpoint import TrainState, load_optimizer, save_checkpoint
from gspo.training.learner import Learner
from gspo.training.optimizer import clip_gradients
from tests.policy.tiny import SIZES

LATER = "one_update_later.safetensors"
CASES = {"tied": ("llama_tied", None), "experts": ("qwen3_moe", None), "adapter": ("qwen3_moe", LoraConfig(rank=2))}


def everything(folder, second_port):
    """Two processes load, go on from one's checkpoint and write their own; then three go on from that."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    figures = {}
    if rank < 2:
        with world_of(rank, 2) as world:
            figures["memory"] = memory(folder, world)
            for case in CASES:
                figures[f"1 to 2, {case}"] = resumed(folder, case, "one", world)
                figures[f"2, {case}"] = written(folder, case, "two", world)
                figures[f"2 to 2, {case}"] = resumed(folder, case, "two", world)
    os.environ["MASTER_PORT"] = second_port
    with world_of(rank, 3) as world:
        for case in CASES:
            figures[f"2 to 3, {case}"] = resumed(folder, case, "two", world)
    return figures


@contextmanager
def world_of(rank, size):
    variables = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    with closing(World.from_environment(300, device="cpu", environment=variables)) as world:
        yield world


def start(folder, case, world, resume=None):
    family, lora = CASES[case]
    path = f"{folder}/{family}"
    policy = load_policy(path, resume=resume, device="cpu", dtype="float32", lora=lora, world=world, shard="full")
    settings = {
        "model": {"path": path},
        "task": {"kind": "function", "function": "a:b"},
        "optimizer": {"learning_rate": 0.01},
        "routing": {"figures_every": 0},
    }
    return policy, Learner(policy, build_config(settings), world=world)


def written(folder, case, name, world):
    """Two updates and a checkpoint; returns what it holds, and writes what a third update makes of it."""
    policy, learner = start(folder, case, world)
    for number in range(2):
        update(policy, learner, number)
    save_checkpoint(Path(folder) / name / case, policy, learner, TrainState(step=2), keep=1)
    found = digests(policy, learner)
    update(policy, learner, 2)
    later = {name: tensor.contiguous() for name, tensor in weights(policy).items()}
    if world.is_main:
        save_file(later, Path(folder) / name / case / LATER)
    world.barrier()
    return found


def resumed(folder, case, name, world):
    """What a run goes on from, and how far a third update is from the one of the run that has written it."""
    checkpoint = Path(folder) / name / case / "checkpoints" / "step-000002"
    policy, learner = start(folder, case, world, resume=checkpoint)
    load_optimizer(checkpoint, policy, learner, 2)
    found = digests(policy, learner)
    update(policy, learner, 2)
    expected = load_file(Path(folder) / name / case / LATER)
    later = max(float((tensor - expected[n]).abs().max()) for n, tensor in weights(policy).items())
    return found, later


def update(policy, learner, number):
    """An update with a gradient that each process knows in whole, cut to its rows."""
    for name, parameter in policy.trainable_parameters():
        generator = torch.Generator().manual_seed(int(hashlib.sha256(f"{name} {number}".encode()).hexdigest()[:8], 16))
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = torch.zeros_like(parameter)
        local(parameter.grad).copy_(gradient[rows(parameter)])
    clip_gradients([p for _, p in policy.trainable_parameters()], 1e6)  # far below: the norm's rounding stays out
    learner.optimizer.step()


def digests(policy, learner):
    """Of the optimizer and of the weights, all bits."""
    optimizer = {
        f"{name}.{key}": whole(value)
        for name, parameter in policy.trainable_parameters()
        for key, value in learner.optimizer.state[parameter].items()
    }
    return [digest(optimizer), digest(weights(policy))]


def weights(policy):
    return {name: whole(parameter.detach()) for name, parameter in policy.trainable_parameters()}


def digest(tensors):
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return found.hexdigest()


def save_large(folder):
    """A model of 54 million parameters: 218 MB in float32."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(**{**SIZES, **sizes, "head_dim": 128})
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def memory(folder, world):
    """Bytes that loading has added at its peak, and those of a whole copy."""
    load_policy(f"{folder}/llama_tied", device="cpu", dtype="float32")  # imports what a load imports
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = resident("VmRSS")
    policy = load_policy(f"{folder}/large", device="cpu", dtype="float32", world=world, shard="full")
    return {
        "peak": resident("VmHWM") - before,
        "kept": sum(local(p).nbytes for p in policy.model.parameters()),
        "whole": 4 * policy.memory.parameters,
    }


def resident(name):
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{name}:"))
