"""Routes that the embedded engine records, against one plain forward per response."""

import numpy as np
import pytest
import torch

from gspo.policy.routing import record_routing
from gspo.rollout import transformers_engine as engines
from gspo.rollout.decoding import CohortDecoder
from gspo.rollout.transformers_engine import TransformersEngine
from gspo.types import Sampling
from tests.rollout.families import tiny_model
from tests.rollout.test_transformers_engine import ENDS, _requests

SAMPLING = Sampling(max_tokens=6, eos_ids=ENDS, seed=3)


def assert_plain(model, rollouts):
    """Each rollout's routes are those of a forward over its fed tokens, as sets."""
    assert len({len(r.response_ids) for r in rollouts}) > 2
    model.eval()
    for rollout in rollouts:
        with torch.no_grad(), record_routing(model) as expected:
            model(torch.tensor([rollout.prompt.ids + rollout.response_ids[:-1]]), use_cache=False)
        assert rollout.routes.keys() == expected.keys()
        for name, routes in rollout.routes.items():
            assert routes.dtype == np.uint8
            assert np.array_equal(np.sort(routes, 1), np.sort(expected[name].numpy(), 1))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_recorded_routes_are_those_of_a_plain_forward(family, tokenizer):
    model = tiny_model(family)
    engine = TransformersEngine(model, tokenizer, max_concurrent=4, record_routes=True)
    assert_plain(model, engine.generate(_requests((3, 5, 1), 2), SAMPLING))


@pytest.mark.parametrize("cached", [True, False])
def test_rows_in_lockstep_keep_their_routes(cached, tokenizer, monkeypatch):
    monkeypatch.setattr(engines, "choose_decoder", lambda model: lambda *_: CohortDecoder(model, cached=cached))
    model = tiny_model("qwen3_moe")
    engine = TransformersEngine(model, tokenizer, max_concurrent=8, record_routes=True)
    assert_plain(model, engine.generate(_requests((4, 4, 2), 2), SAMPLING))


def test_routes_come_only_where_they_are_asked_for(tokenizer):
    engine = TransformersEngine(tiny_model("qwen3_moe"), tokenizer, max_concurrent=4)
    assert all(r.routes is None for r in engine.generate(_requests((3,), 2), SAMPLING))


def test_a_prompt_without_room_has_no_routes(tokenizer):
    engine = TransformersEngine(tiny_model("qwen3_moe"), tokenizer, max_concurrent=4, record_routes=True)
    (rollout,) = engine.generate(_requests((128,), 1), SAMPLING)
    assert (rollout.finish_reason, rollout.routes) == ("error", None)
