from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from gspo.config import DatasetsTask
from gspo.errors import BadInputError
from gspo.tasks.rows import Rows, load_rows

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


@pytest.fixture
def table() -> Any:
    return datasets.Dataset.from_dict(
        {"question": [f"q{i}" for i in range(6)], "answer": list(range(6)), "tags": [["a", "b"]] * 6}
    )


def load(name: Path | str, **settings: Any) -> Rows:
    values = {"held_out": 2, "prompt_column": "question", **settings}
    with warnings.catch_warnings():
        # The library's own readers leave files to the garbage collector.
        warnings.simplefilter("ignore", ResourceWarning)
        return load_rows(DatasetsTask(kind="datasets", name=str(name), **values), seed=0)


def check(rows: Rows) -> None:
    assert {row.content for row in (*rows.train, *rows.held_out)} == {f"q{i}" for i in range(6)}
    assert len(rows.held_out) == 2
    assert all(row.columns["answer"] == int(str(row.content)[1:]) for row in rows.train)


def test_files(table: Any, tmp_path: Path) -> None:
    table.to_parquet(tmp_path / "data.parquet")
    table.to_json(tmp_path / "data.jsonl")
    rows = load(tmp_path / "data.parquet")
    check(rows)
    assert rows.train[0].columns["tags"] == ["a", "b"]
    assert {row.where for row in rows.train} < {f"{tmp_path}/data.parquet[train] row {i}" for i in range(6)}
    check(load(tmp_path / "data.jsonl"))


def test_folder_of_files(table: Any, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    table.to_parquet(folder / "train.parquet")
    table.select([1, 2]).to_parquet(folder / "test.parquet")
    check(load(folder))
    apart = load(folder, held_out_split="test")
    assert [row.content for row in apart.held_out] == ["q1", "q2"]
    assert [row.content for row in apart.train] == ["q0", "q3", "q4", "q5"]
    assert apart.overlapping == 2


def test_saved_datasets(table: Any, tmp_path: Path) -> None:
    table.save_to_disk(tmp_path / "one")
    check(load(tmp_path / "one"))
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(tmp_path / "several")
    check(load(tmp_path / "several"))
    assert len(load(tmp_path / "several", held_out_split="test").train) == 5
    with pytest.raises(BadInputError, match=r"task\.held_out_split = 'dev': .*its splits are train, test"):
        load(tmp_path / "several", held_out_split="dev")
    with pytest.raises(BadInputError, match=r"task\.split = 'test': .*has the split train alone"):
        load(tmp_path / "one", split="test")


def test_bad_input(table: Any, tmp_path: Path) -> None:
    table.to_parquet(tmp_path / "data.parquet")
    (tmp_path / "data.txt").write_text("q")
    for name, settings, message in [
        (
            tmp_path / "data.parquet",
            {"prompt_column": "prompt"},
            "no column 'prompt'; the columns are question",
        ),
        (tmp_path / "data.parquet", {"split": "validation"}, r"task\.split = 'validation': cannot be loaded"),
        (tmp_path / "data.txt", {}, r"a file must end in one of \.json"),
        ("no/such-dataset", {}, r"task\.name = 'no/such-dataset'.*cannot be loaded"),
    ]:
        with pytest.raises(BadInputError, match=message) as caught:
            load(name, **settings)
        assert "\n" not in str(caught.value)
