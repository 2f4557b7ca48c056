"""The studies are scripts that import their neighbours; they run on a Mixture-of-Experts policy of one layer."""

import sys
from pathlib import Path

import pytest
import torch

from gspo.policy.tiny_moe import Recipe, make_model, make_tokenizer

FOLDER = Path(__file__).parents[2] / "studies"
sys.path.insert(0, str(FOLDER))


@pytest.fixture(scope="package")
def policy(tmp_path_factory):
    """The folder of a random policy."""
    folder = tmp_path_factory.mktemp("policy")
    tokenizer = make_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        recipe = Recipe(layers=1, hidden=16, heads=2, experts=4, expert_width=8)
        make_model(recipe, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="package")
def small():
    """Settings that make a step of it quick, with a reward that it sometimes gets."""
    return {
        "rollout": {"prompts": 4, "group_size": 4, "max_tokens": 5},
        "task": {
            "kind": "function",
            "function": "gspo.tasks.addition:problems",
            "held_out": 4,
            "parameters": {"count": 40},
        },
        "reward": {"functions": [{"function": "tests.studies.rewards:odd_sum"}]},
        "optimizer": {"learning_rate": 2e-3},
    }
