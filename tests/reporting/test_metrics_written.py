"""Every metric of the list is written by some run, and a run writes no other."""

import re
from pathlib import Path
from typing import Any

import gspo
from gspo.config import build_config
from gspo.reporting.files import read_lines
from gspo.reporting.metrics import METRICS, documented, expand
from gspo.reporting.recorder import evaluation_metrics
from tests.policy.tiny import save_tiny
from tests.training.test_multi_turn import save_words

COMMON: dict[str, Any] = {
    "rollout": {"prompts": 2, "group_size": 4, "max_tokens": 4},
    "training": {"steps": 1, "minibatches": 2},
    "evaluation": {"samples": 2, "temperature": 1.0},
}


def written_by_a_run(folder: Path, name: str, **sections: dict[str, Any]) -> set[str]:
    result = gspo.train(build_config({**COMMON, **sections, "run": {"dir": str(folder), "name": name}}))
    (line,) = read_lines(result.run / "metrics.jsonl")
    assert result.after is not None
    return {name for name in line if name not in ("step", "sums")} | set(evaluation_metrics(result.after))


def test_the_list_of_metrics_is_what_runs_write(tmp_path: Path) -> None:
    function = "tests.training.tiny_task:early_words"
    written = written_by_a_run(
        tmp_path,
        "experts",
        model={"path": str(save_tiny(tmp_path / "experts-model", "qwen3_moe", scale=2.0))},
        task={"kind": "function", "function": "tests.training.tiny_task:rows", "held_out": 4},
        reward={"functions": [{"function": function}]},
        objective={"kl_weight": 0.1},
        likelihoods={"correction": "truncate"},
        routing={"replay": "old", "load_balancing_weight": 0.01},
    )
    written |= written_by_a_run(
        tmp_path,
        "turns",
        rollout={**COMMON["rollout"], "top_k": 10},
        model={"path": str(save_words(tmp_path / "words-model", "llama"))},
        task={"kind": "multi_turn", "environment": "tests.rollout.environments:Words", "held_out": 3, "max_turns": 2},
    )
    assert all(documented(name) for name in written)
    for name in (name for pattern in METRICS for name in expand(pattern)):
        pattern = re.compile(re.sub("<[^>]*>", "[^/]+", re.escape(name)))
        assert any(pattern.fullmatch(other) for other in written), f"{name} is on the page, but no run writes it"
