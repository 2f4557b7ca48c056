"""Two processes with a slice of the policy each make the updates, exports and responses of one that has all of it."""

import pytest

from gspo.distributed.world import World
from gspo.errors import BadInputError
from gspo.policy.load import load_policy
from tests.distributed.processes import run_processes
from tests.distributed.sharding_cases import CASES, IDLE, LAYERS_IDLE, STEPS
from tests.policy.tiny import save_tiny


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """By process and case."""
    folder = tmp_path_factory.mktemp("sharding")
    for family in {family for family, _ in CASES.values()}:
        save_tiny(folder / family, family)
    return run_processes("tests.distributed.sharding_cases:everything", 2, str(folder), seconds=400)


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_weights_are_those_of_one_process(figures, case):
    for found in (process[case] for process in figures):
        assert found["sharded"]
        assert found["units"] == 3  # two layers and the root
        assert found["gradient"] < 1e-6
        assert len(found["norms"]) == STEPS
        for expected, norm in found["norms"]:
            assert norm == pytest.approx(expected, rel=1e-6)
        assert found["moved"] > 1e-3
        assert found["weights"] < 2e-6
        assert found.get("reference", 0.0) < 1e-6


@pytest.mark.parametrize("case", CASES)
def test_the_norm_is_the_same_number_on_every_process(figures, case):
    first, second = (process[case]["norms"] for process in figures)
    assert [norm for _, norm in first] == [norm for _, norm in second]


@pytest.mark.parametrize("case", CASES)
def test_the_export_has_the_same_bits_and_so_has_what_was_saved(figures, case):
    for found in (process[case] for process in figures):
        assert found["exported"]
        assert found["saved"]
        assert found["idle"]


def test_each_process_samples_for_itself_from_gathered_weights(figures):
    for process in figures:
        sampled = [found for found in process.values() if "same responses" in found]
        assert len(sampled) == 4
        for found in sampled:
            assert found["same responses"]
            assert found["log-probs"] < 1e-5
            assert found["scores after"] < 1e-5
            assert found["idle after"]


def test_a_matrix_that_nobody_uses_does_not_decay(tmp_path):
    """One in the root and one in a layer; a matrix that one process alone uses moves as it does with one process."""
    save_tiny(tmp_path / "llama")
    for found in run_processes("tests.distributed.sharding_cases:unused", 2, str(tmp_path), seconds=200):
        assert found["left alone"] == found["without state"] == sorted([IDLE, LAYERS_IDLE])
        assert found["weights"] < 1e-5


def test_a_pass_for_the_sake_of_others_uses_no_weight(tmp_path):
    """Else experts that its one token visits would decay, which no response visits."""
    save_tiny(tmp_path / "llama")
    for found in run_processes("tests.distributed.sharding_cases:stood_in", 2, str(tmp_path), seconds=200):
        assert found == {"alone": True, "both": True}


def test_a_compiled_model_is_not_sharded(tmp_path):
    with pytest.raises(BadInputError, match=r"model\.compile = true with distributed\.shard = \"full\""):
        load_policy(save_tiny(tmp_path / "model"), device="cpu", compile=True, world=World(0, 2), shard="full")
