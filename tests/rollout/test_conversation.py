"""Conversations: exact ids, masks, turns and rewards; environments that fail; noise that does not depend on order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import WhitespaceSplit

from gspo.config import MultiTurnTask
from gspo.policy.load import load_policy
from gspo.rollout.conversation import ENVIRONMENT, ConversationEngine
from gspo.rollout.support_checks import checked_supports
from gspo.rollout.transformers_engine import TransformersEngine
from gspo.rollout.vllm_format import draws
from gspo.tasks.load import load_task
from gspo.types import Request, Rollout, Sampling, VersionSpan
from tests.policy.tiny import plain_logprobs, save_tiny
from tests.rollout.environments import ScriptedEngine
from tests.tasks.chat_templates import family_tokenizer

ENVIRONMENTS = "tests.rollout.environments"
SAMPLING = Sampling(max_tokens=5, eos_ids=tuple(range(30)), seed=7)  # half of the words end a turn


def task(name: str, **settings: Any) -> MultiTurnTask:
    return MultiTurnTask(kind="multi_turn", environment=f"{ENVIRONMENTS}:{name}", **{"held_out": 0, **settings})


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    policy = load_policy(save_tiny(tmp_path_factory.mktemp("tiny"), scale=2.0))
    policy.tokenizer.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    return policy


def play(
    policy: Any, config: MultiTurnTask, samples: int = 2, sampling: Sampling = SAMPLING, **options: Any
) -> list[Rollout]:
    prompts = load_task(config, policy.tokenizer, seed=0, max_prompt_tokens=100).train
    engine = ConversationEngine(
        TransformersEngine(policy.model, policy.tokenizer, max_concurrent=options.pop("max_concurrent", 64)),
        config,
        policy.tokenizer,
        eos_ids=policy.eos_ids,
        context_length=options.pop("context_length", policy.context_length),
    )
    engine.update_weights((), 3)
    slots = options.pop("slots", range(len(prompts)))
    return engine.generate([Request(prompts[slot], samples, step=2, slot=slot) for slot in slots], sampling)


def test_turns_are_sampled_from_the_exact_ids_so_far(policy: Any) -> None:
    rollouts = play(policy, task("Words"))
    assert [(r.slot, r.sample) for r in rollouts] == [(p, g) for p in range(12) for g in range(2)]
    for rollout in rollouts:
        assert rollout.turns is not None
        assert rollout.turn_rewards is not None
        assert rollout.trainable == tuple(turn >= 0 for turn in rollout.turns)
        turns = len(rollout.turn_rewards)
        assert set(rollout.turns) == {*range(turns), *([ENVIRONMENT] if turns > 1 else [])}
        with torch.no_grad():
            expected, _ = plain_logprobs(policy.model, rollout, 1.0)
        found = torch.tensor(rollout.sampler_logprobs)
        mask = torch.tensor(rollout.trainable)
        torch.testing.assert_close(found[mask], expected[mask], atol=2e-5, rtol=0)
        assert not found[~mask].any()
        added = [
            policy.tokenizer.decode([i]) for i, own in zip(rollout.response_ids, mask.tolist(), strict=True) if not own
        ]
        assert added == ["w12", "w9", "w11", "w9"][: 2 * (turns - 1)]
        assert rollout.policy_version == (VersionSpan(0, 3),)
        assert [m["role"] for m in rollout.messages] == ["assistant", "user"] * (turns - 1) + ["assistant"]
        assert rollout.messages[-1]["content"] == rollout.text
    assert {len(r.turn_rewards or ()) for r in rollouts} >= {3}
    assert {"stop", "length"} == {r.finish_reason for r in rollouts}


def test_neither_order_nor_grouping_nor_concurrency_changes_a_conversation(policy: Any) -> None:
    whole = play(policy, task("Words"))
    parts = play(policy, task("Words"), slots=[5, 2], max_concurrent=3)
    wanted = [r for r in whole if r.slot in (2, 5)]
    assert [r.response_ids for r in parts] == [r.response_ids for r in wanted]
    long = [r for r in whole if r.turns and len(r.turn_rewards or ()) == 3]
    firsts = [
        [t for t, turn in zip(r.response_ids, r.turns or (), strict=True) if turn == n] for r in long for n in (0, 1)
    ]
    assert len({tuple(ids) for ids in firsts}) > len(long)


def test_a_faulty_environment_costs_its_own_rollout_alone(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.rollout.environments.Faulty._started", 0)
    sampling = replace(SAMPLING, max_tokens=40)  # no turn is cut
    rollouts = play(policy, task("Faulty", time_limit=1.0), samples=1, sampling=sampling, context_length=None)
    reasons = {r.prompt.columns["fault"]: r.dropped for r in rollouts}
    played = {r.prompt.columns["fault"] for r in rollouts if len(r.turn_rewards or ()) + (r.dropped is not None) > 1}
    assert reasons["none"] is None
    assert "environment: reset gave other messages" in str(reasons["other_start"])
    expected = {
        "raise": "environment: turn 1: step raised RuntimeError: the board is gone",
        "hang": "environment: turn 1: step did not return within task.time_limit",
        "no_reward": "environment: turn 1: step gave the reward nan",
        "not_an_observation": "environment: turn 1: step returned a str; it must return an Observation",
    }
    assert len(played & expected.keys()) >= 2
    for fault in played & expected.keys():
        assert str(reasons[fault]).startswith(expected[fault])
    assert all((r.finish_reason == "error") == (r.dropped is not None) for r in rollouts)
    assert all(r.policy_version for r in rollouts)


def test_a_full_context_ends_a_conversation(policy: Any) -> None:
    for rollout in play(policy, task("Words"), context_length=10):
        assert len(rollout.prompt.ids) + sum(turn >= 0 for turn in rollout.turns or ()) <= 128
        if rollout.finish_reason == "length":
            assert len(rollout.turn_rewards or ()) < 3
    assert "length" in {r.finish_reason for r in play(policy, task("Words"), context_length=10)}


def scripted(
    said: Sequence[str], *, family: str = "smollm2", config: MultiTurnTask | None = None, samples: int = 1
) -> Any:
    tokenizer = family_tokenizer(family)
    config = config or task("TwoNumbers", max_turns=3)
    prompts = load_task(config, tokenizer, seed=0, max_prompt_tokens=10_000).train

    def script(request: Request, sample: int) -> list[int]:  # noqa: ARG001
        return list(tokenizer(said[request.turn], add_special_tokens=False)["input_ids"])

    inner = ScriptedEngine(script, lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
    engine = ConversationEngine(inner, config, tokenizer, eos_ids=(tokenizer.eos_token_id,), context_length=None)
    sampling = Sampling(max_tokens=100, eos_ids=(tokenizer.eos_token_id,))
    rollouts = engine.generate([Request(prompts[0], samples, step=1, slot=0)], sampling)
    return rollouts, inner, tokenizer, prompts[0]


CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "%s + %s"}}</tool_call>'


@pytest.mark.parametrize("family", ["smollm2", "qwen3"])
def test_a_tool_is_called_and_its_result_read(family: str) -> None:
    end = "<|im_end|>"
    (rollout,), inner, tokenizer, prompt = scripted(
        [CALL % (4, 5) + end, CALL % (4, "x") + end, "It is 1234" + end], family=family
    )
    assert rollout.turn_rewards == (0.2, 0.0, float(prompt.columns["answer"] == "1234"))
    assert rollout.finish_reason == "stop"
    text = tokenizer.decode(rollout.response_ids)
    own = tokenizer.decode([i for i, t in zip(rollout.response_ids, rollout.turns, strict=True) if t >= 0])
    assert own == CALL % (4, 5) + end + CALL % (4, "x") + end + "It is 1234" + end
    opening = "<|im_start|>tool\n" if family == "smollm2" else "<|im_start|>user\n<tool_response>\n"
    assert opening + "9" in text
    assert opening + "error: ValueError: the expression must" in text
    assert text.count(end) == 5  # of three turns and two results: none is doubled where a turn was ended by the policy
    assert [r.turn for r in inner.requests] == [0, 1, 2]
    for request in inner.requests[1:]:
        length = len(request.prompt.ids) - len(prompt.ids)
        assert request.prompt.ids == (*prompt.ids, *rollout.response_ids[:length])
    assert [m["role"] for m in rollout.messages] == ["assistant", "tool"] * 2 + ["assistant"]


def test_a_turn_that_was_cut_ends_the_conversation_after_its_step() -> None:
    (rollout,), inner, *_ = scripted(["It is 12"])
    assert (rollout.finish_reason, len(rollout.turn_rewards), len(inner.requests)) == ("length", 1, 1)


def test_the_last_turn_ends_it_whatever_the_environment_wants() -> None:
    end = "<|im_end|>"
    config = task("TwoNumbers", max_turns=2)
    (rollout,), *_ = scripted([CALL % (4, 5) + end, CALL % (1, 1) + end], config=config)
    assert (rollout.finish_reason, rollout.turn_rewards) == ("stop", (0.2, 0.0))
    assert rollout.turns[-1] == 1


def test_ids_survive_that_a_tokenizer_would_write_otherwise() -> None:
    """A response whose text encodes to other ids: what was sampled stays, byte for byte."""
    tokenizer = family_tokenizer("smollm2")
    end = tokenizer.eos_token_id
    broken = [tokenizer.convert_tokens_to_ids(t) for t in ("Ã", "a")]  # half a character, then a letter
    said = {0: [*broken, end], 1: [*broken, end]}
    config = MultiTurnTask(kind="multi_turn", environment="gspo.tasks.guessing:GuessNumber", max_turns=2, held_out=0)
    prompt = load_task(config, tokenizer, seed=0, max_prompt_tokens=1000).train[0]
    inner = ScriptedEngine(lambda request, _: said[request.turn], lambda ids: tokenizer.decode(ids))
    engine = ConversationEngine(inner, config, tokenizer, eos_ids=(end,), context_length=None)
    (rollout,) = engine.generate([Request(prompt, 1, step=1, slot=0)], Sampling(max_tokens=9, eos_ids=(end,)))
    assert inner.requests[1].prompt.ids[len(prompt.ids) :][:3] == (*broken, end)
    assert tokenizer(tokenizer.decode(broken), add_special_tokens=False)["input_ids"] != broken
    assert [i for i, turn in zip(rollout.response_ids, rollout.turns or (), strict=True) if turn == 1] == [*broken, end]


def test_samples_share_the_first_request_and_get_one_each_later() -> None:
    end = "<|im_end|>"
    _, inner, *_ = scripted([CALL % (4, 5) + end, "12" + end], samples=3)
    assert [(r.samples, r.first_sample, r.turn) for r in inner.requests] == [(3, 0, 0), (1, 0, 1), (1, 1, 1), (1, 2, 1)]


def test_routes_and_versions_of_turns_are_joined() -> None:
    """Rows known before stay as they were; a later turn adds those of the tokens that it feeds first."""

    class Routed(ScriptedEngine):
        def _rollout(self, request: Request, sample: int, sampling: Sampling) -> Rollout:
            found = super()._rollout(request, sample, sampling)
            fed = len(request.prompt.ids) + len(found.response_ids) - 1
            self.version += 1
            return replace(found, routes={"gate": np.full((fed, 2), request.turn, np.int16)})

    tokenizer = family_tokenizer("smollm2")
    end = tokenizer.eos_token_id
    config = MultiTurnTask(kind="multi_turn", environment="gspo.tasks.guessing:GuessNumber", max_turns=2, held_out=0)
    prompt = load_task(config, tokenizer, seed=0, max_prompt_tokens=1000).train[0]
    inner = Routed(lambda *_: [50, 51, end], lambda ids: tokenizer.decode(ids))
    engine = ConversationEngine(inner, config, tokenizer, eos_ids=(end,), context_length=None)
    (rollout,) = engine.generate([Request(prompt, 1, step=1, slot=0)], Sampling(max_tokens=9, eos_ids=(end,)))
    total = len(prompt.ids) + len(rollout.response_ids) - 1
    assert rollout.routes is not None
    assert rollout.routes["gate"].shape == (total, 2)
    assert rollout.routes["gate"][:, 0].tolist() == [0] * (len(prompt.ids) + 2) + [1] * (total - len(prompt.ids) - 2)
    start = len(rollout.response_ids) - 3
    assert rollout.policy_version == (VersionSpan(0, 0), VersionSpan(start, 1))


def test_supports_of_turns_are_joined_and_the_environment_has_none(policy: Any) -> None:
    sampling = replace(SAMPLING, top_k=7, record_support=True)
    rollouts = play(policy, task("Words"), sampling=sampling)
    assert {len(r.turn_rewards or ()) for r in rollouts} >= {3}
    assert checked_supports(rollouts, sampling) == rollouts
    for rollout in rollouts:
        assert rollout.support is not None
        assert (rollout.support.counts > 0).tolist() == list(rollout.trainable)
    scores = policy.score(policy.layout(rollouts), temperature=1.0)
    for row, rollout in enumerate(rollouts):
        found = scores.logprobs[row, : len(rollout.response_ids)]
        torch.testing.assert_close(found, torch.tensor(rollout.sampler_logprobs), atol=1e-5, rtol=0)
    assert all(r.support is None for r in play(policy, task("Words")))


def test_vllm_draws_each_turn_with_a_seed_of_its_own() -> None:
    prompt = load_task(task("Words"), family_tokenizer("smollm2"), seed=0, max_prompt_tokens=1000).train[0]
    seeds = [next(draws([Request(prompt, 1, step=1, slot=0, turn=turn)])).seed(5) for turn in range(3)]
    assert len(set(seeds)) == 3
