"""Evaluation: exact estimators, intervals over prompts, nothing counted that was not scored."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gspo.config import build_config
from gspo.training.evaluation import evaluate, evaluation_record, evaluation_sampling, pass_at_k, summarize
from gspo.training.intervals import Estimate, estimate
from gspo.types import Prompt, Request, Rollout, Sampling
from tests.reporting.rollouts import make_rollout


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_with_a_correct_one(case: tuple[int, int, int]) -> None:
    n, c, k = case
    draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(d) for d in draws) / len(draws), abs=1e-15)


def test_pass_at_k_is_unbiased() -> None:
    p, n, k = 0.3, 6, 3
    expected = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    assert expected == pytest.approx(1 - (1 - p) ** k, rel=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 4), (3, 4, 1), (3, 1, 0), (3, -1, 1)])
def test_pass_at_k_refuses_what_has_no_answer(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@k needs"):
        pass_at_k(n, c, k)


def test_intervals_are_over_prompts_not_responses() -> None:
    """Four equal responses to a prompt are one piece of evidence, not four."""
    rollouts = [make_rollout(slot, sample, reward=float(slot % 2)) for slot in range(20) for sample in range(4)]
    evaluation = summarize(prompts(20), rollouts, sampling=Sampling(4), samples=4, correct_at=1.0)
    assert evaluation.accuracy == estimate([float(slot % 2) for slot in range(20)])
    assert evaluation.accuracy.n == 20


def prompts(count: int) -> list[Prompt]:
    return [make_rollout(slot).prompt for slot in range(count)]


def test_summary_worked_by_hand() -> None:
    rewards = {0: [1.0, 0.0, 1.0, 0.5], 1: [0.0, 0.0, 0.0, 0.0], 2: [1.0, None, 1.2, None]}
    rollouts = [
        make_rollout(slot, sample, reward=reward) for slot, row in rewards.items() for sample, reward in enumerate(row)
    ]
    evaluation = summarize(prompts(3), rollouts, sampling=Sampling(4), samples=4, correct_at=1.0)
    assert evaluation.correct == (2, 0, 2)
    assert evaluation.scored == (4, 4, 2)
    assert evaluation.dropped == 2
    assert evaluation.accuracy.value == pytest.approx((0.5 + 0 + 1) / 3)
    assert sorted(evaluation.pass_at) == [2, 4]
    assert evaluation.pass_at[2].value == pytest.approx((5 / 6 + 0 + 1) / 3)
    assert evaluation.pass_at[4] == estimate([1.0, 0.0])  # the third prompt has two scored responses only


def test_k_of_pass_at_k_are_powers_of_two_and_the_number_of_samples() -> None:
    for samples, expected in ((1, []), (2, [2]), (6, [2, 4, 6]), (8, [2, 4, 8])):
        evaluation = summarize([], [], sampling=Sampling(4), samples=samples, correct_at=1.0)
        assert list(evaluation.pass_at) == expected
        assert evaluation.accuracy == Estimate(None, None, None, 0)


def test_the_threshold_of_correctness_is_inclusive() -> None:
    rollouts = [make_rollout(0, 0, reward=0.5), make_rollout(0, 1, reward=0.49)]
    evaluation = summarize(prompts(1), rollouts, sampling=Sampling(4), samples=2, correct_at=0.5)
    assert evaluation.correct == (1,)


class Parrot:
    """An engine that answers with the sample's number."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        assert sampling.temperature == 0.7
        self.requests = list(requests)
        return [
            replace(make_rollout(r.slot, i, reward=None), prompt=r.prompt, text=str(i), dropped=None)
            for r in requests
            for i in range(r.first_sample, r.first_sample + r.samples)
        ]

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:  # noqa: ARG002
        raise AssertionError("evaluation changes no weights")

    def close(self) -> None:
        raise AssertionError("the caller's engine is not closed")


def test_evaluate_asks_for_every_sample_and_counts_the_scored_ones() -> None:
    engine = Parrot()

    def score(rollouts: Sequence[Rollout]) -> list[Rollout]:
        return [replace(r, reward=float(r.text == "1")) for r in rollouts]

    held_out = prompts(5)
    evaluation = evaluate(engine, held_out, score, sampling=Sampling(4, temperature=0.7), samples=4)
    assert [(r.prompt, r.samples, r.step, r.slot) for r in engine.requests] == [
        (prompt, 4, 0, slot) for slot, prompt in enumerate(held_out)
    ]
    assert evaluation.correct == (1,) * 5
    assert evaluation.accuracy.value == 0.25
    assert evaluation.pass_at[4].value == 1.0
    assert len(evaluation.rollouts) == 20


def test_the_record_names_each_prompt_and_keeps_no_rollout() -> None:
    cut = replace(make_rollout(0, 0, length=7, reward=0.0), finish_reason="length")
    rollouts = [cut, make_rollout(1, 0, length=3), make_rollout(2, 0, reward=None)]
    record = evaluation_record(summarize(prompts(3), rollouts, sampling=Sampling(9), samples=1, correct_at=1.0))
    assert record["truncated"] == [1, 2]
    assert record["length"] == [10, 2]
    assert record["dropped"] == 1
    assert record["prompts"] == [
        {"key": "key0", "correct": 0, "scored": 1},
        {"key": "key1", "correct": 1, "scored": 1},
        {"key": "key2", "correct": 0, "scored": 0},
    ]


def test_sampling_comes_from_the_evaluation_section_and_draws_other_noise_than_training() -> None:
    config = build_config(
        {
            "model": {"path": "m"},
            "task": {"kind": "reasoning_gym", "name": "chain_sum"},
            "run": {"seed": 5},
            "rollout": {"max_tokens": 9, "stop": ["\n"]},
            "evaluation": {"samples": 2, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
        }
    )
    sampling = evaluation_sampling(config, [2, 7])
    assert replace(sampling, seed=0) == Sampling(9, 0.6, 0.95, 20, 0.0, ("\n",), (2, 7))
    assert sampling.seed != config.run.seed
