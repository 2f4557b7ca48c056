"""Hugging Face datasets, by hub id, folder or file. Nobody else imports `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gspo.config import DatasetsTask
from gspo.errors import BadInputError
from gspo.imports import describe
from gspo.tasks.sources import Source

_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}


def read_dataset(config: DatasetsTask, split: str, setting: str) -> Iterator[Source]:
    """The rows of one split; `setting` names where the split was asked for.

    Raises BadInputError if the dataset cannot be loaded, lacks the split or the prompt column.
    """
    try:
        import datasets
    except ImportError:
        raise BadInputError('task.kind = "datasets" needs the extra `datasets`: pip install "gspo[datasets]"') from None
    try:
        dataset = _load(datasets, config, split)
    except Exception as error:  # noqa: BLE001 (builders raise many kinds of errors)
        raise BadInputError(
            f"task.name = {config.name!r}, {setting} = {split!r}: cannot be loaded ({describe(error)}); "
            "give a hub id, a folder or a file, and a split of it"
        ) from None
    for index, row in enumerate(dataset):
        yield Source(f"{config.name}[{split}] row {index}", row)


def _load(datasets: Any, config: DatasetsTask, split: str) -> Any:
    path = Path(config.name)
    if (path / "dataset_dict.json").is_file():
        saved = datasets.load_from_disk(config.name)
        if split not in saved:
            raise ValueError(f"its splits are {', '.join(saved)}")
        return saved[split]
    if (path / "state.json").is_file():
        if split != "train":
            raise ValueError("a folder with a single saved dataset has the split train alone")
        return datasets.load_from_disk(config.name)
    if path.is_file():
        if path.suffix not in _BUILDERS:
            raise ValueError(f"a file must end in one of {', '.join(_BUILDERS)}")
        return datasets.load_dataset(_BUILDERS[path.suffix], data_files={"train": config.name}, split=split)
    return datasets.load_dataset(config.name, config.subset, split=split)
