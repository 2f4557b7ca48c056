"""How much memory one update of this project needs as responses grow, with and without activation checkpointing.

    python benchmarks/memory.py --json memory.json
    python benchmarks/memory.py --responses 4096 8192 --checkpointing on

A prompt of 64 tokens with two responses, of T and T / 8 tokens: forward, loss, backward and AdamW, all tokens in one
pass, float32, on a CPU. Each row is a process of its own and gives its peak resident memory, and by how much that grew
for each thousand fed tokens more than in the row before: a constant where memory is linear in T. Prints one line a row.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from cases import Case, make_groups, model_folder
from processes import peak_rss_bytes, read_settings, run_side, write_figures

from gspo.config import build_config
from gspo.distributed.world import World
from gspo.policy.load import load_policy
from gspo.training.credit import make_batch
from gspo.training.learner import Learner
from gspo.training.update_metrics import UpdateMetrics

PROMPT, WARM_UP = 64, 16
"""Tokens of the prompt, and of the responses of an update before, after which AdamW has its moments."""


def run_one(exchange: Path) -> None:
    """The update of one row in this process."""
    settings = read_settings(exchange)
    policy = load_policy(
        settings["folder"], dtype="float32", device="cpu", activation_checkpointing=settings["checkpointing"]
    )
    cases = [Case(1, PROMPT, 2, longest) for longest in (WARM_UP, settings["response"])]
    lengths = cases[-1].response_lengths()
    fed = PROMPT + sum(length - 1 for length in lengths)
    config = build_config(
        {
            "model": {"path": settings["folder"]},
            "task": {"kind": "function", "function": "benchmarks:none"},
            "rollout": {"prompts": 1, "group_size": 2},
            "training": {"steps": 2, "minibatches": 1, "micro_batch_tokens": PROMPT + sum(lengths)},
        }
    )
    learner = Learner(policy, config, world=World())
    start = 0.0
    for step, case in enumerate(cases, start=1):
        start = time.perf_counter()
        batch = make_batch(make_groups(case, policy.model.config.get_text_config().vocab_size), config)
        metrics = UpdateMetrics()
        learner.update(step, learner.prepare(batch, metrics), metrics)
    figures = {"fed_tokens": fed, "seconds": time.perf_counter() - start, "peak_rss_mb": peak_rss_bytes() / 2**20}
    write_figures("ours", figures, exchange)


def measure(model: str, checkpointing: bool, responses: list[int], threads: int, scratch: Path) -> list[dict[str, Any]]:
    """Rows of growing responses, each printed when it is there."""
    folder = str(model_folder(model, scratch))
    rows: list[dict[str, Any]] = []
    for response in sorted(responses):
        row = {"model": model, "checkpointing": checkpointing, "response": response, "threads": threads}
        row |= run_side(__file__, "ours", row | {"folder": folder}, scratch, threads=threads)
        rows.append(row)
        if len(rows) > 1:
            before, after = rows[-2:]
            more = (after["fed_tokens"] - before["fed_tokens"]) / 1000
            row["mb_per_1000_tokens"] = (after["peak_rss_mb"] - before["peak_rss_mb"]) / more
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        run_one(Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny, or a model's folder")
    parser.add_argument("--responses", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="T of each row")
    parser.add_argument("--checkpointing", choices=["off", "on"], nargs="+", default=["off", "on"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    a = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for setting in a.checkpointing:
            rows += measure(a.model, setting == "on", a.responses, a.threads, Path(scratch))
    if a.json:
        a.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
