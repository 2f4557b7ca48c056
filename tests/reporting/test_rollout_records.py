"""Rollouts are read for their texts; damaged files are said to be so."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given

from gspo.errors import BadInputError
from gspo.reporting.journal import write_rollouts
from gspo.reporting.metrics import Ratio
from gspo.reporting.rollout_records import drop_reasons, read_texts, recorded_steps
from gspo.reporting.run_records import read_runs
from gspo.types import Prompt, VersionSpan
from tests.reporting.rollouts import build_rollouts, make_rollout, rollout_fields
from tests.reporting.run_folders import make_run


def written(tmp_path: Path, rollouts, advantages=None):
    path = tmp_path / "step-000001.jsonl.zst"
    write_rollouts(path, rollouts, advantages)
    return list(read_texts(path))


@given(rollout_fields())
def test_whatever_was_written_is_read(tmp_path_factory, fields) -> None:
    rollouts = build_rollouts(fields)
    found = written(tmp_path_factory.mktemp("r"), rollouts)
    for rollout, text in zip(rollouts, found, strict=True):
        assert (text.slot, text.sample, text.text) == (rollout.slot, rollout.sample, rollout.text)
        assert (text.reward, text.dropped, dict(text.rewards)) == (rollout.reward, rollout.dropped, rollout.rewards)
        assert (text.tokens, text.trainable) == (len(rollout.response_ids), sum(rollout.trainable))
        assert text.finish_reason == rollout.finish_reason
        assert len(text.messages) == len(rollout.messages)


def test_figures_of_a_rollout(tmp_path: Path) -> None:
    """Three trainable tokens at -.1, -.2, -.3; in a second rollout the first is not the policy's."""
    plain = make_rollout()
    second = dataclasses.replace(
        make_rollout(), trainable=(False, True, True), policy_version=(VersionSpan(0, 3), VersionSpan(2, 4))
    )
    one, two = written(tmp_path, [plain, second], [0.5, None])
    assert (one.advantage, two.advantage) == (0.5, None)
    assert one.logprob == pytest.approx(-0.2)
    assert two.logprob == pytest.approx(-0.25)
    assert (one.versions, two.versions) == ((3,), (3, 4))


def test_advantages_by_turn_and_by_token(tmp_path: Path) -> None:
    rollout = dataclasses.replace(
        make_rollout(length=5), trainable=(True, True, False, True, True), turns=(0, 0, -1, 1, 1)
    )
    (by_turn,) = written(tmp_path, [rollout], [[0.5, 0.5, 0.0, -1.0, -1.0]])
    assert by_turn.advantage == (0.5, -1.0)
    (by_token,) = written(tmp_path, [make_rollout()], [[0.1, 0.2, 0.3]])
    assert by_token.advantage == (0.1, 0.2, 0.3)
    (alike,) = written(tmp_path, [make_rollout()], [[0.1, 0.1, 0.1]])
    assert alike.advantage == 0.1
    (empty,) = written(tmp_path, [make_rollout(length=0)], [[]])
    assert empty.advantage is None


def test_messages_keep_role_text_and_tool_calls(tmp_path: Path) -> None:
    rollout = dataclasses.replace(
        make_rollout(),
        prompt=Prompt("k", [{"role": "user", "content": "2+2?"}], (1,)),
        messages=(
            {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]},
            {"role": "tool", "content": [{"type": "text", "text": "4"}]},
        ),
    )
    (text,) = written(tmp_path, [rollout])
    assert text.prompt == (("user", "2+2?"),)
    assert text.messages == (
        ("assistant", '{"tool_calls": [{"name": "add"}]}'),
        ("tool", '[{"type": "text", "text": "4"}]'),
    )


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda _: b"", lambda b: b"x" + b[1:]])
def test_a_damaged_file_is_one_line(tmp_path: Path, damage) -> None:
    path = tmp_path / "step-000001.jsonl.zst"
    write_rollouts(path, [make_rollout(sample=i) for i in range(8)])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BadInputError, match=r"step-000001\.jsonl\.zst: cannot be read"):
        list(read_texts(path))


def test_reasons_are_counted_in_the_last_steps_that_dropped(tmp_path: Path) -> None:
    dropped = {"reward/dropped": Ratio(1, 2)}
    lost = [make_rollout(), make_rollout(sample=1, reward=None)]
    folder = make_run(
        tmp_path / "r", [dropped, {}, dropped, dropped], rollouts={1: lost, 2: lost, 3: lost, 12: [make_rollout()]}
    )
    (run,) = read_runs([folder])
    assert recorded_steps(run) == [1, 2, 3, 12]
    assert drop_reasons(run) == {"the reward function raised": 2}  # steps 1 and 3; 4 is not on disk, 2 dropped none
    assert drop_reasons(run, most_steps=1) == {}
