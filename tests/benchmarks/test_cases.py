"""Rollouts, agreement and arithmetic of the update benchmarks."""

from __future__ import annotations

from pathlib import Path

import cases
import pytest
import sides
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

CASE = cases.Case(prompts=2, prompt_length=5, group_size=3, response_max=16)


def test_responses_are_ragged_and_the_longest_has_the_given_length() -> None:
    lengths = CASE.response_lengths()
    assert sorted(lengths) == [2, 4, 7, 10, 13, 16]
    assert lengths != sorted(lengths)
    groups = cases.make_groups(CASE, 50)
    assert [len(r.response_ids) for g in groups for r in g] == lengths
    assert groups == cases.make_groups(CASE, 50)
    assert {len(r.prompt.ids) for g in groups for r in g} == {5}


def test_old_logprobs_differ_from_the_current_by_the_noise() -> None:
    case = cases.Case(2, 3, 8, 512)
    current = -torch.rand(16, 512)
    groups = cases.with_old(cases.make_groups(case, 50), current)
    rollouts = [r for g in groups for r in g]
    noise = torch.cat(
        [torch.tensor(r.sampler_logprobs) - current[i, : len(r.response_ids)] for i, r in enumerate(rollouts)]
    )
    assert float(noise.std()) == pytest.approx(0.05, rel=0.05)


def test_flops_of_an_update_by_hand() -> None:
    config = LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=6, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, tie_word_embeddings=True,
    )  # fmt: skip
    case = cases.Case(prompts=1, prompt_length=5, group_size=2, response_max=4)
    rollouts = cases.make_groups(case, 11)[0]
    assert sorted(len(r.response_ids) for r in rollouts) == [2, 4]
    # q and o are 8 x 8, k and v 8 x 4, three MLP matrices 8 x 6; five prompt tokens and 1 + 3 fed response tokens.
    matrices = 3 * (2 * 64 + 2 * 32 + 3 * 48) * (5 + 4)
    head = 11 * 8 * 6
    # Token pairs: the prompt's triangle, the responses' triangles, each response token with the prompt.
    pairs = 15 + (1 + 6) + 5 * 4
    # Scores and weighted values are one multiply-add per pair and channel of 2 heads x 4.
    attention = 3 * 2 * 8 * pairs
    assert cases.model_flops(LlamaForCausalLM(config), rollouts) == 6 * (matrices + head + attention)


@pytest.mark.parametrize(("change", "cosine", "norms"), [(1.0, 1.0, 1.0), (2.0, 1.0, 0.5), (-1.0, -1.0, 1.0)])
def test_gradients_are_compared_over_all_parameters(tmp_path: Path, change: float, cosine: float, norms: float) -> None:
    model = torch.nn.Linear(3, 2)
    model(torch.randn(4, 3)).square().sum().backward()
    save_file({f"grad.{name}": p.grad / change for name, p in model.named_parameters()}, tmp_path / "ours.safetensors")
    found = sides.compare_gradients(model, tmp_path / "ours.safetensors")
    assert found["gradient_cosine"] == pytest.approx(cosine, abs=1e-12)
    assert found["gradient_norm_ratio"] == pytest.approx(norms, rel=1e-6)


def test_a_gradient_that_one_side_lacks_is_not_compared(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    model(torch.randn(4, 3)).sum().backward()
    save_file({"grad.weight": model.weight.grad}, tmp_path / "ours.safetensors")
    with pytest.raises(ValueError, match="bias"):
        sides.compare_gradients(model, tmp_path / "ours.safetensors")
