"""The policy loss for verl, without verl: what it returns, and that it registers itself where verl is."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch

from gspo.objectives import gspo_loss
from tests.objectives.cases import random_case

PATH = Path(__file__).parents[2] / "examples" / "verl_gspo.py"


def load() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("verl_gspo", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config(**info) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        clip_ratio=0.2, clip_ratio_low=3e-4, clip_ratio_high=4e-4, clip_ratio_c=10.0, global_batch_info=info
    )


def test_it_is_gspo_normalised_by_the_mini_batch() -> None:
    case = random_case(0)
    advantages = case.advantages[:, None].expand_as(case.logprobs)
    loss, metrics = load().gspo_policy_loss(
        case.old, case.logprobs, advantages, case.mask.float(), config=config(global_batch_size=12, dp_size=2)
    )
    expected = gspo_loss(case.logprobs, case.old, case.advantages, case.mask)
    rows = int(case.mask.any(1).sum())
    torch.testing.assert_close(loss, expected.loss * rows / 12 * 2)
    assert metrics["actor/sequence_clipfrac"] == expected.stats.as_floats()["sequence_removed"]
    alone, _ = load().gspo_policy_loss(case.old, case.logprobs, advantages, case.mask.float(), config=config())
    torch.testing.assert_close(alone, expected.loss)


def test_other_aggregations_are_refused() -> None:
    case = random_case(0)
    with pytest.raises(ValueError, match="token-mean"):
        load().gspo_policy_loss(
            case.old, case.logprobs, case.logprobs, case.mask, loss_agg_mode="token-mean", config=config()
        )


def test_it_registers_itself_with_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    registry: dict[str, object] = {}
    core = types.ModuleType("verl.trainer.ppo.core_algos")
    core.register_policy_loss = lambda name: lambda function: registry.setdefault(name, function)
    for name in ("verl", "verl.trainer", "verl.trainer.ppo"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.core_algos", core)
    assert registry == {}
    module = load()
    assert registry == {"gspo_exact": module.gspo_policy_loss}
