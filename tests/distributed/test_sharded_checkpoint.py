"""Weights and optimizer go on bit by bit on any number of processes, and no process but the main one holds them all."""

import shutil

import pytest

from gspo.distributed.world import World
from gspo.errors import BadInputError
from gspo.training.checkpoint import load_optimizer
from tests.distributed.checkpoint_cases import CASES, everything, resumed, save_large, start, written
from tests.distributed.processes import free_port, run_processes
from tests.policy.tiny import save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    for family in {family for family, _ in CASES.values()}:
        save_tiny(folder / family, family)
    save_large(folder / "large")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "llama_tied" / file, folder / "large" / file)
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    return {case: written(folder, case, "one", World()) for case in CASES}


@pytest.fixture(scope="module")
def figures(folder, alone):  # noqa: ARG001 - the processes go on from what it has written
    name = f"{everything.__module__}:{everything.__name__}"
    with pytest.MonkeyPatch.context() as patch:
        # The C library would keep freed memory for itself, and count it as the process's.
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "100000")
        return run_processes(name, 3, str(folder), str(free_port()), seconds=400)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("moved", ["1 to 2", "2 to 2", "2 to 3"])
def test_a_run_goes_on_with_the_same_bits_on_another_number_of_processes(figures, alone, case, moved):
    found = [process[f"{moved}, {case}"] for process in figures if f"{moved}, {case}" in process]
    assert len(found) == int(moved[-1])
    expected = alone[case] if moved[0] == "1" else figures[0][f"2, {case}"]
    for digests, later in found:
        assert digests == expected
        assert later < 1e-6


@pytest.mark.parametrize("case", CASES)
def test_one_process_goes_on_from_what_two_have_written(figures, folder, case):
    digests, later = resumed(folder, case, "two", World())
    assert digests == figures[0][f"2, {case}"] == figures[1][f"2, {case}"]
    assert later < 1e-6


def test_each_process_writes_its_own_rows_and_nothing_is_pickled(figures, folder):
    assert figures
    files = {path.name for path in (folder / "two" / "tied" / "checkpoints" / "step-000002").iterdir()}
    assert {f"trainer_optimizer-0000{n}-of-00002.safetensors" for n in (1, 2)} <= files
    assert "trainer_optimizer.safetensors" not in files
    assert all(name.endswith((".safetensors", ".json", ".jinja", ".txt")) for name in files)


def test_a_lost_part_of_the_optimizer_is_named(figures, folder, tmp_path):
    assert figures
    shutil.copytree(folder / "two" / "tied", tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"
    (checkpoint / "trainer_optimizer-00002-of-00002.safetensors").unlink()
    policy, learner = start(folder, "tied", World(), resume=checkpoint)
    with pytest.raises(BadInputError, match="1 of 2 files are there"):
        load_optimizer(checkpoint, policy, learner, 2)


def test_only_the_main_process_ever_holds_a_whole_copy(figures):
    main, other = figures[0]["memory"], figures[1]["memory"]
    assert main["whole"] == other["whole"] > 200e6
    assert main["kept"] + other["kept"] == main["whole"]
    assert other["peak"] < 0.8 * other["whole"]
    assert main["peak"] > main["whole"]
