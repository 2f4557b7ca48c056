"""A run's folder is made once, found again, and told from a model's."""

from pathlib import Path

import pytest

from gspo.config import Config, build_config
from gspo.errors import BadInputError
from gspo.reporting.run_folder import RunFolder


def config(tmp_path: Path, name: str | None = None) -> Config:
    settings = {"model": {"path": "m"}, "task": {"kind": "reasoning_gym", "name": "chain_sum"}}
    run = {"dir": str(tmp_path / "runs"), "seed": 7} | ({"name": name} if name else {})
    return build_config(settings | {"run": run})


def test_the_resolved_config_comes_back_equal(tmp_path: Path) -> None:
    original = config(tmp_path, "first")
    run = RunFolder.create(original)
    assert run.path == tmp_path / "runs" / "first"
    assert RunFolder.open(run.path).read_config() == original
    assert run.read_config({"training.steps": "5"}).training.steps == 5


def test_a_taken_name_is_refused_and_says_how_to_go_on(tmp_path: Path) -> None:
    RunFolder.create(config(tmp_path, "first"))
    with pytest.raises(BadInputError, match=r"run\.name: .*first exists; .*--resume .*first"):
        RunFolder.create(config(tmp_path, "first"))


def test_a_place_that_cannot_hold_runs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(BadInputError, match=r"run\.dir: .*runs is no folder that can be written to"):
        RunFolder.planned(config(tmp_path, "first"))


def test_a_name_that_another_run_took_meanwhile_is_refused(tmp_path: Path) -> None:
    planned = RunFolder.planned(config(tmp_path, "first"))
    RunFolder.create(config(tmp_path, "first"))
    with pytest.raises(BadInputError, match=r"run\.name: .*first exists; .*--resume .*first"):
        planned.make(config(tmp_path, "first"))


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    planned = RunFolder.planned(config(tmp_path, "first"))
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(BadInputError, match=r"run\.dir: .*first cannot be made \(Not a directory\); give another"):
        planned.make(config(tmp_path, "first"))


def test_a_planned_run_leaves_nothing_behind(tmp_path: Path) -> None:
    assert RunFolder.planned(config(tmp_path, "first")).path == tmp_path / "runs" / "first"
    assert not (tmp_path / "runs").exists()


def test_unnamed_runs_never_share_a_folder(tmp_path: Path) -> None:
    runs = [RunFolder.create(config(tmp_path), default_name="my config") for _ in range(3)]
    assert len({run.path for run in runs}) == 3
    assert all(run.path.name.startswith("my-config-") for run in runs)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"model_type": "llama"}'])
def test_a_folder_of_a_model_is_no_run(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "checkpoints").mkdir()
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert not RunFolder.is_run(tmp_path)
    with pytest.raises(BadInputError, match="not the folder of a run"):
        RunFolder.open(tmp_path)


def test_a_config_that_does_not_know_the_name_changes_nothing(tmp_path: Path) -> None:
    run = RunFolder.create(config(tmp_path, "first"))
    run.rollout_file(3).write_bytes(b"drawn under the same settings")
    run.change(config(tmp_path), 2)
    assert run.read_config() == config(tmp_path, "first")
    assert run.rollout_file(3).exists()


def test_rollouts_that_another_config_drew_go_and_the_name_stays(tmp_path: Path) -> None:
    run = RunFolder.create(config(tmp_path, "first"))
    for step in (2, 3):
        run.rollout_file(step).write_bytes(b"drawn under other settings")
    unnamed = config(tmp_path)
    longer = unnamed.model_copy(
        update={
            "training": unnamed.training.model_copy(update={"steps": 7}),
            "rollout": unnamed.rollout.model_copy(update={"temperature": 0.5}),
        }
    )
    run.change(longer, 2)
    changed = run.read_config()
    assert (changed.run.name, changed.training.steps) == ("first", 7)
    assert run.rollout_file(2).exists()
    assert not run.rollout_file(3).exists()


@pytest.mark.parametrize(
    ("section", "values"),
    [("training", {"steps": 7}), ("evaluation", {"every": 3}), ("checkpoint", {"every": 9})],
)
def test_rollouts_stay_where_only_the_length_or_what_is_shown_and_saved_changes(
    tmp_path: Path, section: str, values: dict[str, int]
) -> None:
    run = RunFolder.create(config(tmp_path, "first"))
    run.rollout_file(3).write_bytes(b"drawn just so")
    before = run.read_config()
    changed = before.model_copy(update={section: getattr(before, section).model_copy(update=values)})
    assert changed != before
    run.change(changed, 2)
    assert run.read_config() == changed
    assert run.rollout_file(3).exists()
