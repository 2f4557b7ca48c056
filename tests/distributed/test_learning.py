"""The update by one process and by two: the same gradient, weights and metrics to rounding."""

import math

import pytest
import torch
from safetensors.torch import load_file

from gspo.distributed.world import World
from tests.distributed.learning import CASES, learn, runs, write_batches
from tests.distributed.processes import run_processes
from tests.policy.tiny import save_tiny, worst

# The first test waits until all cases are computed, on a machine that may be busy.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learning")
    for family in ("llama", "qwen3_moe"):
        save_tiny(folder / family, family, scale=2.0)
    write_batches(folder)
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    """What one process finds, by case, at a budget that holds every mini-batch."""
    return {name: learn(folder, name, 10_000, World()) for name in CASES}


@pytest.fixture(scope="module")
def together(folder):
    return run_processes("tests.distributed.learning:learn_all", 2, str(folder), seconds=400)


@pytest.mark.parametrize(("name", "budget", "shard"), runs())
def test_two_processes_make_the_update_of_one(folder, alone, together, name, budget, shard):
    gradients, weights, metrics, _ = alone[name]
    key = f"{name} {budget} {shard}"
    assert together[0][key]["digest"] == together[1][key]["digest"], "the processes have drifted apart"
    found = load_file(folder / f"{key}.safetensors")
    assert gradients
    assert worst(_of(found, "gradient "), gradients) < 3e-5
    for parameter, weight in _of(found, "weight ").items():
        torch.testing.assert_close(weight, weights[parameter], atol=2e-6, rtol=2e-5)
    for rank in (0, 1):
        _same_metrics(together[rank][key]["metrics"], metrics)


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "grpo", "moe gspo", "gspo packed"])
def test_a_small_budget_changes_nothing_in_one_process(folder, alone, name):
    gradients, weights, metrics, passes = learn(folder, name, 40, World())
    assert max(passes) > 1
    assert worst(gradients, alone[name][0]) < 3e-5
    for parameter, weight in weights.items():
        torch.testing.assert_close(weight, alone[name][1][parameter], atol=2e-6, rtol=2e-5)
    _same_metrics(metrics, alone[name][2])


def test_the_cases_are_what_they_say(alone, together):
    """Four updates, clipping, uneven numbers of passes, and processes without any rollout."""
    assert {record["optimizer/updates"] for _, _, record, _ in alone.values()} == {4}
    for name in ("gspo", "gspo_token", "grpo"):
        assert alone[name][2]["sums"]["clip/token_outside"][0] > 0, name
    assert alone["corrected"][2]["sums"]["correction/changed"][0] > 0
    assert alone["gspo"][2]["ratio/log_max"] > 0
    assert [process["skewed 6 none"]["passes"] for process in together] == [[1] * 4, [4] * 4]
    assert [process["alone 40 none"]["passes"] for process in together] == [[1] * 4, [0] * 4]


def _of(tensors, kind):
    return {name.removeprefix(kind): tensor for name, tensor in tensors.items() if name.startswith(kind)}


def _same_metrics(found, expected):
    assert found.keys() == expected.keys()
    assert found["sums"].keys() == expected["sums"].keys()
    found, expected = _without_agreement(found), _without_agreement(expected)
    for name, (total, count) in expected["sums"].items():
        assert found["sums"][name][1] == count, name
        assert math.isclose(found["sums"][name][0], total, rel_tol=1e-4, abs_tol=1e-5), (name, found["sums"][name])
    for name, value in expected.items():
        if name != "sums" and name not in expected["sums"]:
            assert math.isclose(found[name], value, rel_tol=1e-3, abs_tol=1e-6), (name, found[name], value)


def _without_agreement(record):
    """It is counted by forward pass, over fed tokens: a prompt that two passes compute is in it twice."""
    kept = {name: value for name, value in record.items() if not name.startswith("routing/agreement")}
    return kept | {"sums": {n: v for n, v in record["sums"].items() if not n.startswith("routing/agreement")}}
