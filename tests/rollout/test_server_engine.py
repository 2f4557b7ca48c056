"""The server engine against servers that fail: nothing lost, nothing twice, no answer from other weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from gspo.errors import BadInputError, GspoError
from gspo.rollout import server_pool
from gspo.rollout.server_engine import ATTEMPTS, ServerEngine
from gspo.rollout.support_checks import checked_supports
from gspo.rollout.vllm_format import Draw
from gspo.types import Prompt, Request, Rollout, Sampling, VersionSpan
from tests.rollout.fake_vllm import UNTRAINED, FakeVllm, experts_of, respond, support_of

SAMPLING = Sampling(max_tokens=6, eos_ids=(2, 3), seed=5)
PROMPTS = [Prompt(key=str(i), content="", ids=(10 + i, 20, 30)) for i in range(4)]
REQUESTS = [Request(prompt, samples=3, step=7, slot=slot) for slot, prompt in enumerate(PROMPTS)]

Serve = Callable[..., ServerEngine]


@pytest.fixture
def servers() -> Iterator[list[FakeVllm]]:
    running: list[FakeVllm] = [FakeVllm(), FakeVllm()]
    yield running
    for server in running:
        server.die()


@pytest.fixture
def serve(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    monkeypatch.setattr(server_pool, "_FIRST_PAUSE", 0.02)
    monkeypatch.setattr(server_pool, "_LONGEST_PAUSE", 0.1)
    engines: list[ServerEngine] = []

    def start(*servers: FakeVllm, weight: float | None = 1.0, **settings: Any) -> ServerEngine:
        defaults = {"max_concurrent": 8, "request_timeout": 5.0, "server_wait": 20.0, "weights_folder": tmp_path / "w"}
        engine = ServerEngine([server.url for server in servers], tokenizer, **{**defaults, **settings})
        engines.append(engine)
        if weight is not None:
            update(engine, weight, version=3)
        return engine

    yield start
    for engine in engines:
        engine.close()


def update(engine: ServerEngine, weight: float, version: int) -> None:
    engine.update_weights(iter([("w", torch.tensor(weight))]), version)


def draws_of(requests: Sequence[Request]) -> list[Draw]:
    return [
        Draw(r.prompt, r.step, r.slot, sample)
        for r in requests
        for sample in range(r.first_sample, r.first_sample + r.samples)
    ]


def assert_complete(
    rollouts: Sequence[Rollout], weight: float, version: int, requests: Sequence[Request] = REQUESTS
) -> None:
    """Each wanted response is there once, as the weights and its own seed make it."""
    wanted = sorted(draws_of(requests), key=lambda d: (d.slot, d.sample))
    assert [(r.slot, r.sample) for r in rollouts] == [(d.slot, d.sample) for d in wanted]
    for rollout, draw in zip(rollouts, wanted, strict=True):
        params = {"seed": draw.seed(SAMPLING.seed), "max_tokens": SAMPLING.max_tokens, "stop_token_ids": (2, 3)}
        ids, logprobs, reason = respond(draw.prompt.ids, params, weight)
        assert list(rollout.response_ids) == ids
        assert list(rollout.sampler_logprobs) == logprobs
        assert rollout.finish_reason == reason
        assert rollout.dropped is None
        assert rollout.policy_version == (VersionSpan(0, version),)
        assert rollout.trainable == (True,) * len(ids)


def in_background(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    return thread, results


def test_draws_every_response_once_from_the_current_weights(servers: list[FakeVllm], serve: Serve) -> None:
    engine = serve(*servers)
    assert_complete(engine.generate(REQUESTS, SAMPLING), 1.0, 3)
    assert sum(server.drawn.total() - 1 for server in servers) == 12, "one of each server's draws is the check"
    assert all(len(server.bodies) > 1 for server in servers), "both servers take part"


def test_the_request_leaves_nothing_to_the_servers_defaults(servers: list[FakeVllm], serve: Serve) -> None:
    engine = serve(servers[0])
    sampling = Sampling(max_tokens=6, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop=("ab",), eos_ids=(2, 3))
    engine.generate([Request(PROMPTS[1], samples=1, step=7, slot=1)], sampling)
    (body,) = servers[0].bodies
    assert body["token_ids"] == [11, 20, 30]
    assert body["sampling_params"] == {
        "n": 1,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": Draw(PROMPTS[1], 7, 1, 0).seed(0),
        "max_tokens": 6,
        "min_tokens": 0,
        "ignore_eos": True,
        "stop_token_ids": [2, 3],
        "stop": ["ab"],
        "detokenize": True,
        "skip_special_tokens": True,
        "logprobs": 0,
    }


def test_neither_servers_nor_order_nor_splitting_change_a_response(servers: list[FakeVllm], serve: Serve) -> None:
    whole = serve(*servers).generate(REQUESTS, SAMPLING)
    engine = serve(servers[1])
    parts = [
        Request(r.prompt, samples=1, step=r.step, slot=r.slot, first_sample=s) for s in (2, 0, 1) for r in REQUESTS
    ]
    assert [r.response_ids for r in engine.generate(parts, SAMPLING)] == [r.response_ids for r in whole]


def test_new_weights_reach_all_servers_and_old_prefixes_are_forgotten(servers: list[FakeVllm], serve: Serve) -> None:
    engine = serve(*servers)
    engine.generate(REQUESTS, SAMPLING)
    update(engine, 2.0, version=4)
    assert_complete(engine.generate(REQUESTS, SAMPLING), 2.0, 4)
    assert [server.weight for server in servers] == [2.0, 2.0]


def test_the_label_of_weights_comes_after_all_that_can_fail(servers: list[FakeVllm], serve: Serve) -> None:
    serve(servers[0])
    wanted = ["/update_weight_version", "/pause", "/collective_rpc", "/reset_prefix_cache", "/resume"]
    made = [call for call in servers[0].calls if call in wanted]
    assert made == [*wanted, "/update_weight_version"]


def test_weights_that_another_run_left_are_replaced_at_the_same_version(servers: list[FakeVllm], serve: Serve) -> None:
    serve(servers[0], weight=9.0)
    engine = serve(servers[0], weight=1.0)
    assert_complete(engine.generate(REQUESTS, SAMPLING), 1.0, 3)


def test_weights_lie_on_disk_only_while_they_are_current(servers: list[FakeVllm], serve: Serve, tmp_path: Path) -> None:
    engine = serve(servers[0])
    update(engine, 2.0, version=4)
    (folder,) = (tmp_path / "w").iterdir()
    assert folder.name.endswith("version-4")
    engine.close()
    assert list((tmp_path / "w").iterdir()) == []


@pytest.mark.parametrize("fault", ["500", "429", "reset", "slow", "text", "short", "abort", "unlabelled"])
def test_a_fault_of_the_server_is_made_good(servers: list[FakeVllm], serve: Serve, fault: str) -> None:
    engine = serve(servers[0], request_timeout=0.3)
    servers[0].faults.extend(["", fault, "", fault])
    assert_complete(engine.generate(REQUESTS, SAMPLING), 1.0, 3)
    assert len(servers[0].bodies) == 14, "two were asked twice, no other"


@pytest.mark.parametrize(("fault", "said"), [("400", "injected 400"), ("infinite", "not finite at response token")])
def test_a_fault_of_one_request_costs_no_other(servers: list[FakeVllm], serve: Serve, fault: str, said: str) -> None:
    engine = serve(servers[0], max_concurrent=1)
    servers[0].faults.extend(["", fault])
    rollouts = engine.generate(REQUESTS, SAMPLING)
    assert [r.dropped is not None for r in rollouts] == [False, True, *[False] * 10]
    bad = rollouts[1]
    assert (bad.finish_reason, bad.response_ids, bad.sampler_logprobs) == ("error", (), ())
    assert said in str(bad.dropped)
    assert len(servers[0].bodies) == 12, "no server can do better: it is not asked again"


def test_a_request_that_takes_its_server_down_is_given_up(servers: list[FakeVllm], serve: Serve) -> None:
    engine = serve(*servers)
    for server in servers:
        server.cursed.add(PROMPTS[2].ids)
    rollouts = engine.generate(REQUESTS, SAMPLING)
    assert {r.slot for r in rollouts if r.dropped} == {2}
    assert f"given up after {ATTEMPTS} attempts" in str(rollouts[6].dropped)
    assert_complete([r for r in rollouts if r.slot != 2], 1.0, 3, [r for r in REQUESTS if r.slot != 2])


def test_requests_of_a_dying_server_go_to_the_others(servers: list[FakeVllm], serve: Serve) -> None:
    engine = serve(*servers)
    servers[0].hold()
    thread, results = in_background(lambda: engine.generate(REQUESTS, SAMPLING))
    for _ in range(4):
        assert servers[0].waiting.acquire(timeout=10)
    servers[0].die()
    thread.join(timeout=20)
    assert_complete(results[0], 1.0, 3)
    assert sorted(servers[1].drawn.values()) == [1] * 13, "twelve responses and the check, none twice"


def test_requests_wait_for_the_only_server_to_return_with_current_weights(
    servers: list[FakeVllm], serve: Serve
) -> None:
    engine = serve(servers[0])
    update(engine, 2.0, version=4)
    servers[0].hold()
    thread, results = in_background(lambda: engine.generate(REQUESTS, SAMPLING))
    assert servers[0].waiting.acquire(timeout=10)
    servers[0].die()
    time.sleep(0.3)
    servers[0].start()
    assert servers[0].weight == UNTRAINED
    thread.join(timeout=20)
    assert_complete(results[0], 2.0, 4)


def test_a_server_that_restarted_unseen_is_found_out_by_its_label(servers: list[FakeVllm], serve: Serve) -> None:
    engine = serve(servers[0])
    servers[0].die()
    servers[0].start()
    assert_complete(engine.generate(REQUESTS, SAMPLING), 1.0, 3)


def test_a_server_that_is_down_during_an_update_gets_the_weights_later(servers: list[FakeVllm], serve: Serve) -> None:
    engine = serve(*servers)
    servers[0].die()
    update(engine, 2.0, version=4)
    assert_complete(engine.generate(REQUESTS, SAMPLING), 2.0, 4)
    servers[0].start()
    deadline = time.monotonic() + 20
    while servers[0].weight != 2.0 and time.monotonic() < deadline:
        time.sleep(0.02)
    servers[1].die()
    assert_complete(engine.generate(REQUESTS, SAMPLING), 2.0, 4)


def test_without_any_server_the_run_ends_after_the_stated_time(servers: list[FakeVllm], serve: Serve) -> None:
    engine = serve(*servers, server_wait=0.5)
    for server in servers:
        server.die()
    begin = time.monotonic()
    with pytest.raises(GspoError, match=r"no server has been ready .* for 0\.5 s") as caught:
        engine.generate(REQUESTS, SAMPLING)
    assert 0.4 < time.monotonic() - begin < 10
    assert not isinstance(caught.value, BadInputError)
    assert all(server.url in str(caught.value) for server in servers)
    assert "cannot be reached" in str(caught.value)
    for server in servers:
        server.start()


def test_what_the_server_says_of_weights_that_do_not_load_is_told(servers: list[FakeVllm], serve: Serve) -> None:
    engine = serve(servers[0], server_wait=0.3)
    servers[0].reload_problem = "shape mismatch in w"
    update(engine, 2.0, version=4)
    with pytest.raises(GspoError, match="shape mismatch in w"):
        engine.generate(REQUESTS, SAMPLING)


def test_log_probs_of_another_distribution_are_refused(serve: Serve) -> None:
    server = FakeVllm(processed=False)
    with pytest.raises(BadInputError, match="--logprobs-mode processed_logprobs"):
        serve(server)
    server.die()


@pytest.mark.parametrize("route", ["/collective_rpc", "/inference/v1/generate"])
def test_a_server_without_the_interface_is_refused(serve: Serve, route: str) -> None:
    server = FakeVllm(missing=[route])
    with pytest.raises(BadInputError, match="gspo serve-command"):
        serve(server)
    server.die()


def test_a_refusal_ends_the_step_at_once_though_a_call_is_hanging(servers: list[FakeVllm], serve: Serve) -> None:
    engine = serve(servers[0], servers[1], request_timeout=60.0)
    servers[0].hold()
    servers[1].faults.append("403")
    begin = time.monotonic()
    with pytest.raises(BadInputError, match="injected 403"):
        engine.generate(REQUESTS, SAMPLING)
    assert time.monotonic() - begin < 20
    servers[0].release()


def test_generating_without_weights_is_an_error(servers: list[FakeVllm], serve: Serve) -> None:
    with pytest.raises(GspoError, match="no weights yet"):
        serve(servers[0], weight=None).generate(REQUESTS, SAMPLING)


def test_prompts_without_room_are_dropped_unasked_and_others_cut_at_the_context(serve: Serve) -> None:
    server = FakeVllm(context=8)
    engine = serve(server)
    long, empty = Prompt("long", "", tuple(range(10, 18))), Prompt("empty", "", ())
    requests = [Request(p, samples=1, step=0, slot=i) for i, p in enumerate((long, empty, PROMPTS[0]))]
    rollouts = engine.generate(requests, Sampling(max_tokens=6))
    assert rollouts[0].dropped == "prompt of 8 tokens leaves no room in a context of 8"
    assert rollouts[1].dropped == "empty prompt: there is no token to continue"
    assert len(rollouts[2].response_ids) == 5
    assert rollouts[2].truncated
    assert len(server.bodies) == 1
    server.die()


def test_the_text_leaves_out_the_eos_token_that_the_ids_keep(servers: list[FakeVllm], serve: Serve) -> None:
    engine = serve(servers[0])
    rollouts = engine.generate(
        [Request(PROMPTS[0], samples=8, step=0, slot=0)], Sampling(max_tokens=30, eos_ids=tuple(range(2, 12)))
    )
    stopped = [r for r in rollouts if r.finish_reason == "stop" and len(r.response_ids) > 1]
    assert stopped
    for rollout in stopped:
        assert rollout.response_ids[-1] in range(2, 12)
        assert rollout.text == engine.tokenizer.decode(list(rollout.response_ids[:-1]), skip_special_tokens=True)


def test_no_requests_give_no_rollouts(servers: list[FakeVllm], serve: Serve) -> None:
    assert serve(servers[0]).generate([], SAMPLING) == []


def test_the_key_of_the_environment_is_sent(
    servers: list[FakeVllm], serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    serve(servers[0]).generate(REQUESTS[:1], SAMPLING)
    assert {headers.get("Authorization") for headers in servers[0].headers} == {"Bearer sesame"}


def test_experts_come_with_the_responses(serve: Serve) -> None:
    server = FakeVllm(reports_experts=True)
    engine = serve(server, experts={"model.layers.1.mlp": 101})
    server.faults.extend(["misaligned"])
    rollouts = engine.generate(REQUESTS, SAMPLING)
    assert_complete(rollouts, 1.0, 3)
    for rollout in rollouts:
        assert rollout.routes is not None
        wanted = experts_of(rollout.prompt.ids, rollout.response_ids)[:, 1]
        assert {name: rows.tolist() for name, rows in rollout.routes.items()} == {"model.layers.1.mlp": wanted.tolist()}
    assert server.drawn.total() == 1 + 12 + 1, "the misaligned answer is drawn again"
    server.die()


def test_servers_that_do_not_report_experts_are_refused(servers: list[FakeVllm], serve: Serve) -> None:
    with pytest.raises(BadInputError, match="does not report the experts that it used"):
        serve(servers[0], experts={"model.layers.1.mlp": 101})


def test_unwanted_experts_are_left_out(serve: Serve) -> None:
    server = FakeVllm(reports_experts=True)
    assert all(r.routes is None for r in serve(server).generate(REQUESTS, SAMPLING))
    server.die()


TRUNCATED = replace(SAMPLING, top_p=0.9, top_k=50, record_support=True)


def test_supports_come_with_the_responses(serve: Serve) -> None:
    server = FakeVllm(reports_supports=True)
    engine = serve(server, supports=True)
    server.faults.extend(["misaligned"])
    rollouts = engine.generate(REQUESTS, TRUNCATED)
    assert_complete(rollouts, 1.0, 3)
    for rollout in rollouts:
        assert rollout.support is not None
        parts = np.split(rollout.support.ids, rollout.support.offsets[1:-1])
        assert [part.tolist() for part in parts] == [sorted(ids) for ids in support_of(rollout.response_ids)]
    assert checked_supports(rollouts, TRUNCATED) == rollouts
    assert server.drawn.total() == 1 + 12 + 1, "the misaligned answer is drawn again"
    server.die()


def test_greedy_evaluations_ask_for_the_only_candidate_and_take_no_support(serve: Serve) -> None:
    server = FakeVllm(reports_supports=True)
    rollouts = serve(server, supports=True).generate(REQUESTS[:1], replace(SAMPLING, temperature=0.0, top_p=0.5))
    assert all(r.support is None and r.dropped is None for r in rollouts)
    params = server.bodies[-1]["sampling_params"]
    assert (params["temperature"], params["top_p"], params["top_k"], params["min_p"]) == (1.0, 1.0, 1, 0.0)
    server.die()


def test_servers_that_do_not_report_supports_are_refused(servers: list[FakeVllm], serve: Serve) -> None:
    with pytest.raises(BadInputError, match=r"^rollout\.top_p.* does not report the tokens that it kept; start it as"):
        serve(servers[0], supports=True)
