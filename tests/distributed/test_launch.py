"""How the processes of a job agree on which of them failed first."""

import pytest
import torch

from gspo.cli import main
from gspo.distributed.launch import is_first_failure, is_one_of_many
from gspo.distributed.world import World
from gspo.errors import BadInputError
from gspo.training.engine import check_engine
from tests.training.test_learner import settings


@pytest.fixture(autouse=True)
def one_of_many(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


@pytest.fixture
def endings(monkeypatch):
    """The statuses that the process would have ended with."""
    found = []

    def end(status):
        found.append(status)
        raise SystemExit(status)

    monkeypatch.setattr("os._exit", end)
    return found


def test_the_first_failure_is_counted_by_the_launcher(monkeypatch):
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    assert [is_first_failure() for _ in range(3)] == [True, False, False]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert is_first_failure()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not is_one_of_many()
    assert is_first_failure()


def test_without_a_launcher_to_ask_every_process_speaks():
    assert is_one_of_many()
    assert is_first_failure()
    assert is_first_failure()


def test_a_failed_command_ends_the_process_with_its_status(endings, capsys):
    with pytest.raises(SystemExit):
        main(["train", "missing.toml"])
    assert endings == [2]
    assert capsys.readouterr().err.startswith("gspo: missing.toml: no such file")


def test_a_bug_is_shown_with_its_traceback(endings, capsys, monkeypatch):
    monkeypatch.setattr("gspo.cli._dispatch", lambda _: 1 // 0)
    with pytest.raises(SystemExit):
        main(["train", "x.toml"])
    assert endings == [1]
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["eval", "model"], ["audit", "run"], ["export", "run", "folder"]])
def test_other_commands_run_in_one_process(words, endings, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert endings == [2]
    line = f"gspo: gspo {words[0]} runs in one process; start it without torchrun (WORLD_SIZE is set)\n"
    assert capsys.readouterr().err == line


def test_vllm_inside_of_several_processes_is_refused():
    config = settings(rollout={"engine": "vllm"})
    cpu = torch.device("cpu")
    check_engine(config, cpu, World())
    with pytest.raises(BadInputError, match=r'rollout.engine = "vllm" with 2 processes'):
        check_engine(config, cpu, World(0, 2))
