"""What a resumed run may change, and what it may not."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from gspo.config import build_config
from gspo.errors import BadInputError
from gspo.reporting.run_folder import RunFolder
from gspo.training.beginning import begin
from gspo.training.checkpoint import TrainState

TASK = {"kind": "reasoning_gym", "name": "chain_sum", "held_out": 20}


def config(tmp_path: Path, **changes: object):
    base = {
        "model": {"path": "m"},
        "task": TASK,
        "run": {"dir": str(tmp_path), "name": "run", "seed": 3},
    }
    return build_config({**base, **changes})


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(config(tmp_path))
    (folder.checkpoints / "step-000002").mkdir()
    state = {"step": 2, "version": 8, "cursor": 16}
    (folder.checkpoints / "step-000002" / "trainer_state.json").write_text(json.dumps(state))
    return folder


def test_a_run_goes_on_from_its_last_checkpoint_and_is_held(run: RunFolder, tmp_path: Path) -> None:
    changed = config(tmp_path, optimizer={"learning_rate": 1e-5})
    with ExitStack() as opened:
        folder, checkpoint, state, changes = begin(changed, run.path, opened)
        assert (folder, checkpoint, state) == (run, run.checkpoints / "step-000002", TrainState(2, 8, 16))
        assert changes == []
        with ExitStack() as other, pytest.raises(BadInputError, match="another process is training in it"):
            begin(changed, run.path, other)
    with ExitStack() as opened:
        begin(changed, run.path, opened)


def test_the_file_that_a_run_was_begun_with_need_not_know_its_name(run: RunFolder, tmp_path: Path) -> None:
    with ExitStack() as opened:
        folder, *_ = begin(config(tmp_path, run={"seed": 3}), run.path, opened)
    assert folder == run


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": {"name": "other", "seed": 3}}, r"^run\.name = 'other': a resumed run stays in its folder"),
        ({"run": {"dir": "else", "name": "run", "seed": 3}}, r"^run\.dir = 'else': a resumed run stays in its folder"),
        ({"run": {"seed": 4}}, r"^run\.seed = 4: which questions are held out .* began with 3; leave it out"),
        ({"model": {"path": "n"}}, r"^model\.path = 'n': a resumed run goes on from its checkpoint"),
        ({"model": {"path": "m", "lora": {}}}, r"^model\.lora: .* which began without an adapter; leave it out"),
    ],
)
def test_what_a_run_cannot_change_is_refused(
    run: RunFolder, tmp_path: Path, changes: dict[str, dict[str, object]], message: str
) -> None:
    if "run" in changes:
        changes = {"run": {"dir": str(tmp_path), "name": "run", **changes["run"]}}
    with ExitStack() as opened, pytest.raises(BadInputError, match=message):
        begin(config(tmp_path, **changes), run.path, opened)


def test_another_rank_than_the_adapter_has_is_refused(tmp_path: Path) -> None:
    run = RunFolder.create(config(tmp_path, model={"path": "m", "lora": {"rank": 2}}))
    (run.checkpoints / "step-000001").mkdir()
    with ExitStack() as opened, pytest.raises(BadInputError, match=r"^model\.lora: .* which began with rank=2 "):
        begin(config(tmp_path, model={"path": "m", "lora": {"rank": 4}}), run.path, opened)


def test_a_changed_task_is_told_since_the_held_out_questions_may_be_known(run: RunFolder, tmp_path: Path) -> None:
    with ExitStack() as opened:
        *_, changes = begin(config(tmp_path, task={**TASK, "held_out": 40}), run.path, opened)
    assert len(changes) == 1
    assert "may have been trained on before" in changes[0]


def test_another_path_of_the_reference_is_told(tmp_path: Path, run: RunFolder) -> None:
    penalised = {"objective": {"kl_weight": 0.1}}
    run.write_config(config(tmp_path, **penalised))
    with ExitStack() as opened:
        *_, changes = begin(config(tmp_path, model={"path": "moved/m"}, **penalised), run.path, opened)
    assert [line.startswith("model.path: moved/m is taken for m, with which the run began") for line in changes] == [
        True
    ]


def test_before_the_first_checkpoint_all_but_the_place_may_change(tmp_path: Path) -> None:
    run = RunFolder.create(config(tmp_path))
    place = {"dir": str(tmp_path), "name": "run"}
    with ExitStack() as opened:
        begun = begin(config(tmp_path, run={**place, "seed": 9}, model={"path": "n"}), run.path, opened)
    assert begun == (run, None, TrainState(), [])
