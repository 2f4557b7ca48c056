"""The arithmetic of scaling against the models themselves and against numbers made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import Case, make_groups, model_flops
from scaling import step, table
from scaling_model import (
    CARDS,
    SHAPES,
    Shape,
    Shares,
    Work,
    concurrency,
    forward_flops,
    received_bytes,
    rollout_seconds,
    training_bytes,
)
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.distributed.processes import run_processes
from tests.policy.tiny import save_tiny

TINY = Shape(2, 32, 64, 4, 2, tied=True, head_dim=8, vocabulary=199)
TINY_MOE = Shape(2, 32, 16, 4, 2, tied=False, head_dim=8, vocabulary=199, experts=6, active=2)


def build(shape):
    """The Qwen3 model of a shape, without storage."""
    sizes = {
        "vocab_size": shape.vocabulary, "hidden_size": shape.hidden, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "tie_word_embeddings": shape.tied,
    }  # fmt: skip
    with torch.device("meta"):
        if not shape.experts:
            return Qwen3ForCausalLM(Qwen3Config(**sizes, intermediate_size=shape.intermediate))
        config = Qwen3MoeConfig(
            **sizes, moe_intermediate_size=shape.intermediate, num_experts=shape.experts,
            num_experts_per_tok=shape.active, decoder_sparse_step=1, mlp_only_layers=[],
        )  # fmt: skip
        return Qwen3MoeForCausalLM(config)


@pytest.mark.parametrize("shape", [*SHAPES.values(), TINY, TINY_MOE], ids=[*SHAPES, "tiny", "tiny-moe"])
def test_parameters_are_those_of_the_model(shape):
    assert shape.parameters == sum(p.numel() for p in build(shape).parameters())


def test_operations_are_those_that_the_update_benchmark_counts():
    work = Work(prompts=3, group_size=4, prompt_length=10, response_mean=17, response_max=17)
    case = Case(3, 10, 4, 17)
    same = {"response_ids": (7,) * 17, "sampler_logprobs": (0.0,) * 17, "trainable": (True,) * 17}
    rollouts = [replace(rollout, **same) for group in make_groups(case, 199) for rollout in group]
    exact = model_flops(build(TINY), rollouts) / 3
    assert forward_flops(TINY, work) == pytest.approx(exact, rel=1e-12)


def test_one_gpu_receives_nothing():
    for shard in ("none", "full"):
        assert sum(received_bytes(TINY, Work(), 1, shard).values()) == 0


def test_bytes_by_hand():
    work = Work(prompts=2, group_size=4, prompt_length=8, response_mean=9, minibatches=2, micro_batch_tokens=10)
    # 80 fed tokens, 40 an update, 20 a GPU: two passes each.
    assert work.passes(2) == 4
    p, layers = TINY.parameters, 2 * TINY.layer
    assert received_bytes(TINY, work, 2, "none") == {"gradients": 2 * 2.0 * p * 2}
    assert received_bytes(TINY, work, 2, "full") == {
        "weights": 2.0 * (4 * p + 4 * layers + 2 * p), "gradients": 2.0 * 4 * p, "rollout": 2.0 * p,
    }  # fmt: skip
    assert received_bytes(TINY, work, 2, "full", reshard=False)["weights"] == 2.0 * 6 * p


def test_bytes_are_those_that_two_processes_receive(tmp_path):
    folder = save_tiny(tmp_path / "model", "qwen3")
    config = Qwen3Config.from_pretrained(folder)
    shape = Shape(
        config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_attention_heads,
        config.num_key_value_heads, config.tie_word_embeddings, config.head_dim,
        config.vocab_size + 1,  # FSDP2 pads 61 rows to 62
    )  # fmt: skip
    one_pass = Work(prompts=1, group_size=2, response_mean=4, minibatches=1)
    expected = {reshard: received_bytes(shape, one_pass, 2, "full", reshard=reshard) for reshard in (True, False)}
    for found in run_processes("tests.benchmarks.traffic_cases:received", 2, str(folder)):
        for reshard, causes in expected.items():
            assert found[f"update, reshard {reshard}"] == causes["weights"] + causes["gradients"]
        assert found["rollout"] == expected[True]["rollout"]
        two = received_bytes(shape, replace(one_pass, minibatches=2), 2, "full", reshard=False)
        assert found["score"] == two["weights"] - 2 * expected[False]["weights"]


def test_memory_falls_with_the_number_of_gpus_under_fsdp_only():
    work, shape = Work(), SHAPES["qwen3-8b"]
    assert training_bytes(shape, work, 16, "full") < training_bytes(shape, work, 8, "full")
    assert training_bytes(shape, work, 16, "none") == training_bytes(shape, work, 8, "none")
    assert training_bytes(shape, work, 8, "none") > 16 * shape.parameters


def test_sampling_a_moe_reads_all_experts_that_a_batch_visits():
    shape, card, shares = SHAPES["qwen3-30b-a3b"], CARDS["H100"], Shares(bandwidth=1.0)
    work = Work(prompts=1, group_size=1, prompt_length=0, response_mean=1, response_max=1)
    one = rollout_seconds(shape, work, 1, card, shares, 1, 2)
    read = 2 * (shape.per_token + shape.embedding) + shape.kv_bytes / 2
    assert one == pytest.approx(read / card.bandwidth, rel=1e-3)
    many = rollout_seconds(shape, replace(work, group_size=1000), 1, card, shares, 1000, 2)
    assert many > 2 * (shape.layers * shape.experts * shape.expert) / card.bandwidth


def test_no_room_to_sample_is_told():
    assert concurrency(SHAPES["qwen3-32b"], Work(), 8, CARDS["A100"], "full") == 0
    row = step("qwen3-32b", Work(), 64, CARDS["H100"], Shares())
    assert row is not None
    assert row.concurrent == 0
    assert "no room" in table([row])
    assert step("qwen3-32b", Work(), 1, CARDS["H100"], Shares()) is None
