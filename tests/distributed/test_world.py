"""The world: alone it does nothing, with others everything is a sum over all."""

import pytest
import torch

from gspo.distributed.world import World
from gspo.errors import BadInputError
from tests.distributed.processes import run_processes


def test_a_process_alone_is_a_whole_world():
    world = World.from_environment(environment={})
    assert (world.rank, world.size, world.is_main) == (0, 1, True)
    tensor = torch.tensor([1.0, 2.0])
    assert torch.equal(world.sum(tensor), tensor)
    assert world.gather([1, 2]) == [1, 2]
    assert world.broadcast("word") == "word"
    world.barrier()
    world.close()


def test_three_processes_sum_gather_and_hear_the_main_one():
    seen = run_processes("tests.distributed.world_cases:collectives", 3, seconds=90)
    assert [s["rank"] for s in seen] == [0, 1, 2]
    assert [s["main"] for s in seen] == [True, False, False]
    for rank, s in enumerate(seen):
        assert s["sum"] == [3.0, 3.0]
        assert s["own"] == [1.0, float(rank)]
        assert s["gathered"] == [[1, 0], [2, 0], [2, 1]]
        assert s["told"] == {"said by": 0}


def test_a_process_that_does_not_answer_is_given_up_after_the_timeout():
    said, seconds = run_processes("tests.distributed.world_cases:lose_the_other", 2, seconds=90)[0]
    assert said.startswith("another process of the job ended, or did not answer within distributed.timeout (")
    assert 2.5 < seconds < 9


def test_gradients_are_summed_and_those_that_nobody_has_stay_away():
    for found in run_processes("tests.distributed.world_cases:sum_some_gradients", 2, seconds=90):
        assert found == [[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], [3.0] * 4, 5.0, None]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE = 'two': must be a whole number"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK = 2 with WORLD_SIZE = 2: must be below it"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK = '-1': must be a whole number"),
        ({"WORLD_SIZE": "0"}, "RANK = 0 with WORLD_SIZE = 0"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE = 2 without MASTER_ADDR and MASTER_PORT"),
    ],
)
def test_damaged_launcher_variables_are_refused(variables, message):
    with pytest.raises(BadInputError, match=message):
        World.from_environment(environment=variables)


def test_one_gpu_for_all_processes_is_refused():
    with pytest.raises(BadInputError, match=r"model.device = 'cuda:0': .* use \"auto\" or \"cpu\""):
        World.from_environment(device="cuda:0", environment={"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"})


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(BadInputError, match=r"number 2 \(from 0\) on a machine with 2 GPU\(s\)"):
        World.from_environment(environment={"WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "2"})
