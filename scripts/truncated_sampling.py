"""What training on truncated sampling costs: kept ids per token, their bytes, and seconds of sampling and updating.

    python scripts/truncated_sampling.py models/SmolLM2-135M-Instruct

Draws a rollout batch from a few open questions under each setting, once to warm up and once timed, then scores it and
goes back through it with its support and without. Bytes are those of the compressed file beside the rollouts. Prints a
Markdown row a setting.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from gspo.policy.load import load_policy
from gspo.policy.model import Policy
from gspo.reporting.journal import supports_file, write_rollouts
from gspo.rollout.transformers_engine import TransformersEngine
from gspo.types import Prompt, Request, Rollout, Sampling

QUESTIONS = (
    "Write the first lines of a story about a lighthouse.",
    "What is 17 x 23? Work it out step by step.",
    "Explain to a child why the sky is blue.",
    "Write a Python function that reverses a list.",
)
SETTINGS: tuple[dict[str, float], ...] = (
    {},
    {"top_p": 0.9},
    {"top_p": 0.95},
    {"top_p": 0.99},
    {"top_p": 0.9, "top_k": 20},
    {"top_k": 20},
    {"min_p": 0.05},
)


def sample(policy: Policy, sampling: Sampling, samples: int) -> tuple[list[Rollout], float]:
    """The batch, and the seconds that it took."""
    prompts = []
    for question in QUESTIONS:
        text = policy.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        ids = tuple(policy.tokenizer(text, add_special_tokens=False)["input_ids"])
        prompts.append(Prompt(question, question, ids))
    requests = [Request(prompt, samples, step=1, slot=slot) for slot, prompt in enumerate(prompts)]
    engine = TransformersEngine(policy.model, policy.tokenizer, max_concurrent=64)
    start = time.perf_counter()
    rollouts = engine.generate(requests, sampling)
    return rollouts, time.perf_counter() - start


def update(policy: Policy, rollouts: Sequence[Rollout]) -> float:
    """Seconds of one forward and backward pass."""
    layout = policy.layout(rollouts)
    start = time.perf_counter()
    with policy.forward(layout, temperature=1.0) as scores:
        torch.autograd.backward(scores.logprobs.sum())
    policy.model.zero_grad(set_to_none=True)
    return time.perf_counter() - start


def stored_bytes(rollouts: Sequence[Rollout]) -> int:
    """Size of the supports on disk."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step-000001.jsonl.zst"
        write_rollouts(path, rollouts)
        return supports_file(path).stat().st_size if supports_file(path).exists() else 0


def row(policy: Policy, setting: dict[str, float], arguments: argparse.Namespace) -> str:
    """One line of the table."""
    truncation = {name: int(value) if name == "top_k" else value for name, value in setting.items()}
    sampling = Sampling(
        arguments.tokens, eos_ids=policy.eos_ids, seed=arguments.seed, record_support=True, **truncation
    )  # type: ignore[arg-type]
    sample(policy, dataclasses.replace(sampling, max_tokens=2), arguments.samples)
    rollouts, seconds = sample(policy, sampling, arguments.samples)
    tokens = sum(len(r.response_ids) for r in rollouts)
    counts = np.concatenate([r.support.counts for r in rollouts if r.support is not None] or [np.zeros(1)])
    bare = [dataclasses.replace(r, support=None) for r in rollouts]
    update(policy, bare[:2])
    without, supported = update(policy, bare), update(policy, rollouts)
    quantiles = " / ".join(f"{value:.0f}" for value in np.quantile(counts, (0.5, 0.9, 1)))
    name = ", ".join(f"{key} = {value:g}" for key, value in setting.items()) or "nothing left out"
    size = (
        f"{counts.mean():.0f} ({quantiles}) | {4 * counts.mean():.0f} | {stored_bytes(rollouts) / tokens:.0f}"
        if setting
        else "| | |"
    )
    milliseconds = (1000 * value / tokens for value in (seconds, without, supported))
    return f"| {name} | {size} | {' | '.join(f'{value:.1f}' for value in milliseconds)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("--samples", type=int, default=4, help="responses per question")
    parser.add_argument("--tokens", type=int, default=32, help="longest response")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the settings to measure, from 0")
    arguments = parser.parse_args()
    policy = load_policy(arguments.model, dtype="float32")
    print("| sampling | kept ids per token: mean (median / p90 / max) | bytes in memory | bytes on disk |", end="")
    print(" ms per token: sampling | update without support | update with it |")
    print("| --- " * 7 + "|")
    for number, setting in enumerate(SETTINGS):
        if arguments.only is None or number in arguments.only:
            print(row(policy, setting, arguments), flush=True)


if __name__ == "__main__":
    main()
