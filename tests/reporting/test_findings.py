"""What stands out is said with its figure, and nothing is said of a calm run."""

from collections import Counter
from pathlib import Path

import pytest

from gspo.reporting.findings import WINDOW, findings
from gspo.reporting.metrics import Ratio
from gspo.reporting.run_records import read_runs
from tests.reporting.run_folders import make_run, settings


def found(tmp_path: Path, metrics, reasons=(), **arguments):
    (run,) = read_runs([make_run(tmp_path / "r", metrics, **arguments)])
    return findings(run, Counter(dict(reasons)))


@pytest.mark.parametrize("steps", [0, 1, WINDOW, 3 * WINDOW])
def test_a_calm_run_raises_no_alarm(tmp_path: Path, steps: int) -> None:
    assert found(tmp_path, [{}] * steps, accuracy={0: (0.1, 0.0, 0.2), 9: (0.5, 0.4, 0.6)}) == []


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"optimizer/non_finite": 1}, ["12 updates were not made"]),
        ({"ratio/saturated": Ratio(1, 100)}, ["12 of 1200 ratios reached the clamp"]),
        ({"reward/dropped": Ratio(2, 100)}, ["24 of 1200 rollouts (2.0%) were dropped; most often: it raised"]),
        ({"reward/function/style": Ratio(0.0, 16)}, ["reward function style gave 0", "192 rollouts"]),
        ({"mismatch/token": Ratio(3.0, 10)}, ["by 0.3 nats a token", "gspo audit"]),
        ({"group/without_signal": Ratio(8, 10)}, ["80% of the groups of the last 10 steps", "are solved"]),
        (
            {"group/without_signal": Ratio(8, 10), "reward/accuracy": Ratio(1, 16)},
            ["80% of the groups of the last 10 steps", "too hard"],
        ),
        ({"response/truncated": Ratio(6, 10)}, ["60% of the responses of the last 10 steps were cut"]),
        ({"clip/sequence_removed": Ratio(6, 10)}, ["removed the gradient of 60% of the sequences"]),
    ],
)
def test_what_stands_out_has_a_line(tmp_path: Path, figures, words) -> None:
    (line,) = found(tmp_path, [figures] * 12, {"it  raised\n": 3})
    assert all(word in line for word in words)
    assert "\n" not in line


@pytest.mark.parametrize(
    "figures",
    [
        {"reward/dropped": Ratio(1, 100)},
        {"group/without_signal": Ratio(3, 4)},
        {"response/truncated": Ratio(1, 2)},
        {"clip/sequence_removed": Ratio(1, 2)},
        {"mismatch/token": Ratio(1.0, 10)},
        {"reward/function/style": Ratio(0.0, 0)},
    ],
)
def test_at_the_threshold_nothing_is_said(tmp_path: Path, figures) -> None:
    assert found(tmp_path, [figures] * 12) == []


def test_trends_are_not_judged_from_a_few_steps(tmp_path: Path) -> None:
    bad = {"group/without_signal": Ratio(1, 1), "clip/sequence_removed": Ratio(1, 1), "response/truncated": Ratio(1, 1)}
    assert found(tmp_path, [bad] * (WINDOW - 1)) == []


def test_trends_are_those_of_the_last_steps(tmp_path: Path) -> None:
    bad = {"clip/sequence_removed": Ratio(1, 1)}
    assert found(tmp_path, [bad] * 20 + [{}] * WINDOW) == []


def test_entropy_is_flagged_where_the_reward_does_not_explain_it(tmp_path: Path) -> None:
    gone = {"policy/entropy": Ratio(0.1, 10)}
    poor = {"reward/accuracy": Ratio(1, 10)}
    assert found(tmp_path / "a", [{}] + [gone] * 12, accuracy={}) == []  # half of the responses are right
    (line,) = found(tmp_path / "b", [{}] + [gone | poor] * 12)
    assert "entropy fell from 0.5 to 0.01 nats" in line
    assert "only 10% of the responses" in line


def test_noise_is_held_against_the_clip_range_where_it_stands_in_the_ratio(tmp_path: Path) -> None:
    """A mean |log s| of 2e-4 is more than half of 3e-4, and of nothing else here."""
    noisy = [{"mismatch/sequence": Ratio(2e-3, 10)}] * 2
    sampler = settings(likelihoods={"old": "sampler"})
    (line,) = found(tmp_path / "a", noisy, config=sampler)
    assert "log s is 2.0e-04 on average, and the clip range begins at 3.0e-04" in line
    assert found(tmp_path / "b", noisy) == []  # recomputed
    wide = settings(likelihoods={"old": "sampler"}, objective={"clip_low": 0.01, "clip_high": 0.01})
    assert found(tmp_path / "c", noisy, config=wide) == []
    grpo = settings(likelihoods={"old": "sampler"}, objective={"name": "grpo"})
    assert found(tmp_path / "d", noisy, config=grpo) == []


@pytest.mark.parametrize(
    ("accuracy", "words"),
    [
        ({0: (0.5, 0.4, 0.6), 4: (0.3, 0.2, 0.39)}, "accuracy fell from 0.500 after step 0 to 0.300 after step 4"),
        ({0: (0.1, 0.0, 0.2), 2: (0.7, 0.6, 0.8), 4: (0.5, 0.4, 0.59)}, "was 0.700 after step 2 and is 0.500"),
        ({0: (0.5, 0.4, 0.6), 4: (0.3, 0.2, 0.41)}, None),
        ({0: (0.5, 0.4, 0.6)}, None),
        ({}, None),
    ],
)
def test_falling_accuracy_is_said_where_intervals_part(tmp_path: Path, accuracy, words) -> None:
    lines = found(tmp_path, [{}] * 4, accuracy=accuracy)
    assert [words in line for line in lines] == ([True] if words else [])


def test_figures_that_are_not_numbers_say_nothing(tmp_path: Path) -> None:
    nothing = {
        name: Ratio(float("nan"), 4)
        for name in ("policy/entropy", "mismatch/token", "mismatch/sequence", "clip/sequence_removed")
    }
    assert found(tmp_path, [nothing] * 12, config=settings(likelihoods={"old": "sampler"})) == []
