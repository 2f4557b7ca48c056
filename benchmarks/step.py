"""The whole step, sampling, reward and update, by this project and by TRL 1.16's GRPOTrainer, on a CPU.

    pip install 'gspo[benchmarks,reasoning-gym]'
    python benchmarks/step.py --json step.json
    python benchmarks/step.py --prompts 2 --minibatches 2 --steps 3        smaller and shorter
    python benchmarks/step.py --old sampler                               with the engine's log-probs as the old ones

Same model, prompts in the same order, chat template, sampling distribution, rewards, batch, mini-batches, optimizer and
threads, in float32. The task is that of configs/quickstart.toml; a second reward, the share of even ids, gives every
group a signal, so that no side may skip an update. A step is a rollout batch with its updates; the first is left out,
the median over the others counts: wall seconds, and processor seconds, which a busy machine changes less. TRL runs
without activation checkpointing, which is its faster setting.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from cases import model_folder
from processes import peak_rss_bytes, read_settings, run_side, write_figures

from gspo.config import Config, build_config
from gspo.rewards.text import last_number
from gspo.tasks.load import load_task
from gspo.tasks.stream import PromptStream
from gspo.training import loop
from gspo.training.run import Run

Settings = dict[str, Any]
CLIP_LOW, CLIP_HIGH, LEARNING_RATE = 3e-3, 4e-3, 1e-6


def even_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of even ids in a response."""
    return [sum(i % 2 == 0 for i in ids) / max(1, len(ids)) for ids in completion_ids]


def our_config(settings: Settings, folder: Path) -> Config:
    """The step as this project is told of it."""
    return build_config(
        {
            "run": {"dir": str(folder / "runs"), "name": "ours"},
            "model": {"path": settings["model"], "dtype": "float32", "device": "cpu"},
            "task": {
                "kind": "reasoning_gym", "name": "chain_sum", "held_out": 0, "size": 1000,
                "parameters": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
                "template": "{prompt} Answer with the result only.",
            },
            "reward": {"functions": [{"function": "last_number"}]},
            "rollout": {name: settings[name] for name in ("prompts", "group_size", "max_tokens")},
            "likelihoods": {"old": settings["old"]},
            "objective": {"name": "gspo", "clip_low": CLIP_LOW, "clip_high": CLIP_HIGH},
            "optimizer": {"learning_rate": LEARNING_RATE},
            "training": {"steps": settings["steps"], "minibatches": settings["minibatches"]},
            "checkpoint": {"every": 0},
        }
    )  # fmt: skip


def run_ours(settings: Settings, folder: Path) -> Settings:
    """Seconds a step and where they go, from the run's own timings."""
    walls: list[float] = []
    processor: list[float] = []
    tokens: list[int] = []
    step = loop._step

    def timed(run: Run) -> loop.StepResult:
        wall, used = time.perf_counter(), time.process_time()
        result = step(run)
        walls.append(time.perf_counter() - wall)
        processor.append(time.process_time() - used)
        tokens.append(sum(len(r.response_ids) for r in result.rollouts))
        return result

    with patch.object(loop, "_step", timed):
        result = loop.train(our_config(settings, folder), reward=even_share)
    lines = [json.loads(line)["seconds"] for line in (result.run / "timings.jsonl").read_text().splitlines()]
    stages = {name: [line[name] for line in lines] for name in lines[0]}
    stages["other"] = [wall - sum(line.values()) for wall, line in zip(walls, lines, strict=True)]
    return _figures(walls, processor, stages, tokens)


def run_trl(settings: Settings, folder: Path) -> Settings:
    """The same of TRL's trainer, its generation, scoring and rewards timed by name; the rest is the update."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    clock = _Clock()

    class TimedTrainer(GRPOTrainer):
        def _generate(self, prompts: list[Any]) -> Any:
            with clock.stage("rollout"):
                found = super()._generate(prompts)
            clock.tokens.append(sum(map(len, found[1])))
            return found

        def _calculate_rewards(self, *arguments: Any) -> Any:
            with clock.stage("reward"):
                return super()._calculate_rewards(*arguments)

        def _generate_and_score_completions(self, inputs: list[Any]) -> Any:
            clock.next_step()
            with clock.stage("collect"):
                return super()._generate_and_score_completions(inputs)

    rows = settings["prompts"] * settings["group_size"]
    config = GRPOConfig(
        output_dir=str(folder / "trl"), max_steps=settings["steps"] * settings["minibatches"],
        per_device_train_batch_size=rows // settings["minibatches"], steps_per_generation=settings["minibatches"],
        gradient_accumulation_steps=1, num_generations=settings["group_size"],
        max_completion_length=settings["max_tokens"], temperature=1.0, importance_sampling_level="sequence",
        loss_type="grpo", epsilon=CLIP_LOW, epsilon_high=CLIP_HIGH, beta=0.0, learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant", adam_beta2=0.95, max_grad_norm=1.0, bf16=False, gradient_checkpointing=False,
        shuffle_dataset=False, use_cpu=True, report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    ours = our_config(settings, folder)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    task = load_task(ours.task, tokenizer, seed=ours.run.seed, max_prompt_tokens=10_000)
    prompts = PromptStream(task.train, ours.run.seed).take(settings["prompts"] * settings["steps"])
    chat = bool(tokenizer.chat_template)
    data = Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": p.content}] if chat else p.content, "answer": p.columns["answer"]}
            for p in prompts
        ]
    )
    rewards: list[Callable[..., Any]] = [last_number, even_share]
    TimedTrainer(settings["model"], rewards, config, data).train()
    clock.next_step()
    return clock.figures()


class _Clock:
    """Seconds of TRL's stages, a list entry a step."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.processor: list[float] = []
        self.tokens: list[int] = []
        self._stages: dict[str, list[float]] = defaultdict(list)

    def next_step(self) -> None:
        self.starts.append(time.perf_counter())
        self.processor.append(time.process_time())

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._stages[name].append(time.perf_counter() - start)

    def figures(self) -> Settings:
        totals = [end - start for start, end in pairwise(self.starts)]
        known = self._stages
        named = zip(known["collect"], known["rollout"], known["reward"], strict=True)
        stages = {
            "rollout": known["rollout"],
            "reward": known["reward"],
            "score": [collect - rollout - reward for collect, rollout, reward in named],
            "update": [total - collect for total, collect in zip(totals, known["collect"], strict=True)],
        }
        processor = [end - start for start, end in pairwise(self.processor)]
        return _figures(totals, processor, stages, self.tokens)


def _figures(
    totals: list[float], processor: list[float], stages: dict[str, list[float]], tokens: list[int]
) -> Settings:
    """Medians over the steps, the first left out, of wall seconds and of `processor` seconds."""

    def middle(values: list[float]) -> float:
        return statistics.median(values[1:])

    return {
        "seconds": middle(totals),
        "cpu_seconds": middle(processor),
        "stages": {name: middle(values) for name, values in stages.items()},
        "response_tokens": sum(tokens[1:]) / len(tokens[1:]),
        "peak_rss_mb": peak_rss_bytes() / 2**20,
    }


def measure(settings: Settings, threads: int, folder: Path) -> Settings:
    """Both sides and their ratios, per response token, because the two sample different responses."""
    ours, theirs = (run_side(__file__, side, settings, folder, threads=threads) for side in ("ours", "trl"))
    for side in (ours, theirs):
        side["response_tokens_per_s"] = side["response_tokens"] / side["seconds"]
        side["response_tokens_per_cpu_s"] = side["response_tokens"] / side["cpu_seconds"]
    return {
        **settings, "threads": threads,
        "speedup": ours["response_tokens_per_s"] / theirs["response_tokens_per_s"],
        "speedup_cpu": ours["response_tokens_per_cpu_s"] / theirs["response_tokens_per_cpu_s"],
        "memory_ratio": ours["peak_rss_mb"] / theirs["peak_rss_mb"], "ours": ours, "trl": theirs,
    }  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        side, folder = sys.argv[2], Path(sys.argv[3])
        write_figures(side, {"ours": run_ours, "trl": run_trl}[side](read_settings(folder), folder), folder)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, or a model's folder")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2, help="at least 2: the first is not counted")
    parser.add_argument(
        "--old", choices=["recompute", "sampler"], default="recompute",
        help="where this project takes its old log-probs from; TRL recomputes them",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    a = parser.parse_args()
    if a.steps < 2:
        parser.error(f"--steps: found {a.steps}; at least 2 are needed, because the first is not counted")
    names = ("prompts", "group_size", "max_tokens", "minibatches", "steps", "old")
    settings = {name: getattr(a, name) for name in names}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        settings["model"] = str(model_folder(a.model, folder))
        result = measure(settings, a.threads, folder) | {"model": a.model}
    print(
        f"{result['speedup']:.2f} x TRL's speed ({result['speedup_cpu']:.2f} in processor time), "
        f"{result['memory_ratio']:.2f} of its memory"
    )
    for side in ("ours", "trl"):
        found = result[side]
        stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in found["stages"].items())
        print(
            f"  {side}: {found['seconds']:.2f} s a step, {found['cpu_seconds']:.2f} of a processor ({stages}), "
            f"{found['peak_rss_mb']:,.0f} MB"
        )
    if a.json:
        a.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
