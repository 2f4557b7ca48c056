"""One update by this project and by TRL 1.16 `GRPOTrainer._compute_loss`, on the same rollouts, on a CPU.

    pip install 'gspo[benchmarks]'
    python benchmarks/update.py --json update.json                    every row of the table
    python benchmarks/update.py --row 2 256 8 128                     2 prompts of 256 tokens x 8 responses up to 128
    python benchmarks/update.py --model qwen3-0.6b-head --row 1 64 8 64

Each side runs in a process of its own, ours first: float32, the same threads, forward, loss and backward. Old
log-probs are ours plus noise of 0.05 per token, the clip range is 0.2, and the two gradients must agree. Prints one
line a row; exit status 1 if gradients disagree.
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
from cases import Case, model_folder
from processes import read_settings, run_side, write_figures
from sides import Setup, run_ours, run_trl

TABLE = [
    Case(2, 256, 8, 128),
    Case(2, 32, 4, 16),
    Case(2, 64, 8, 64),
    Case(1, 32, 16, 128),
    Case(1, 32, 8, 512),
    Case(1, 256, 16, 64),
    Case(1, 1024, 4, 128),
    Case(1, 1024, 4, 512),
]
"""None feeds TRL more than about 6,100 positions: it needs up to 18 GB for them."""

COSINE, NORM = 1e-6, 1e-4
"""How far the gradients may be from each other: 1 - cosine, and the norms' ratio from 1."""


def measure(model: str, case: Case, threads: int, repeats: int, scratch: Path) -> dict[str, Any]:
    """One row of the table."""
    settings = {
        "folder": str(model_folder(model, scratch)), "case": asdict(case), "device": "cpu", "dtype": "float32",
        "repeats": repeats,
    }  # fmt: skip
    ours, theirs = (run_side(__file__, side, settings, scratch, threads=threads) for side in ("ours", "trl"))
    flops, rate = ours.pop("flops"), ours.pop("matrix_flops_per_s")
    agreement = {name: theirs.pop(name) for name in ("gradient_cosine", "gradient_norm_ratio")}
    for side in (ours, theirs):
        side["peak_rss_mb"] = side.pop("peak_mb")
        side["matrix_rate_share"] = flops / side["seconds"] / rate
    return {
        "model": model, "prompts": case.prompts, "prompt_length": case.prompt_length, "group_size": case.group_size,
        "response_max": case.response_max, "response_tokens": sum(case.response_lengths()),
        "speedup": theirs["seconds"] / ours["seconds"], "memory_ratio": ours["peak_rss_mb"] / theirs["peak_rss_mb"],
        **agreement, "ours": ours, "trl": theirs, "model_tflop": flops / 1e12, "matrix_gflop_per_s": rate / 1e9,
        "dtype": "float32", "threads": threads, "repeats": repeats,
        "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
    }  # fmt: skip


def run_one(side: str, exchange: Path) -> None:
    """One side in this process; `exchange` holds the settings and takes the figures."""
    settings = read_settings(exchange)
    case = Case(**settings.pop("case"))
    setup = Setup(folder=Path(settings.pop("folder")), case=case, exchange=exchange, **settings)
    write_figures(side, run_ours(setup) if side == "ours" else run_trl(setup), exchange)


def agrees(row: dict[str, Any]) -> bool:
    """Whether both sides found the same gradient."""
    return row["gradient_cosine"] >= 1 - COSINE and abs(row["gradient_norm_ratio"] - 1) <= NORM


def describe(row: dict[str, Any]) -> str:
    """One line for the terminal."""
    shape = "{prompts} x {prompt_length} tokens, G {group_size}, responses to {response_max}".format(**row)
    sides = ", ".join(f"{s} {row[s]['seconds']:.2f} s {row[s]['peak_rss_mb']:,.0f} MB" for s in ("ours", "trl"))
    verdict = "" if agrees(row) else "  GRADIENTS DISAGREE"
    gains = f"{row['speedup']:.2f} x TRL's speed, {row['memory_ratio']:.2f} of its memory"
    share, cosine = 100 * row["ours"]["matrix_rate_share"], 1 - row["gradient_cosine"]
    checks = f"{share:.0f} % of the matrix rate; 1 - cosine {cosine:.1e}"
    return f"{row['model']}  {shape}: {gains} ({sides}; {checks}){verdict}"


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        run_one(sys.argv[2], Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, qwen3-0.6b-head, tiny, or a model's folder")
    parser.add_argument(
        "--row", type=int, nargs=4, action="append", metavar=("PROMPTS", "LENGTH", "GROUP", "RESPONSE"),
        help="measure this row, not the table; may be repeated",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3, help="timed updates of each side; the median counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here, after each")
    a = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for case in [Case(*sizes) for sizes in a.row] if a.row else TABLE:
            rows.append(measure(a.model, case, a.threads, a.repeats, Path(scratch)))
            print(describe(rows[-1]), flush=True)
            if a.json:
                a.json.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(0 if all(agrees(row) for row in rows) else 1)


if __name__ == "__main__":
    main()
