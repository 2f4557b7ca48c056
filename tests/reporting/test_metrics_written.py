"""Every metric of the list is written by some run, and a run writes no other."""

import re
from pathlib import Path

import gspo
from gspo.config import build_config
from gspo.reporting.files import read_lines
from gspo.reporting.metrics import METRICS, documented, expand
from gspo.reporting.recorder import evaluation_metrics
from tests.policy.tiny import save_tiny


def test_the_list_of_metrics_is_what_runs_write(tmp_path: Path) -> None:
    function = "tests.training.tiny_task:early_words"
    config = build_config(
        {
            "model": {"path": str(save_tiny(tmp_path / "model", "qwen3_moe", scale=2.0))},
            "task": {"kind": "function", "function": "tests.training.tiny_task:rows", "held_out": 4},
            "reward": {"functions": [{"function": function}]},
            "run": {"dir": str(tmp_path)},
            "rollout": {"prompts": 2, "group_size": 4, "max_tokens": 4},
            "training": {"steps": 1, "minibatches": 2},
            "objective": {"kl_weight": 0.1},
            "routing": {"replay": "old", "load_balancing_weight": 0.01},
            "evaluation": {"samples": 2, "temperature": 1.0},
        }
    )
    result = gspo.train(config)
    (line,) = read_lines(result.run / "metrics.jsonl")
    written = {name for name in line if name not in ("step", "sums")}
    assert result.after is not None
    written |= set(evaluation_metrics(result.after))
    assert all(documented(name) for name in written)
    for name in (name for pattern in METRICS for name in expand(pattern)):
        pattern = re.compile(re.sub("<[^>]*>", "[^/]+", re.escape(name)))
        assert any(pattern.fullmatch(other) for other in written), f"{name} is on the page, but no run writes it"
