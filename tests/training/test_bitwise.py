"""Zero mismatch: under `likelihoods.batch_invariant` both engines agree to the last bit, or it is refused."""

import dataclasses
import json

import pytest

from gspo.audit.audit import audit
from gspo.config import build_config
from gspo.errors import BadInputError
from gspo.policy.load import load_policy
from gspo.rollout.transformers_engine import TransformersEngine
from gspo.training.bitwise import check_bitwise
from gspo.training.loop import train
from tests.policy.tiny import save_tiny

SETTINGS = {
    "task": {"kind": "function", "function": "tests.training.tiny_task:rows", "held_out": 0},
    "reward": {"functions": [{"function": "tests.training.tiny_task:early_words"}]},
    "rollout": {"prompts": 4, "group_size": 4, "max_tokens": 24, "temperature": 0.9, "max_concurrent": 5},
    "optimizer": {"learning_rate": 3e-3},
    "training": {"steps": 2, "minibatches": 2, "micro_batch_tokens": 100},
    "likelihoods": {"old": "sampler", "batch_invariant": True},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"), scale=2.0)


def config_of(model, folder, *, batch_invariant=True):
    likelihoods = {"old": "sampler", "batch_invariant": batch_invariant}
    return build_config(
        {**SETTINGS, "model": {"path": str(model)}, "run": {"dir": str(folder)}, "likelihoods": likelihoods}
    )


def test_a_run_has_no_mismatch_at_all_and_its_first_ratios_are_one(model, tmp_path):
    """Weights change between the steps, responses leave the batch one by one: still not one bit differs."""
    run = train(config_of(model, tmp_path)).run
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["mismatch/token_max"] for line in lines] == [0.0, 0.0]


def test_the_audit_reports_bitwise_agreement(model, tmp_path):
    found = audit(config_of(model, tmp_path))
    assert (found.differences.identical, found.differences.identical_responses) == (1.0, 1.0)
    assert found.outcomes[0].verdict.text == "use the engine's likelihoods: both engines agree to the last bit"
    # Without the setting the difference is rounding, not nothing.
    usual = audit(config_of(model, tmp_path, batch_invariant=False))
    assert usual.differences.identical_responses <= usual.differences.identical < 1


@pytest.mark.parametrize("family", ["llama_tied", "qwen2", "qwen3"])
def test_families_that_agree(family, tmp_path):
    check_bitwise(*engine_and_policy(save_tiny(tmp_path, family)))


@pytest.mark.parametrize(
    ("family", "why"),
    [("mistral", "MistralAttention has sliding_window"), ("gpt2", "differ by up to .* with GPT2LMHeadModel on cpu")],
)
def test_families_that_do_not_are_refused(family, why, tmp_path):
    with pytest.raises(BadInputError, match=f"likelihoods.batch_invariant = true: .*{why}.*set it to false"):
        check_bitwise(*engine_and_policy(save_tiny(tmp_path, family)))


def test_one_bit_is_enough_to_refuse(model):
    engine, policy = engine_and_policy(model)
    policy.scorer = dataclasses.replace(policy.scorer, batch_invariant=False)
    with pytest.raises(BadInputError, match="differ by up to"):
        check_bitwise(engine, policy)


@pytest.mark.parametrize(
    "setting", [{"layout": "shared"}, {"layout": "packed"}, {"dtype": "bfloat16"}, {"compile": True}]
)
def test_what_cannot_go_with_it_is_said_at_once(setting, tmp_path):
    (name,) = setting
    with pytest.raises(BadInputError, match=f"likelihoods.batch_invariant = true cannot be with model.{name} = "):
        build_config({**SETTINGS, "model": {"path": "m", **setting}, "run": {"dir": str(tmp_path)}})


def test_truncated_sampling_is_renormalised_with_other_roundings(tmp_path):
    rollout = {**SETTINGS["rollout"], "top_k": 5}
    with pytest.raises(BadInputError, match=r"likelihoods.batch_invariant = true cannot be with rollout.top_p"):
        build_config({**SETTINGS, "model": {"path": "m"}, "rollout": rollout, "run": {"dir": str(tmp_path)}})


def engine_and_policy(path):
    policy = load_policy(path, dtype="float32", batch_invariant=True)
    return TransformersEngine(policy.model, policy.tokenizer, max_concurrent=5, batch_invariant=True), policy
