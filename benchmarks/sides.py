"""One update (forward, loss, backward) by this project and by TRL, on the same rollouts.

The optimizer's step is left out: it is the same AdamW on both sides.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cases import Case, make_groups, matrix_rate, model_flops, now, with_old
from processes import peak_rss_bytes
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from gspo.config import Config, build_config
from gspo.distributed.world import World
from gspo.objectives import gspo_loss
from gspo.policy.load import load_policy
from gspo.policy.model import Policy
from gspo.training.credit import make_batch
from gspo.training.learner import Learner
from gspo.training.update_metrics import UpdateMetrics
from gspo.types import Rollout

CLIP = 0.2
Groups = list[list[Rollout]]


@dataclass(frozen=True, slots=True)
class Setup:
    """What both sides share. `exchange` is a folder for what one hands to the other."""

    folder: Path
    case: Case
    device: str
    dtype: str
    repeats: int
    exchange: Path


def run_ours(setup: Setup) -> dict[str, Any]:
    """Measures this project and leaves old log-probs, advantages and gradients in `exchange`."""
    policy = load_policy(setup.folder, dtype=setup.dtype, device=setup.device)
    config = _config(setup)
    groups = make_groups(setup.case, policy.model.config.get_text_config().vocab_size)
    groups = with_old(groups, _current(policy, config, [r for g in groups for r in g]))
    learner = Learner(policy, config, world=World())
    _our_update(learner, [groups[0][:2]])()
    figures = _timed(_our_update(learner, groups), policy.model, setup)
    batch = make_batch(groups, config)
    given = {"advantages": batch.advantages, "old": batch.sampler_logprobs}
    gradients = {f"grad.{name}": p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
    save_file(given | gradients, setup.exchange / "ours.safetensors")
    return figures | {
        "attention": _attention(policy, groups[0][:2]),
        "flops": model_flops(policy.model, batch.rollouts),
        "matrix_flops_per_s": matrix_rate(setup.device, policy.scorer.autocast or torch.float32),
    }


def _config(setup: Setup) -> Config:
    return build_config(
        {
            "model": {"path": str(setup.folder)},
            "task": {"kind": "function", "function": "benchmarks:none"},
            "rollout": {"prompts": setup.case.prompts, "group_size": setup.case.group_size},
            "objective": {"clip_low": CLIP, "clip_high": CLIP},
            "likelihoods": {"old": "sampler"},
            "training": {"minibatches": 1},
        }
    )


@torch.no_grad()
def _attention(policy: Policy, rollouts: list[Rollout]) -> str:
    """How the layers compute attention."""
    layout = policy.layout(rollouts)
    with policy.scorer.attending(layout) as attention:
        policy.scorer.token_logprobs(layout, temperature=1.0, entropy=False)
    return "the model's own" if attention is None else ", ".join(sorted(attention.ways))


def _current(policy: Policy, config: Config, rollouts: list[Rollout]) -> Tensor:
    """[B, T] log-probs at the current weights."""
    columns = max(len(r.response_ids) for r in rollouts)
    current = torch.zeros(len(rollouts), columns)
    for rows in policy.micro_batches(rollouts, config.training.micro_batch_tokens):
        layout = policy.layout([rollouts[i] for i in rows], columns=columns)
        current[rows] = policy.score(layout, temperature=1.0, entropy=False).logprobs.cpu()
    return current


def _our_update(learner: Learner, groups: Groups) -> Callable[[], None]:
    (minibatch,) = learner.prepare(make_batch(groups, learner.config), UpdateMetrics())

    def update() -> None:
        metrics = UpdateMetrics()
        for micro in minibatch.micro_batches:
            batch = micro.batch
            with learner.policy.forward(micro.layout, temperature=1.0) as scores:
                output = gspo_loss(
                    scores.logprobs, batch.old_logprobs, batch.advantages, batch.mask,
                    clip_low=CLIP, clip_high=CLIP, totals=minibatch.totals,
                )  # fmt: skip
                output.loss.backward()
            metrics.micro_batch(output, output.loss, scores, batch)
        metrics.as_metrics()

    return update


def run_trl(setup: Setup, *, liger: bool = False) -> dict[str, float]:
    """Measures TRL's `GRPOTrainer._compute_loss` and its backward, and compares its gradient with ours."""
    trainer = _trainer(setup, liger)
    groups = make_groups(setup.case, trainer.model.config.get_text_config().vocab_size)
    inputs = _inputs(setup, groups, trainer.processing_class.pad_token_id)

    def update(rows: int) -> Callable[[], None]:
        taken = {name: tensor[:rows] for name, tensor in inputs.items()}
        return lambda: trainer._compute_loss(trainer.model, taken).backward()

    update(2)()
    figures = _timed(update(setup.case.rows), trainer.model, setup)
    return figures | compare_gradients(trainer.model, setup.exchange / "ours.safetensors")


def _trainer(setup: Setup, liger: bool) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(setup.exchange / "trl"), per_device_train_batch_size=setup.case.rows,
        num_generations=setup.case.group_size, gradient_accumulation_steps=1,
        max_completion_length=setup.case.response_max, importance_sampling_level="sequence", loss_type="grpo",
        epsilon=CLIP, epsilon_high=CLIP, beta=0.0, bf16=setup.dtype == "bfloat16", gradient_checkpointing=False,
        use_cpu=setup.device == "cpu", report_to="none", use_liger_kernel=liger,
        model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": "a"}] * setup.case.rows)
    trainer = GRPOTrainer(str(setup.folder), lambda completions, **_: [0.0] * len(completions), config, rows)
    # `train()` would set both; only the loss is run here.
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.to(setup.device).train()
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3(model=trainer.model, fused_linear_cross_entropy=False)
    return trainer


def _inputs(setup: Setup, groups: Groups, pad_id: int) -> dict[str, Tensor]:
    rollouts = [r for g in groups for r in g]
    with safe_open(setup.exchange / "ours.safetensors", "pt") as given:
        old, advantages = given.get_tensor("old"), given.get_tensor("advantages")
    ids, mask = torch.full(old.shape, pad_id), torch.zeros(old.shape, dtype=torch.long)
    for row, rollout in enumerate(rollouts):
        ids[row, : len(rollout.response_ids)] = torch.tensor(rollout.response_ids)
        mask[row, : len(rollout.response_ids)] = 1
    prompts = torch.tensor([r.prompt.ids for r in rollouts])
    inputs = {
        "prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts), "completion_ids": ids,
        "completion_mask": mask, "advantages": advantages, "old_per_token_logps": old,
    }  # fmt: skip
    return {name: tensor.to(setup.device) for name, tensor in inputs.items()}


@torch.no_grad()
def compare_gradients(model: torch.nn.Module, ours: Path) -> dict[str, float]:
    """Cosine of the two gradients, and our norm over TRL's, over all parameters in float64."""
    dot = our_square = their_square = 0.0
    parameters = {name: p for name, p in model.named_parameters() if p.grad is not None}
    with safe_open(ours, "pt") as given:
        names = {name.removeprefix("grad.") for name in given.keys() if name.startswith("grad.")}  # noqa: SIM118
        if names != parameters.keys():
            raise ValueError(f"gradients of different parameters: {sorted(names ^ parameters.keys())[:3]}")
        for name, parameter in parameters.items():
            mine, theirs = given.get_tensor(f"grad.{name}").double(), parameter.grad.cpu().double()
            dot += float((mine * theirs).sum())
            our_square += float(mine.square().sum())
            their_square += float(theirs.square().sum())
    return {
        "gradient_cosine": dot / (our_square * their_square) ** 0.5,
        "gradient_norm_ratio": (our_square / their_square) ** 0.5,
    }


def _timed(update: Callable[[], None], model: torch.nn.Module, setup: Setup) -> dict[str, float]:
    """Medians over the repeats; processor seconds are what a busy machine changes little."""
    seconds, processor = [], []
    for _ in range(setup.repeats):
        model.zero_grad(set_to_none=True)
        start, busy = now(setup.device), time.process_time()
        update()
        seconds.append(now(setup.device) - start)
        processor.append(time.process_time() - busy)
    middle = statistics.median(seconds)
    return {
        "seconds": middle,
        "cpu_seconds": statistics.median(processor),
        "response_tokens_per_s": sum(setup.case.response_lengths()) / middle,
        "peak_mb": (peak_rss_bytes() if setup.device == "cpu" else torch.cuda.max_memory_allocated()) / 2**20,
    }
