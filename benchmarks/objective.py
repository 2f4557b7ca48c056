"""What an objective costs, forward and backward, against the same formula written naively.

    python benchmarks/objective.py                     512 responses of up to 8,192 tokens
    python benchmarks/objective.py --rows 64 --tokens 2048

`ours` includes the clip accounting that `naive` does without. Each variant runs in a process of its own, so that its
peak memory, over that of its inputs, is its own. Prints one JSON line a variant.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from gspo.objectives import LOSSES, Totals

Arguments = tuple[Tensor, Tensor, Tensor, Tensor]


def naive_gspo(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    ratio = torch.exp(((logprobs - old) * mask).sum(1) / mask.sum(1))
    return -torch.min(ratio * advantages, ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantages).mean()


def naive_gspo_token(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    mean = ((logprobs - old) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    ratio = torch.exp(mean.detach() + logprobs - logprobs.detach())
    credit = advantages[:, None]
    terms = torch.min(ratio * credit, ratio.clamp(1 - 3e-4, 1 + 4e-4) * credit)
    return -((terms * mask).sum(1) / mask.sum(1)).mean()


def naive_grpo(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    ratio, credit = torch.exp(logprobs - old), advantages[:, None]
    terms = torch.min(ratio * credit, ratio.clamp(0.8, 1.27) * credit)
    return -((terms * mask).sum(1) / mask.sum(1)).mean()


NAIVE: dict[str, Callable[..., Tensor]] = {
    "gspo": naive_gspo,
    "gspo_token": naive_gspo_token,
    "grpo": naive_grpo,
}


def inputs(rows: int, tokens: int, device: str) -> Arguments:
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(rows, tokens, generator=g)
    logprobs = old + 0.02 * torch.randn(rows, tokens, generator=g)
    lengths = torch.randint(tokens // 4, tokens + 1, (rows,), generator=g)
    mask = torch.arange(tokens)[None] < lengths[:, None]
    advantages = torch.randn(rows, generator=g)
    return (
        logprobs.to(device).requires_grad_(),
        old.to(device),
        advantages.to(device),
        mask.to(device),
    )


def memory(device: str) -> int:
    """Peak bytes so far: of the device, or of the process on a CPU."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(name: str, variant: str, rows: int, tokens: int, device: str, repeats: int) -> dict[str, object]:
    arguments = inputs(rows, tokens, device)
    totals = Totals(rows, int(arguments[3].sum()))
    loss = NAIVE[name] if variant == "naive" else lambda *a: LOSSES[name](*a, totals=totals).loss
    before = memory(device)
    seconds = []
    for _ in range(repeats + 1):
        arguments[0].grad = None
        _wait(device)
        start = time.perf_counter()
        value = loss(*arguments)
        value.backward()
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return {
        "objective": name, "variant": variant, "rows": rows, "tokens": tokens, "device": device,
        "threads": torch.get_num_threads(), "ms_median": round(1e3 * statistics.median(seconds[1:]), 2),
        "ms_min": round(1e3 * min(seconds[1:]), 2), "peak_mib": round((memory(device) - before) / 2**20, 1),
        "input_mib": round(4 * rows * tokens / 2**20, 1), "loss": float(value.detach()),
    }  # fmt: skip


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--only", nargs=2, metavar=("OBJECTIVE", "VARIANT"), help="measure this one, in this process")
    a = parser.parse_args()
    if a.only:
        print(json.dumps(measure(*a.only, a.rows, a.tokens, a.device, a.repeats)), flush=True)
        return
    same = [f"--{key}={getattr(a, key)}" for key in ("rows", "tokens", "device", "repeats")]
    for name in NAIVE:
        for variant in ("naive", "ours"):
            subprocess.run([sys.executable, __file__, "--only", name, variant, *same], check=True)


if __name__ == "__main__":
    main()
