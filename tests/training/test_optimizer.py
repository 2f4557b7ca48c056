import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gspo.config import OptimizerConfig
from gspo.training.optimizer import learning_rate, load_optimizer_tensors, make_optimizer, optimizer_tensors


def test_first_adamw_update_is_the_sign_of_the_gradient_times_the_rate():
    # With bias correction m / sqrt(v) = g / |g| after one update, whatever the betas.
    model = nn.Linear(2, 1, bias=True)
    nn.init.constant_(model.weight, 1.0)
    nn.init.constant_(model.bias, 1.0)
    optimizer = make_optimizer(model.named_parameters(), OptimizerConfig(learning_rate=0.1, weight_decay=0.5))
    assert all(group["fused"] for group in optimizer.param_groups)
    model.weight.grad = torch.tensor([[3.0, -2.0]])
    model.bias.grad = torch.tensor([4.0])
    optimizer.step()
    # The matrix decays by lr * wd = 0.05 first; the bias does not decay.
    torch.testing.assert_close(model.weight.data, torch.tensor([[0.95 - 0.1, 0.95 + 0.1]]))
    torch.testing.assert_close(model.bias.data, torch.tensor([0.9]))


def test_frozen_parameters_are_left_out():
    model = nn.Linear(2, 1)
    model.weight.requires_grad_(False)
    optimizer = make_optimizer(model.named_parameters(), OptimizerConfig())
    assert [p for group in optimizer.param_groups for p in group["params"]] == [model.bias]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
    ],
)
def test_schedule(schedule, expected):
    config = OptimizerConfig(learning_rate=1.0, warmup_updates=4, schedule=schedule)
    assert [learning_rate(config, update, 8) for update in range(8)] == pytest.approx(expected)


@given(
    warmup=st.integers(0, 20),
    total=st.integers(1, 50),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    update=st.integers(0, 49),
)
def test_learning_rate_never_leaves_its_range(warmup, total, schedule, update):
    config = OptimizerConfig(learning_rate=2.0, warmup_updates=warmup, schedule=schedule)
    assert 0.0 <= learning_rate(config, min(update, total - 1), total) <= 2.0


def test_restored_optimizer_continues_bit_for_bit():
    def build():
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        return model, make_optimizer(model.named_parameters(), OptimizerConfig(learning_rate=0.01))

    def names(model):
        return {p: name for name, p in model.named_parameters()}

    def update(model, optimizer, seed):
        torch.manual_seed(seed)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()

    model, optimizer = build()
    update(model, optimizer, 1)
    saved, weights = optimizer_tensors(optimizer, names(model)), {k: v.clone() for k, v in model.state_dict().items()}
    saved = {k: v.clone() for k, v in saved.items()}
    update(model, optimizer, 2)

    other, restored = build()
    other.load_state_dict(weights)
    load_optimizer_tensors(restored, names(other), saved)
    update(other, restored, 2)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
