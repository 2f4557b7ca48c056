"""Raw rows: what each kind of task reads, with the place where each row stands."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gspo.config import DatasetsTask, FunctionTask, JsonlTask, MultiTurnTask, ReasoningGymTask
from gspo.errors import BadInputError
from gspo.imports import describe, load_function

TaskSettings = JsonlTask | DatasetsTask | ReasoningGymTask | FunctionTask | MultiTurnTask


class Source(NamedTuple):
    """One row as it was read; `where` names it in errors (`file:line`)."""

    where: str
    columns: Mapping[str, Any]


def read_train(config: TaskSettings, seed: int) -> Iterable[Source]:
    """The rows to train on (and, unless they come apart, to hold some out of)."""
    if isinstance(config, JsonlTask):
        return read_jsonl(config.path, "task.path")
    if isinstance(config, DatasetsTask):
        from gspo.tasks.hub_datasets import read_dataset

        return read_dataset(config, config.split, "task.split")
    if isinstance(config, ReasoningGymTask):
        from gspo.tasks.reasoning_gym import generate

        return generate(config, seed)
    if isinstance(config, MultiTurnTask):
        from gspo.tasks.multi_turn import read_rows

        return read_rows(config)
    return call_function(config)


def read_held_out(config: TaskSettings) -> Iterable[Source] | None:
    """The rows to evaluate on where they come apart from the training rows, else None."""
    if isinstance(config, JsonlTask) and config.held_out_path is not None:
        return read_jsonl(config.held_out_path, "task.held_out_path")
    if isinstance(config, DatasetsTask) and config.held_out_split is not None:
        from gspo.tasks.hub_datasets import read_dataset

        return read_dataset(config, config.held_out_split, "task.held_out_split")
    return None


def read_jsonl(path: Path, setting: str) -> Iterator[Source]:
    """The objects of a JSONL file; blank lines are skipped. Raises BadInputError with `file:line`."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    where = f"{path}:{number}"
                    yield Source(where, _parse_object(raw, where, first=number == 1))
    except FileNotFoundError:
        raise BadInputError(f"{setting}: {path}: no such file; give a JSONL file") from None
    except OSError as error:
        raise BadInputError(f"{setting}: {path}: cannot be read ({error.strerror}); give a JSONL file") from None


def _parse_object(raw: bytes, where: str, *, first: bool) -> Mapping[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8-sig" if first else "utf-8"))
    except UnicodeDecodeError as error:
        raise BadInputError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start}); re-encode it") from None
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{where}: not valid JSON ({error}); each line must be one JSON object") from None
    if b"\\ud" in raw.lower() and not _is_text(value):
        raise BadInputError(f"{where}: half a surrogate pair (such as \\ud83d) is no text; repair or remove the line")
    if not isinstance(value, dict):
        raise BadInputError(f"{where}: found a JSON {type(value).__name__}; each line must be one JSON object")
    return value


def _is_text(value: object) -> bool:
    """Whether all strings in a JSON value can be written down; JSON's escapes can spell some that cannot."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def call_function(config: FunctionTask) -> list[Source]:
    """The rows that the user's function returns."""
    function = load_function(config.function, "task.function")
    call = functools.partial(function, **config.parameters)
    return as_sources(call, config.function, f"task.function = {config.function!r}", "task.parameters")


def as_sources(function: functools.partial[Any], name: str, what: str, parameters: str) -> list[Source]:
    """The rows that a function returns when called, each placed by `name`.

    `what` and `parameters` name the function and the setting of its parameters in errors. Raises BadInputError.
    """
    try:
        rows = list(function())
    except Exception as error:  # noqa: BLE001 (a stranger's function may raise anything)
        raise BadInputError(
            f"{what} failed ({describe(error)}); it is called with {parameters} "
            f"({', '.join(function.keywords) or 'none'}) and returns rows (dicts)"
        ) from None
    sources = []
    for index, row in enumerate(rows):
        where = f"{name} row {index}"
        if not isinstance(row, Mapping):
            raise BadInputError(f"{where}: found a {type(row).__name__}; rows must be dicts of columns")
        sources.append(Source(where, row))
    return sources
