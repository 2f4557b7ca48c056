"""What a step costs on 1 to 64 GPUs, by arithmetic: memory, bytes sent, and seconds, for dense and MoE policies.

    python benchmarks/scaling.py                                  # the table of docs/scaling.md
    python benchmarks/scaling.py --model qwen3-8b --gpus 8 --card H200 --response-mean 4096

Nothing is run: seconds are bounds from data sheets, times shares that are assumptions to replace by what you
measure (`--matrix`, `--bandwidth`, `--links`).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

from scaling_model import (
    CARDS,
    MOST_CONCURRENT,
    SHAPES,
    Card,
    Shares,
    Work,
    concurrency,
    forward_flops,
    largest_micro_batch,
    received_bytes,
    rollout_seconds,
    training_bytes,
)


@dataclass(frozen=True, slots=True)
class Step:
    """One row: gigabytes (1e9) on each GPU, gigabytes that each receives in a step, seconds.

    `own_s` is sampling on the policy's own weights, `engine_s` on as many GPUs with a bfloat16 engine each.
    `engine_share` is the share of all GPUs that engines need so that sampling, a step ahead, takes as long as training.
    """

    model: str
    gpus: int
    shard: str
    micro_batch: int
    training_gb: float
    received_gb: float
    update_s: float
    score_s: float
    network_s: float
    concurrent: int
    own_s: float
    engine_s: float
    engine_share: float


def step(model: str, work: Work, gpus: int, card: Card, shares: Shares) -> Step | None:
    """What a step of `model` costs, plain data parallel where that fits, else FSDP2; None where neither does."""
    shape = SHAPES[model]
    for shard in ("none", "full"):
        fitting = largest_micro_batch(shape, work, gpus, card, shard)
        if fitting is not None:
            return _step(model, fitting, gpus, card, shares, shard)
    return None


def _step(model: str, work: Work, gpus: int, card: Card, shares: Shares, shard: str) -> Step:
    shape = SHAPES[model]
    rate = gpus * card.flops * shares.matrix
    forward = forward_flops(shape, work)
    # Activation checkpointing runs the layers forward a second time.
    update, score = 4 * forward / rate, forward * (work.minibatches - 1) / work.minibatches / rate
    received = sum(received_bytes(shape, work, gpus, shard).values())
    network = received / ((card.inside if gpus <= 8 else card.outside) * shares.links)
    concurrent = concurrency(shape, work, gpus, card, shard)
    own = rollout_seconds(shape, work, gpus, card, shares, concurrent, 4)
    engine = rollout_seconds(shape, work, gpus, card, shares, min(MOST_CONCURRENT, -(-work.rollouts // gpus)), 2)
    return Step(
        model, gpus, shard, work.micro_batch_tokens, training_bytes(shape, work, gpus, shard) / 1e9, received / 1e9,
        update, score, network, concurrent, own, engine, engine / (engine + max(update + score, network)),
    )  # fmt: skip


HEADERS = {
    "model": "policy", "gpus": "GPUs", "shard": "shard", "micro_batch": "micro-batch tokens",
    "training_gb": "GB, update", "received_gb": "GB received",
    "update_s": "update s", "score_s": "score s", "network_s": "network s", "concurrent": "drawn at a time",
    "own_s": "rollout s, own weights", "engine_s": "rollout s, engines", "engine_share": "share for engines",
}  # fmt: skip


def table(steps: list[Step]) -> str:
    """The rows in Markdown."""
    names = [field.name for field in fields(Step)]
    lines = ["| " + " | ".join(HEADERS[name] for name in names) + " |", "| --- " * len(names) + "|"]
    for row in steps:
        cells = (getattr(row, name) for name in names)
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines)


def _cell(value: float | int | str) -> str:
    if not isinstance(value, float):
        return str(value)
    return "no room" if value == float("inf") else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 8, 16, 64])
    parser.add_argument("--card", choices=list(CARDS), default="H100")
    for kind in (Work, Shares):
        for field in fields(kind):
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    given = vars(parser.parse_args())
    work, shares = (kind(**{f.name: given[f.name] for f in fields(kind)}) for kind in (Work, Shares))
    card = CARDS[given["card"]]
    found = [(model, gpus, step(model, work, gpus, card, shares)) for model in given["model"] for gpus in given["gpus"]]
    print(table([row for _, _, row in found if row is not None]))
    for model, gpus, row in found:
        if row is None:
            print(f"{model} does not fit {gpus} {given['card']}")


if __name__ == "__main__":
    main()
