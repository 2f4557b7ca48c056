"""What a coarser inference engine does to GSPO's and GRPO's ratios on the tiny Mixture-of-Experts policy.

    python -m gspo.policy.tiny_moe models/tiny-moe
    python studies/moe_mismatch.py --out runs/moe_mismatch.json

No training: `gspo audit` draws a rollout batch from a copy with rounded weights, compares log-probs, makes one update
and compares clip decisions and gradients. Each method is judged at its paper's clip range and at wider ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from gspo.audit.audit import Audit, audit
from gspo.config import build_config, read_settings

RECIPE = Path(__file__).parents[1] / "configs" / "tiny-moe.toml"

Weights = Literal["bfloat16", "int8"]
Replay = Literal["off", "sampler"]

CASES: Sequence[tuple[Weights, Replay, dict[str, Any]]] = (
    ("bfloat16", "off", {"name": "gspo", "clip_low": 3e-3, "clip_high": 4e-3}),
    ("bfloat16", "off", {"name": "gspo", "clip_low": 3e-2, "clip_high": 4e-2}),
    ("bfloat16", "off", {"name": "grpo", "clip_low": 0.8, "clip_high": 4.0}),
    ("bfloat16", "sampler", {"name": "gspo", "clip_low": 3e-2, "clip_high": 4e-2}),
    ("int8", "off", {"name": "gspo", "clip_low": 3e-2, "clip_high": 4e-2}),
)
"""The engine's weights, whether its routes are replayed, and the range tried besides the papers' two."""


def measure(
    settings: dict[str, Any], weights: Weights, replay: Replay, objective: dict[str, Any]
) -> list[dict[str, Any]]:
    """One audit: a record for each objective and clip range that it judges."""
    data = settings | {"objective": objective, "routing": {"replay": replay}}
    return records(audit(build_config(data), engine_weights=weights), weights, replay)


def records(found: Audit, weights: str, replay: str) -> list[dict[str, Any]]:
    """What the study keeps of an audit."""
    noise = {"token_std": found.differences.noise.token_std, "token_max": found.differences.tokens.max}
    return [
        {
            "weights": weights,
            "replay": replay,
            **noise,
            "objective": outcome.contender.objective,
            "range": [outcome.contender.clip_low, outcome.contender.clip_high],
            "outside": [outcome.outside, outcome.units],
            "flipped": [outcome.decisions.flipped, outcome.decisions.units],
            "gradient_change": None if outcome.gradient is None else outcome.gradient.relative,
        }
        for outcome in found.outcomes
    ]


def distinct(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each engine, objective and range, in this order: several audits judge the papers' ranges."""
    by_key = {(r["weights"], r["replay"] != "off", r["objective"] != "gspo", *r["range"]): r for r in rows}
    return [by_key[key] for key in sorted(by_key)]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """As docs/studies.md shows it."""
    lines = [
        "| engine's weights | its routes replayed | noise per token: std; max | objective, clip range "
        "| outside before any update | flipped after one update | gradient: change / norm |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        low, high = row["range"]
        change = "" if row["gradient_change"] is None else f"{row['gradient_change']:.2g}"
        lines.append(
            f"| {row['weights']} | {'no' if row['replay'] == 'off' else 'yes'} | {row['token_std']:.2g}; "
            f"{row['token_max']:.2g} | {row['objective'].upper()} {low:g} / {high:g} | "
            f"{row['outside'][0]} of {row['outside'][1]} | {row['flipped'][0]} of {row['flipped'][1]} | {change} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/tiny-moe"))
    parser.add_argument("--out", type=Path, default=Path("runs/moe_mismatch.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    settings = read_settings(RECIPE) | {"model": {"path": str(given.model)}}
    rows = distinct([row for case in CASES for row in measure(settings, *case)])
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
