"""Servers that one process talks to for several."""

from tests.distributed.processes import run_processes


def test_the_main_process_draws_for_all_and_passes_weights_on_once():
    first, second = run_processes("tests.distributed.relay_cases:relayed", 2, seconds=90)
    assert first["drawn"] == [[0, 0], [2, 0]]
    assert second["drawn"] == [[1, 0]]
    assert first["asked"] == [[0, 2, 1], 7]
    assert (first["tensors"], second["tensors"]) == (["w"], ["w"]), "making them takes all processes"
