"""Rounding an engine's copy: by hand for int8, and nothing but what is said to be rounded."""

import copy

import pytest
import torch

from gspo.audit.weights import int8_rows, round_weights
from tests.policy.tiny import tiny_model


def test_int8_rows_by_hand():
    weight = torch.tensor([[1.27, -0.014, 0.016], [0.0, 0.0, 0.0], [2.54, 0.031, -2.54]])
    expected = torch.tensor([[1.27, -0.01, 0.02], [0.0, 0.0, 0.0], [2.54, 0.04, -2.54]])
    torch.testing.assert_close(int8_rows(weight), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(int8_rows(expected), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen3_moe"])
def test_int8_spares_embeddings_head_and_vectors(family):
    model = tiny_model(family)
    before = copy.deepcopy(model.state_dict())
    round_weights(model, "int8")
    after = model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    matrices = {name for name, value in before.items() if value.ndim >= 2}
    assert changed == {name for name in matrices if "embed_tokens" not in name and "lm_head" not in name}
    for name in changed:
        step = before[name].abs().amax(-1, keepdim=True) / 127
        assert ((after[name] - before[name]).abs() <= step * 0.5001).all()


def test_bfloat16_rounds_every_weight_and_float32_none():
    model = tiny_model("llama")
    before = copy.deepcopy(model.state_dict())
    round_weights(model, "float32")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    round_weights(model, "bfloat16")
    assert all(torch.equal(before[name].bfloat16().float(), value) for name, value in model.state_dict().items())
