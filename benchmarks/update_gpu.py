"""One update on one GPU: this project, TRL, and TRL with Liger's kernels, at Qwen3 shapes with random weights.

    pip install 'gspo[benchmarks]' liger-kernel
    python benchmarks/update_gpu.py --json benchmarks/results/update-gpu.json
    python benchmarks/update_gpu.py --models qwen3-4b --responses 1024 32768 --sides ours

bfloat16 autocast over float32 weights, each side in a process of its own, on the same rollouts: forward, loss and
backward. Reports response tokens a second, model FLOP utilisation (the operations that an update needs, over the card's
dense bfloat16 peak), the share of the matrix rate measured here, and peak device memory, which must grow no faster than
the responses. `attention` says how this project's layers computed it: "varlen flash", or "tiles" and the reason. A side
that runs out of memory has no figures, and says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from cases import QWEN3, Case, model_folder
from processes import read_settings, run_side, write_figures
from sides import Setup, run_ours, run_trl

PEAK_TFLOPS = {"B200": 2250, "H200": 989, "H100": 989, "GH200": 989, "A100": 312, "L40S": 362, "RTX 4090": 165}
"""Dense bfloat16 peaks from the makers' data sheets, by a part of the card's name."""

SIDES = ("ours", "trl", "liger")


def run_one(side: str, exchange: Path) -> None:
    """One side in this process; running out of device memory is a result."""
    settings = read_settings(exchange)
    case = Case(**settings.pop("case"))
    setup = Setup(folder=Path(settings.pop("folder")), case=case, exchange=exchange, **settings)
    try:
        figures = run_ours(setup) if side == "ours" else run_trl(setup, liger=side == "liger")
    except torch.cuda.OutOfMemoryError:
        figures = {"out_of_memory": 1.0}
    write_figures(side, figures, exchange)


def measure(model: str, case: Case, sides: list[str], repeats: int, scratch: Path) -> dict[str, Any]:
    """One row: every side on the same rollouts. Ours comes first: the others compare their gradients with it."""
    settings = {
        "folder": str(model_folder(model, scratch)), "case": asdict(case), "device": "cuda", "dtype": "bfloat16",
        "repeats": repeats,
    }  # fmt: skip
    found = {"ours": run_side(__file__, "ours", settings, scratch)}
    ours, card = found["ours"], torch.cuda.get_device_name()
    if "out_of_memory" not in ours:
        found |= {side: run_side(__file__, side, settings, scratch) for side in sides if side != "ours"}
    flops, rate = ours.pop("flops", None), ours.pop("matrix_flops_per_s", None)
    peak = next((tflops * 1e12 for name, tflops in PEAK_TFLOPS.items() if name in card), None)
    for figures in found.values():
        if "seconds" in figures:
            figures["matrix_rate_share"] = flops / figures["seconds"] / rate
            figures["mfu"] = None if peak is None else flops / figures["seconds"] / peak
    return {
        "model": model, "card": card, **asdict(case), **found, "dtype": "bfloat16", "repeats": repeats,
        "versions": {"torch": torch.__version__, "transformers": version("transformers")},
    }  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        run_one(sys.argv[2], Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(QWEN3), default=list(QWEN3))
    parser.add_argument("--responses", type=int, nargs="+", default=[1024, 8192], help="longest response of each row")
    parser.add_argument("--prompt-length", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here, after each")
    a = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: benchmarks/update.py measures a CPU")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for model in a.models:
            for longest in a.responses:
                case = Case(1, a.prompt_length, a.group_size, longest)
                rows.append(measure(model, case, a.sides, a.repeats, Path(scratch)))
                print(json.dumps(rows[-1]), flush=True)
                if a.json:
                    a.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
