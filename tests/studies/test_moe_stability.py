"""The study runs through `train` at a tiny size, and its figures are those of its runs."""

import json
from pathlib import Path

import moe_stability as study
import pytest

from gspo.objectives import CLIP_RANGES
from gspo.reporting.journal import read_rollouts
from gspo.reporting.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")
RECORDED = json.loads((ROOT / "studies" / "results" / "moe_stability.json").read_text())


def record(reward, clipped, held_out=(0.25, 0.5)):
    """A summary with `clipped` for every count of the clip, and the same spread everywhere."""
    names = [f"{u} {h} {m}" for u in ("token", "sequence") for h in ("native", "replayed") for m in study.MOMENTS]
    return {
        "reward": reward,
        "held_out": [[0, held_out[0]], [len(reward), held_out[1]]],
        "clipped": dict.fromkeys(study.CLIPPED, clipped),
        "clipped_by_step": [clipped[0] / clipped[1]] * len(reward),
        "changed": {"first": [1, 200], "last": [1, 50]},
        "spread": {name: [0.1, 0.3] for name in names},
    }


@pytest.fixture(scope="module")
def finished(policy, small, tmp_path_factory):
    """Runs of every arm by seed 0 of a tiny model: two steps of two updates each."""
    out = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        regime = study.Regime(steps=2, minibatches=2, epochs=1, figures_every=1, seeds=dict.fromkeys(study.MAIN, 1))
        patch.setitem(study.REGIMES, "paper", regime)
        runs = {}
        for arm in regime.seeds:
            data = study.settings("paper", arm, 0, policy, out) | small
            runs[arm] = (data, study.finish(data))
    return runs


def test_arms_differ_in_objective_and_replay_alone():
    configs = {arm: study.settings("off-policy", arm, 2, Path("model"), Path("out")) for arm in study.ARMS}
    for name, given in (("gspo", configs["gspo"]), ("grpo", configs["grpo"]), ("grpo", configs["grpo-replay"])):
        low, high = CLIP_RANGES[name]
        assert given["objective"] == {"name": name, "clip_low": low, "clip_high": high}
    assert configs["gspo-wide"]["objective"]["clip_high"] == pytest.approx(10 * CLIP_RANGES["gspo"][1])
    assert configs["grpo-narrow"]["objective"]["clip_low"] == pytest.approx(CLIP_RANGES["grpo"][0] / 10)
    assert [arm for arm, config in configs.items() if config["routing"]["replay"] == "old"] == ["grpo-replay"]
    for config in configs.values():
        del config["objective"], config["routing"]["replay"], config["run"]["name"]
        assert config == configs["gspo"]


def test_the_arms_of_a_seed_start_alike(finished):
    batches = [read_rollouts(RunFolder(run.folder.path).rollout_file(1)) for _, run in finished.values()]
    sampled = [[(r.prompt.ids, r.response_ids, r.reward) for r in batch] for batch in batches]
    assert len(sampled[0]) == 16
    assert sampled[0] == sampled[1] == sampled[2]


def test_a_finished_run_is_left_alone(finished):
    data, run = finished["grpo"]
    before = run.folder.metrics_file.stat().st_mtime_ns
    assert study.finish(data).metrics == run.metrics
    assert run.folder.metrics_file.stat().st_mtime_ns == before


def test_the_summary_counts_what_the_run_trained_on(finished):
    _, run = finished["gspo"]
    found = study.summary(run)
    rollouts = [r for step in (1, 2) for r in read_rollouts(RunFolder(run.folder.path).rollout_file(step))]
    assert found["reward"] == [sum(r.reward for r in rollouts[k : k + 16]) / 16 for k in (0, 16)]
    assert found["length"] == (sum(len(r.response_ids) for r in rollouts), 32)
    assert [step for step, _ in found["held_out"]] == [0, 2]
    assert len(found["spread"]["sequence replayed last"]) == 1
    clipped, tokens = found["clipped"]["token_removed"]
    of_sequences, sequences = found["clipped"]["sequence_removed"]
    assert 0 < clipped < tokens == found["length"][0]
    assert 0 < of_sequences < sequences == 32
    lengths = sorted(len(r.response_ids) for r in rollouts)
    assert sum(lengths[: int(of_sequences)]) <= clipped <= sum(lengths[-int(of_sequences) :])


def test_every_arm_gives_a_row_of_each_table(finished, tmp_path):
    arms = {arm: [study.summary(run)] for arm, (_, run) in finished.items()}
    text = study.tables({"paper": arms})
    assert all(text.count(f"\n| {study.ARMS[arm].name} | ") == 3 for arm in arms)
    study.figure(arms, tmp_path / "figure.svg")
    assert "held-out accuracy" in (tmp_path / "figure.svg").read_text()


def test_fractions_are_pooled_and_not_averaged():
    records = [record([0.5], (1, 10)), record([0.5], (9, 30))]
    assert study.share(records, "clipped", "token_removed") == 0.25
    (row,) = study.clip_table({"gspo": records})[2:]
    assert row == "| GSPO | 1 / 10, 9 / 30 | 0.25 | 0.25 | 0.25 |"


def test_rewards_are_of_the_last_steps_and_compared_seed_by_seed():
    early = [9.0] * 5
    arms = {
        "gspo": [record(early + [0.5] * study.LAST, (1, 2)), record(early + [0.75] * study.LAST, (1, 2))],
        "grpo": [record(early + [0.25] * study.LAST, (1, 2)), record(early + [0.5] * study.LAST, (1, 2))],
    }
    gspo, grpo = study.learning_table(arms)[2:]
    half = "1.588"  # 12.706 * 0.25 / 2: two seeds, 0.25 apart
    assert gspo == (
        f"| GSPO | 0.625 ± {half} | 0.500, 0.750 | 0.250 ± 0.000 | 0.250 ± 0.000; 0.500 ± 0.000 | 0.000 ± 0.000 |"
    )
    assert grpo == f"| GRPO | 0.375 ± {half} | 0.250, 0.500 |  | 0.250 ± 0.000; 0.500 ± 0.000 |  |"


def test_routing_figures_are_means_over_steps_and_seeds():
    (row,) = study.routing_table({"grpo": [record([0.5], (1, 2)), record([0.5], (1, 2))]})[2:]
    spread = "0.2000 / 0.2000; 0.2000 / 0.2000"
    assert row == f"| GRPO | 0.50%; 2.00% | {spread} | {spread} |"


def test_the_page_shows_what_was_recorded():
    made = {regime: {arm: len(runs) for arm, runs in arms.items()} for regime, arms in RECORDED.items()}
    assert made == {name: regime.seeds for name, regime in study.REGIMES.items()}
    for regime, arms in RECORDED.items():
        assert {len(run["reward"]) for runs in arms.values() for run in runs} == {study.REGIMES[regime].steps}
        for table in (study.learning_table(arms), study.clip_table(arms), study.routing_table(arms)):
            assert "\n".join(table) in PAGE, regime
