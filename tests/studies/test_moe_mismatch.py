"""The audits of the mismatch study at a tiny size, and its table."""

import json
from pathlib import Path

import moe_mismatch as study

ROOT = Path(__file__).parents[2]


def row(weights="bfloat16", replay="off", objective="gspo", band=(3e-4, 4e-4), outside=(3, 8)):
    return {
        "weights": weights, "replay": replay, "token_std": 0.0262, "token_max": 1.03, "objective": objective,
        "range": list(band), "outside": list(outside), "flipped": [1, 4], "gradient_change": 0.4387,
    }  # fmt: skip


def test_an_audit_judges_the_range_asked_for_and_the_papers(policy, small):
    settings = small | {"model": {"path": str(policy)}, "training": {"minibatches": 2}}
    asked = {"name": "grpo", "clip_low": 0.8, "clip_high": 4.0}
    rows = study.measure(settings, "int8", "off", asked)
    assert [(r["objective"], *r["range"]) for r in rows] == [
        ("gspo", 3e-4, 4e-4), ("grpo", 0.8, 4.0), ("grpo", 0.2, 0.27),
    ]  # fmt: skip
    assert rows[0]["outside"][1] == 16
    assert all(r["token_std"] > 0 and 0 <= r["outside"][0] <= r["outside"][1] for r in rows)


def test_rows_are_told_apart_by_engine_objective_and_range():
    wide = row(band=(3e-2, 4e-2))
    grpo, replayed, int8 = row(objective="grpo", band=(0.2, 0.27)), row(replay="sampler"), row(weights="int8")
    assert study.distinct([int8, grpo, wide, row(), replayed, row()]) == [row(), wide, grpo, replayed, int8]


def test_a_row_says_counts_over_denominators():
    (line,) = study.table([row()]).splitlines()[2:]
    assert line == "| bfloat16 | no | 0.026; 1 | GSPO 0.0003 / 0.0004 | 3 of 8 | 1 of 4 | 0.44 |"


def test_the_page_shows_what_was_recorded():
    recorded = json.loads((ROOT / "studies" / "results" / "moe_mismatch.json").read_text())
    assert study.table(recorded) in (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")
