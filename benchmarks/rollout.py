"""How fast the embedded engine samples, against `generate`, `generate_batch`, and vLLM where installed.

    python benchmarks/rollout.py                              the quickstart's shape: 8 prompts x 8 short responses
    python benchmarks/rollout.py --prompts 2 --response 128 --variants ours generate
    python benchmarks/rollout.py --model FOLDER               real weights instead of random ones
    python benchmarks/rollout.py --json FILE                  writes the rows, with each one's speed over ours

Random weights of SmolLM2-135M's shape end a response after a geometric number of tokens, because one in `--every` ids
counts as EOS; all variants draw from the same distribution, up to `--response` tokens. Only tokens up to and with the
EOS count. Each variant runs in a process of its own, once to warm up and then `--repeats` times. What counts is the run
with the median number of tokens a processor second; processor seconds are given besides wall seconds because a busy
machine does not change them much. vLLM works in this process too, so that its seconds are counted likewise. All run
in float32. Prints one JSON line a variant.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from gspo.rollout.transformers_engine import TransformersEngine
from gspo.types import Prompt, Request, Sampling

Ids = list[list[int]]


class _NoText:
    """Stands in for a tokenizer: text is not what is measured."""

    all_special_ids: tuple[int, ...] = ()

    def decode(self, *_: Any, **__: Any) -> str:
        return ""


def load(path: str | None) -> Any:
    if path is not None:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
            eos_token_id=0,
            pad_token_id=0,
        )
    )


def ours(model: Any, prompts: Ids, eos: list[int], args: argparse.Namespace) -> Callable[[], Ids]:
    engine = TransformersEngine(model, _NoText(), max_concurrent=args.prompts * args.samples)  # type: ignore[arg-type]
    requests = [Request(Prompt(str(i), "", tuple(ids)), args.samples, 0, i) for i, ids in enumerate(prompts)]
    sampling = Sampling(max_tokens=args.response, eos_ids=tuple(eos))
    return lambda: [list(rollout.response_ids) for rollout in engine.generate(requests, sampling)]


def _settings(eos: list[int], args: argparse.Namespace) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=args.response, do_sample=True, top_k=0, top_p=1.0, eos_token_id=eos, pad_token_id=eos[0]
    )


def generate(model: Any, prompts: Ids, eos: list[int], args: argparse.Namespace) -> Callable[[], Ids]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[eos[0]] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = _settings(eos, args)
    settings.num_return_sequences = args.samples

    def run() -> Ids:
        responses: Ids = model.generate(ids, attention_mask=mask, generation_config=settings)[:, longest:].tolist()
        return responses

    return run


def generate_batch(model: Any, prompts: Ids, eos: list[int], args: argparse.Namespace) -> Callable[[], Ids]:
    """Continuous batching over paged caches. Sized by hand: by default it is half as fast on a CPU."""
    page = 32
    longest = max(map(len, prompts)) + args.response
    rows = args.prompts * args.samples
    batching = ContinuousBatchingConfig(
        page_size=page, num_blocks=rows * -(-longest // page) + 1, max_batch_tokens=512, seed=0
    )
    inputs = [prompt for prompt in prompts for _ in range(args.samples)]

    def run() -> Ids:
        found = model.generate_batch(
            inputs, generation_config=_settings(eos, args), continuous_batching_config=batching, progress_bar=False
        )
        return [list(output.generated_tokens) for output in found.values()]

    return run


def vllm(model: Any, prompts: Ids, eos: list[int], args: argparse.Namespace) -> Callable[[], Ids]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llm = LLM(
            folder,
            dtype="float32",
            skip_tokenizer_init=True,
            generation_config="vllm",
            max_model_len=max(map(len, prompts)) + args.response,
            max_num_seqs=args.prompts * args.samples,
            kv_cache_memory_bytes=1 << 30,
            enforce_eager=True,  # compiling for a CPU takes minutes
        )
    sampling = SamplingParams(
        n=args.samples,
        max_tokens=args.response,
        temperature=1.0,
        stop_token_ids=eos,
        detokenize=False,
        logprobs=0,
    )
    requests = [{"prompt_token_ids": ids} for ids in prompts]

    def run() -> Ids:
        llm.reset_prefix_cache()
        found = llm.generate(requests, sampling, use_tqdm=False)
        return [list(output.token_ids) for request in found for output in request.outputs]

    return run


VARIANTS = {"ours": ours, "generate": generate, "generate_batch": generate_batch, "vllm": vllm}
INSTALLED = [name for name in VARIANTS if name != "vllm" or importlib.util.find_spec("vllm")]


def measure(variant: str, args: argparse.Namespace) -> dict[str, Any]:
    """One variant in this process."""
    torch.set_num_threads(args.threads)
    model = load(args.model)
    draw = random.Random(0)
    size = model.config.vocab_size
    prompts = [[draw.randrange(size) for _ in range(draw.randint(*args.prompt))] for _ in range(args.prompts)]
    eos = list(range(0, size, args.every))
    ends = set(eos)
    run = VARIANTS[variant](model.train() if variant == "ours" else model.eval(), prompts, eos, args)
    with torch.no_grad():
        run()
        rows = sorted((_timed(run, ends) for _ in range(args.repeats)), key=lambda row: row["tokens_per_cpu_s"])
    return {
        "variant": variant,
        **rows[len(rows) // 2],
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def _timed(run: Callable[[], Ids], ends: set[int]) -> dict[str, Any]:
    wall, processor = time.perf_counter(), time.process_time()
    responses = run()
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    tokens = sum(next((n for n, token in enumerate(ids, 1) if token in ends), len(ids)) for ids in responses)
    return {
        "responses": len(responses),
        "tokens": tokens,
        "seconds": round(wall, 2),
        "cpu_seconds": round(processor, 2),
        "tokens_per_s": round(tokens / wall, 1),
        "tokens_per_cpu_s": round(tokens / processor, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="from_pretrained folder; default: random weights of SmolLM2-135M's shape")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt", type=int, nargs=2, default=[40, 80], metavar=("SHORTEST", "LONGEST"))
    parser.add_argument("--response", type=int, default=24, help="most tokens of a response")
    parser.add_argument("--every", type=int, default=12, help="one in so many ids ends a response")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3, help="timed runs")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=INSTALLED)
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--here", choices=list(VARIANTS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        print(json.dumps(measure(args.here, args)), flush=True)
        return
    rows = []
    for variant in args.variants:
        command = [sys.executable, __file__, *sys.argv[1:], "--here", variant]
        rows.append(
            json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
        )
        print(json.dumps(rows[-1]), flush=True)
    speeds = {row["variant"]: row["tokens_per_cpu_s"] for row in rows}
    for row in rows:
        row["ours_over_it"] = round(speeds["ours"] / row["tokens_per_cpu_s"], 2) if "ours" in speeds else None
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
