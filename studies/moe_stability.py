"""GSPO against GRPO, with and without Routing Replay, on a tiny Mixture-of-Experts policy (paper, section 5).

    python -m gspo.policy.tiny_moe models/tiny-moe
    python studies/moe_stability.py --out runs/moe_stability

Every arm of a seed starts from the same weights and sees the same prompts in the same order. A run that was killed
goes on from its last checkpoint, and one that is finished is not made again, so that the second command can be given
as often as need be. It writes `results.json` and the figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from seeds import Panel, draw, plus_minus

from gspo.config import build_config, read_settings
from gspo.reporting.run_folder import RunFolder
from gspo.reporting.run_records import RunRecords, read_runs, total
from gspo.training.loop import train

RECIPE = Path(__file__).parents[1] / "configs" / "tiny-moe.toml"
LAST = 5
MOMENTS = ("first", "last")
CLIPPED = ("token_removed", "token_outside", "sequence_removed", "sequence_outside")

Record = dict[str, Any]
Results = dict[str, dict[str, list[Record]]]
"""What `summary` says of each run: regime -> arm -> seeds."""


@dataclass(frozen=True, slots=True)
class Arm:
    """An objective at a clip range, with or without the old policy's experts in the updates."""

    name: str
    objective: str
    clip_low: float
    clip_high: float
    replay: str = "off"


ARMS = {
    "gspo": Arm("GSPO", "gspo", 3e-4, 4e-4),
    "grpo": Arm("GRPO", "grpo", 0.2, 0.27),
    "grpo-replay": Arm("GRPO with Routing Replay", "grpo", 0.2, 0.27, replay="old"),
    "gspo-wide": Arm("GSPO at 3e-3 / 4e-3", "gspo", 3e-3, 4e-3),
    "grpo-narrow": Arm("GRPO at 0.02 / 0.027", "grpo", 0.02, 0.027),
    "grpo-narrower": Arm("GRPO at 0.002 / 0.0027", "grpo", 0.002, 0.0027),
}
"""The first three at their papers' ranges; then GSPO at ten times more, GRPO at ten and at a hundred times less."""


@dataclass(frozen=True, slots=True)
class Regime:
    """How far the policy moves from the one that sampled: what all arms of a comparison have in common.

    `seeds` says of each arm how many seeds it has, counted from 0.
    """

    steps: int
    minibatches: int
    epochs: int
    figures_every: int
    seeds: Mapping[str, int]


MAIN = ("gspo", "grpo", "grpo-replay")
REGIMES = {
    "paper": Regime(steps=20, minibatches=4, epochs=1, figures_every=10, seeds=dict.fromkeys(MAIN, 3)),
    "off-policy": Regime(
        steps=10,
        minibatches=16,
        epochs=2,
        figures_every=3,
        seeds=dict.fromkeys(MAIN, 5) | dict.fromkeys(("gspo-wide", "grpo-narrow", "grpo-narrower"), 3),
    ),
}


def settings(regime: str, arm: str, seed: int, model: Path, out: Path) -> dict[str, Any]:
    """The settings of a run: those of configs/tiny-moe.toml with the arm's and the regime's put over them."""
    wanted, given = REGIMES[regime], ARMS[arm]
    data = read_settings(RECIPE)
    changes = {
        "run": {"dir": str(out), "name": f"{regime}-{arm}-{seed}", "seed": seed},
        "model": {"path": str(model)},
        "rollout": {"max_concurrent": 256},  # the whole rollout batch at a time: the same numbers, sooner
        "training": {"steps": wanted.steps, "minibatches": wanted.minibatches, "epochs": wanted.epochs},
        "evaluation": {"every": 10},
        "checkpoint": {"every": 10, "keep": 1},
        "objective": {"name": given.objective, "clip_low": given.clip_low, "clip_high": given.clip_high},
        "routing": {"figures_every": wanted.figures_every, "replay": given.replay},
    }
    return data | {section: data.get(section, {}) | values for section, values in changes.items()}


def finish(data: Mapping[str, Any]) -> RunRecords:
    """The records of the run, which is started, gone on with, or left as it is."""
    config = build_config(data)
    folder = config.run.dir / str(config.run.name)
    started = RunFolder.is_run(folder)
    if not (started and _is_finished(folder, config.training.steps)):
        train(config, resume=folder if started else None)
    return read_runs([folder])[0]


def _is_finished(folder: Path, steps: int) -> bool:
    run = read_runs([folder])[0]
    evaluated = run.evaluations[-1]["step"] if run.evaluations else -1
    return run.last_step == steps == evaluated


def summary(run: RunRecords) -> Record:
    """What the study needs of a run: figures by step, and sums with their denominators over all steps.

    How routing changes is taken from the steps after the first, in which the learning rate is still small.
    """
    measured = [line for line in run.metrics if "routing/unused" in line and line["step"] > 1]
    return {
        "reward": [line["reward/mean"] for line in run.metrics],
        "held_out": [[line["step"], line["accuracy"]["value"]] for line in run.evaluations],
        "clipped": {name: total(run.metrics, f"clip/{name}") for name in CLIPPED},
        "clipped_by_step": [line["clip/token_removed"] for line in run.metrics],
        "length": total(run.metrics, "response/length"),
        "changed": {moment: total(measured, f"routing/changed_{moment}") for moment in MOMENTS},
        "spread": {
            f"{unit} {how} {moment}": [line[f"routing/{unit}_log_ratio_std_{how}_{moment}"] for line in measured]
            for unit in ("token", "sequence")
            for how in ("native", "replayed")
            for moment in MOMENTS
        },
        "gradient_norm": [line["optimizer/gradient_norm"] for line in run.metrics],
        "not_finite": sum(line["optimizer/non_finite"] for line in run.metrics),
    }


def reached(record: Record) -> float:
    """Mean reward of the last steps."""
    return statistics.fmean(record["reward"][-LAST:])


def share(records: Sequence[Record], group: str, name: str) -> float:
    """A fraction over several runs: sums and denominators added, then divided."""
    parts, wholes = zip(*(record[group][name] for record in records), strict=True)
    return sum(parts) / sum(wholes)


def against(arm: str, found: Mapping[str, Sequence[float]]) -> str:
    """The difference to GRPO, seed by seed; an arm may have fewer seeds than GRPO has."""
    return "" if arm == "grpo" else plus_minus([a - b for a, b in zip(found[arm], found["grpo"], strict=False)])


def learning_table(arms: Mapping[str, Sequence[Record]]) -> list[str]:
    """Reward and held-out accuracy, with intervals over seeds; differences to GRPO are taken seed by seed."""
    found = {arm: [reached(record) for record in records] for arm, records in arms.items()}
    first, last = (
        {arm: [record["held_out"][place][1] for record in records] for arm, records in arms.items()}
        for place in (0, -1)
    )
    lines = [
        f"| | reward, last {LAST} steps | by seed | against GRPO | held out, first; last | last against GRPO |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for arm in arms:
        by_seed = ", ".join(f"{value:.3f}" for value in found[arm])
        cells = (
            plus_minus(found[arm]),
            by_seed,
            against(arm, found),
            plus_minus(first[arm]) + "; " + plus_minus(last[arm]),
        )
        lines.append(f"| {ARMS[arm].name} | {' | '.join(cells)} | {against(arm, last)} |")
    return lines


def clip_table(arms: Mapping[str, Sequence[Record]]) -> list[str]:
    """Tokens whose gradient the clip removed, over all tokens: seed by seed, and all seeds together."""
    lines = [
        "| | clipped tokens / tokens, by seed | all seeds | outside the range (tokens) | clipped sequences |",
        "| --- | --- | --- | --- | --- |",
    ]
    for arm, records in arms.items():
        by_seed = ", ".join(
            f"{clipped:,.0f} / {tokens:,.0f}" for clipped, tokens in (r["clipped"]["token_removed"] for r in records)
        )
        pooled = (f"{share(records, 'clipped', n):.2g}" for n in ("token_removed", "token_outside", "sequence_removed"))
        lines.append(f"| {ARMS[arm].name} | {by_seed} | {' | '.join(pooled)} |")
    return lines


def routing_table(arms: Mapping[str, Sequence[Record]]) -> list[str]:
    """How routing changes within a step, and the spread of log-ratios with routers left alone and with replay."""
    lines = [
        "| | experts changed after the first; last update | std of token log-ratios, native / replayed: first; last "
        "| std of sequence log-ratios, native / replayed: first; last |",
        "| --- | --- | --- | --- |",
    ]
    for arm, records in arms.items():
        changed = "; ".join(f"{share(records, 'changed', moment):.2%}" for moment in MOMENTS)
        spread = {
            name: statistics.fmean(statistics.fmean(record["spread"][name]) for record in records)
            for name in records[0]["spread"]
        }
        cells = (
            "; ".join(f"{spread[f'{u} native {m}']:.4f} / {spread[f'{u} replayed {m}']:.4f}" for m in MOMENTS)
            for u in ("token", "sequence")
        )
        lines.append(f"| {ARMS[arm].name} | {changed} | {' | '.join(cells)} |")
    return lines


def tables(results: Results) -> str:
    """All tables, as docs/studies.md shows them."""
    parts: list[str] = []
    for regime, arms in results.items():
        parts += [f"{regime}:", "", *learning_table(arms), "", *clip_table(arms), "", *routing_table(arms), ""]
    return "\n".join(parts)


def figure(arms: Mapping[str, Sequence[Record]], path: Path) -> None:
    """Reward, held-out accuracy and clipped tokens by step (the paper's figures 1 to 3)."""
    records = next(iter(arms.values()))
    steps = range(1, len(records[0]["reward"]) + 1)
    evaluated = [step for step, _ in records[0]["held_out"]]
    draw(
        [
            Panel(steps, _curves(arms, "reward"), "step", "training reward"),
            Panel(
                evaluated,
                {ARMS[a].name: [[value for _, value in r["held_out"]] for r in records] for a, records in arms.items()},
                "step",
                "held-out accuracy (greedy)",
            ),
            Panel(steps, _curves(arms, "clipped_by_step"), "step", "share of tokens clipped", logarithmic=True),
        ],
        path,
    )


def _curves(arms: Mapping[str, Sequence[Record]], name: str) -> dict[str, list[list[float]]]:
    return {ARMS[arm].name: [record[name] for record in records] for arm, records in arms.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/tiny-moe"))
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
    parser.add_argument("--out", type=Path, default=Path("runs/moe_stability"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    results: Results = {}
    for regime in given.regimes:
        seeds = REGIMES[regime].seeds
        results[regime] = {arm: [] for arm in seeds}
        for seed, arm in ((n, arm) for n in range(max(seeds.values())) for arm in seeds if n < seeds[arm]):
            results[regime][arm].append(summary(finish(settings(regime, arm, seed, given.model, given.out))))
        figure(results[regime], given.out / f"{regime}.svg")
    (given.out / "results.json").write_text(json.dumps(results) + "\n")
    print(tables(results))


if __name__ == "__main__":
    main()
