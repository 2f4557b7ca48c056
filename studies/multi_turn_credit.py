"""Credit by turn against one summed reward, at equal rollouts, on the guessing game.

    python studies/multi_turn_credit.py --steps 60 --seeds 5 --out runs/multi_turn_credit

A tiny dense policy starts from random weights for each seed; every arm of a seed starts from the same ones, sees the
same games in the same order and has the same clip range. Writes `results.json` and `curves.svg`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from seeds import Panel, draw, plus_minus
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from gspo.config import build_config
from gspo.tasks.guessing import GuessNumber
from gspo.tasks.multi_turn import Observation, Response
from gspo.training.loop import StepResult, train

ARMS: dict[str, dict[str, Any]] = {
    "GSPO, summed reward": {"name": "gspo"},
    "GSPO-token, credit by turn": {"name": "gspo_token", "credit": "turn"},
    "GSPO-token, credit by turn, discount 1": {"name": "gspo_token", "credit": "turn", "discount": 1.0},
}
TOKENS = ["<pad>", "<eos>", "?", "<", ">", *"123456789"]


class ShortGuessing(GuessNumber):
    """The guessing game in signs of one token: `?` begins it, `>` says higher and `<` lower."""

    def reset(self, row: Any) -> str:
        super().reset(row)
        return "?"

    def step(self, response: Response) -> Observation:
        found = super().step(response)
        sign = {"H": ">", "L": "<"}.get(str(found.messages)[:1], "?")
        return Observation(sign, found.reward, found.done)


def make_policy(folder: Path, seed: int) -> Path:
    """A random policy of two layers, with a token for each sign of the game."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    signs = Tokenizer(BPE(vocab={token: n for n, token in enumerate(TOKENS)}, merges=[]))
    signs.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=signs, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return folder


def run(arm: str, seed: int, steps: int, learning_rate: float, out: Path) -> dict[str, list[float]]:
    """One run: by step the mean summed reward and the share of games won."""
    curves: dict[str, list[float]] = {"reward": [], "won": []}

    def note(result: StepResult) -> None:
        games = result.rollouts
        curves["reward"].append(sum(r.reward or 0.0 for r in games) / len(games))
        curves["won"].append(sum((r.turn_rewards or (0.0,))[-1] >= 1 for r in games) / len(games))

    policy = out / f"policy-{seed}"
    config = build_config(
        {
            "run": {"dir": str(out / "runs"), "name": f"{arm.replace(' ', '-').replace(',', '')}-{seed}", "seed": seed},
            "model": {"path": str(policy if policy.exists() else make_policy(policy, seed))},
            "task": {
                "kind": "multi_turn", "environment": "multi_turn_credit:ShortGuessing", "max_turns": 4, "held_out": 0,
                "row_parameters": {"count": 2000, "seed": seed},
            },
            "rollout": {"prompts": 16, "group_size": 8, "max_tokens": 2, "max_concurrent": 128},
            "objective": {"clip_low": 0.03, "clip_high": 0.04, **ARMS[arm]},
            "optimizer": {"learning_rate": learning_rate, "warmup_updates": 8},
            "training": {"steps": steps, "minibatches": 4},
            "checkpoint": {"every": 0},
        }
    )  # fmt: skip
    train(config, callbacks=[note])
    return curves


def table(results: dict[str, list[dict[str, list[float]]]]) -> str:
    """Means of the last ten steps, with intervals over seeds, and the difference to the first arm by seed."""
    lines = [
        "| | summed reward, last 10 steps | games won | reward against GSPO, seed by seed |",
        "| --- | --- | --- | --- |",
    ]
    last = {
        arm: {k: [sum(r[k][-10:]) / len(r[k][-10:]) for r in runs] for k in ("reward", "won")}
        for arm, runs in results.items()
    }
    base = last[next(iter(ARMS))]["reward"]
    for arm, found in last.items():
        difference = [a - b for a, b in zip(found["reward"], base, strict=True)]
        texts = [plus_minus(values) for values in (found["reward"], found["won"], difference)]
        lines.append(f"| {arm} | {texts[0]} | {texts[1]} | {'' if found['reward'] is base else texts[2]} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=5, choices=range(1, 32))
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, default=Path("runs/multi_turn_credit"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, list[dict[str, list[float]]]] = {arm: [] for arm in ARMS}
    for seed in range(given.seeds):
        for arm in ARMS:
            results[arm].append(run(arm, seed, given.steps, given.learning_rate, given.out))
            print(f"seed {seed}, {arm}: {time.process_time():.0f} CPU-seconds so far", flush=True)
        (given.out / "results.json").write_text(json.dumps(results))
    curves = {arm: [run["reward"] for run in runs] for arm, runs in results.items()}
    steps = range(1, given.steps + 1)
    draw([Panel(steps, curves, "step (128 games each)", "summed reward of a game")], given.out / "curves.svg")
    print(table(results))


if __name__ == "__main__":
    main()
