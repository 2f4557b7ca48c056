"""`rollout.lag` over stand-in servers: real overlap, weights that change inside a response, deaths and resumes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gspo.training.loop as loop
from gspo.config import Config, build_config
from gspo.distributed.world import World
from gspo.errors import BadInputError
from gspo.reporting.files import read_lines
from gspo.reporting.journal import read_rollouts
from gspo.training.learner import Learner
from gspo.training.staleness import VersionBounds, check_lag
from gspo.types import Rollout, VersionSpan
from tests.policy.tiny import make_rollout, save_tiny
from tests.rollout.fake_vllm import FakeVllm
from tests.training.tiny_task import early_words

BATCH = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), scale=2.0)


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    server = FakeVllm(vocabulary=40)
    yield server
    server.die()


def settings(folder: Path, tmp_path: Path, *servers: FakeVllm, lag: int = 1, steps: int = 3, **more: Any) -> Config:
    rollout = {"prompts": 4, "group_size": 4, "max_tokens": 6, "engine": "server", "lag": lag, "server_wait": 20.0}
    return build_config(
        {
            "run": {"dir": str(tmp_path / "runs"), "name": "run"},
            "model": {"path": str(folder)},
            "task": {"kind": "function", "function": "tests.training.tiny_task:rows", "held_out": 0},
            "rollout": {**rollout, "servers": [server.url for server in servers], **more},
            "likelihoods": {"old": "sampler"},
            "training": {"steps": steps, "minibatches": 2},
            "optimizer": {"learning_rate": 1e-2},
            "checkpoint": {"every": 1, "keep": 9},
        }
    )


def rollouts_of(run: Path, step: int) -> list[Rollout]:
    return read_rollouts(run / "rollouts" / f"step-{step:06d}.jsonl.zst")


def spans_of(run: Path, step: int) -> set[tuple[VersionSpan, ...]]:
    return {rollout.policy_version for rollout in rollouts_of(run, step)}


def until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


@pytest.mark.parametrize("lag", [1, 2])
def test_responses_of_later_steps_are_drawn_while_one_is_trained_on(
    lag: int, folder: Path, tmp_path: Path, server: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each update waits until the server has been asked for the next `lag` steps: in turn that would never end."""
    update, steps = Learner.update, 4

    def waiting(self: Learner, step: int, *rest: Any) -> None:
        until(lambda: len(server.bodies) >= BATCH * min(step + lag, steps))
        assert len(server.bodies) <= BATCH * min(step + lag, steps)
        update(self, step, *rest)

    monkeypatch.setattr(Learner, "update", waiting)
    result = loop.train(settings(folder, tmp_path, server, lag=lag, steps=steps), reward=early_words)
    lines = read_lines(result.run / "metrics.jsonl")
    assert lines[0]["rollout/updates_behind"] == 0
    assert lines[1]["rollout/updates_behind_max"] == 2
    assert max(line["rollout/updates_behind_max"] for line in lines) == 2 * lag
    for step, line in enumerate(lines, start=1):
        behind = [rollout.updates_behind for rollout in rollouts_of(result.run, step)]
        assert line["sums"]["rollout/updates_behind"] == [sum(behind), BATCH]
        started = 2 * (step - 1)
        assert behind == [started - r.policy_version[0].version for r in rollouts_of(result.run, step)]
    assert len(server.bodies) == BATCH * steps


def test_without_a_lag_nothing_is_drawn_early(
    folder: Path, tmp_path: Path, server: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Learner.update

    def watching(self: Learner, step: int, *rest: Any) -> None:
        time.sleep(0.1)
        assert len(server.bodies) == BATCH * step
        update(self, step, *rest)

    monkeypatch.setattr(Learner, "update", watching)
    run = loop.train(settings(folder, tmp_path, server, lag=0), reward=early_words).run
    assert [spans_of(run, step) for step in (1, 2, 3)] == [{(VersionSpan(0, 2 * n),)} for n in range(3)]
    assert {line["rollout/updates_behind_max"] for line in read_lines(run / "metrics.jsonl")} == {0}


def test_weights_change_inside_a_response_and_every_token_says_whose_it_is(
    folder: Path, tmp_path: Path, server: FakeVllm
) -> None:
    """The second step's requests are held until the first step's weights have arrived."""
    server.free = BATCH
    server.hold()

    def let_go(result: loop.StepResult) -> None:
        if result.step == 1:
            until(lambda: len(server.bodies) == 2 * BATCH)
            server.release()

    run = loop.train(settings(folder, tmp_path, server), reward=early_words, callbacks=[let_go]).run
    mixed = {spans for spans in spans_of(run, 2) if len(spans) > 1}
    assert mixed == {(VersionSpan(0, 0), VersionSpan(start, 2)) for start in {s[1].start for s in mixed}}
    assert mixed
    behind = {r.policy_version: r.updates_behind for r in rollouts_of(run, 2)}
    assert all(count == (2 if spans[0].version == 0 else 0) for spans, count in behind.items())
    assert "/resume" in server.calls


def test_a_server_that_dies_under_both_loses_nothing(folder: Path, tmp_path: Path, server: FakeVllm) -> None:
    server.free = BATCH
    server.hold()

    def kill(result: loop.StepResult) -> None:
        if result.step == 1:
            until(lambda: len(server.bodies) == 2 * BATCH)
            server.die()
            server.start()

    run = loop.train(settings(folder, tmp_path, server), reward=early_words, callbacks=[kill]).run
    for step in (1, 2, 3):
        places = [(r.slot, r.sample) for r in rollouts_of(run, step)]
        assert places == [(slot, sample) for slot in range(4) for sample in range(4)]
        assert all(r.dropped is None for r in rollouts_of(run, step))
    assert spans_of(run, 2) == {(VersionSpan(0, 2),)}


def test_ctrl_c_ends_what_is_in_flight_and_a_resume_goes_on(folder: Path, tmp_path: Path, server: FakeVllm) -> None:
    server.free = BATCH
    server.hold()

    def interrupt(_: loop.StepResult) -> None:
        until(lambda: len(server.bodies) == 2 * BATCH)
        raise KeyboardInterrupt

    config = settings(folder, tmp_path, server)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        loop.train(config, reward=early_words, callbacks=[interrupt])
    assert time.monotonic() - began < 15
    server.release()
    run = tmp_path / "runs" / "run"
    assert loop.train(config, reward=early_words, resume=run).run == run
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == [1, 2, 3]
    assert all(len(rollouts_of(run, step)) == BATCH for step in (1, 2, 3))


def test_responses_that_were_finished_ahead_survive_a_kill(folder: Path, tmp_path: Path, server: FakeVllm) -> None:
    run = tmp_path / "runs" / "run"
    ahead = run / "rollouts" / "step-000002.jsonl.zst"

    def kill(_: loop.StepResult) -> None:
        until(ahead.exists)
        raise KeyboardInterrupt

    config = settings(folder, tmp_path, server)
    with pytest.raises(KeyboardInterrupt):
        loop.train(config, reward=early_words, callbacks=[kill])
    finished = {(r.slot, r.sample): (r.response_ids, r.policy_version) for r in read_rollouts(ahead)}
    asked = len(server.bodies)
    loop.train(config, reward=early_words, resume=run)
    kept = {(r.slot, r.sample): (r.response_ids, r.policy_version) for r in rollouts_of(run, 2)}
    assert kept == finished
    assert len(server.bodies) == asked + BATCH


def test_groups_without_signal_are_replaced_ahead_too_and_the_stream_goes_on(
    folder: Path, tmp_path: Path, server: FakeVllm
) -> None:
    def dull(completions: list[str], **_: Any) -> list[float]:
        return [0.0 for _ in completions]

    run = loop.train(settings(folder, tmp_path, server, steps=2, resample_without_signal=1), reward=dull).run
    assert [len(rollouts_of(run, step)) for step in (1, 2)] == [2 * BATCH, 2 * BATCH]
    first, second = ({r.prompt.key for r in rollouts_of(run, step)} for step in (1, 2))
    assert (len(first), len(second)) == (8, 8)
    assert not first & second


def test_the_journal_of_another_life_is_used_within_the_bounds_of_the_lag() -> None:
    bounds = VersionBounds(step=3, version=6, updates=2, lag=1)

    def drawn_by(*versions: int) -> Rollout:
        spans = tuple(VersionSpan(start, version) for start, version in enumerate(versions))
        return replace(make_rollout(0, 0, (5,), (6, 7, 8)), policy_version=spans)

    assert bounds.admit(drawn_by(4, 6), step=4)
    assert not bounds.admit(drawn_by(3), step=4)
    assert not bounds.admit(drawn_by(6, 8), step=4)
    assert bounds.admit(drawn_by(6, 8), step=5)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rollout": {"engine": "transformers"}}, 'rollout.engine = "transformers" generates in the process'),
        ({"rollout": {"engine": "vllm"}}, 'rollout.engine = "vllm" generates in the process that trains'),
        ({"likelihoods": {"old": "recompute"}}, 'needs likelihoods.old = "sampler"'),
        ({"routing": {"replay": "old"}}, 'cannot be with routing.replay = "old"'),
        ({"task": {"kind": "multi_turn", "environment": "a:B"}}, 'cannot be with task.kind = "multi_turn"'),
    ],
)
def test_what_a_lag_cannot_go_with_is_said(changes: dict[str, Any], why: str) -> None:
    sections: dict[str, Any] = {
        "model": {"path": "m"},
        "task": {"kind": "jsonl", "path": "p.jsonl"},
        "rollout": {"engine": "server", "servers": ["http://a:1"], "lag": 2},
        "likelihoods": {"old": "sampler"},
    }
    for name, section in changes.items():
        sections[name] = section if name == "task" else {**sections.get(name, {}), **section}
    with pytest.raises(BadInputError, match=f"rollout.lag = 2.*{why}"):
        build_config(sections)


def test_several_processes_cannot_run_ahead(folder: Path, tmp_path: Path, server: FakeVllm) -> None:
    config = settings(folder, tmp_path, server)
    check_lag(config, World())
    with pytest.raises(BadInputError, match=r"rollout.lag = 1 with 2 processes: .*use rollout.lag = 0"):
        check_lag(config, World(size=2))
