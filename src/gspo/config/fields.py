"""The names of all settings, for error messages, flags and the page that documents them."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gspo.config.schema import Config


@functools.cache
def setting_fields() -> tuple[tuple[str, FieldInfo, type[BaseModel]], ...]:
    """Every setting as (dotted name, field, table that holds it), in the order of the file.

    A name that several kinds of tasks have stands once for each.
    """
    return tuple(_walk(Config, ""))


def setting_names(task_kind: str | None = None) -> list[str]:
    """The dotted names, each once; with `task_kind` without those of other kinds of tasks."""
    kept = [
        name
        for name, _, table in setting_fields()
        if task_kind is None or not name.startswith("task.") or task_kind in _kinds(table)
    ]
    return list(dict.fromkeys(kept))


def task_kinds() -> list[str]:
    """What `task.kind` can be."""
    return [kind for section in sections(Config.model_fields["task"].annotation) for kind in _kinds(section)]


def takes_text(name: str) -> bool:
    """Whether a setting holds text (a name, a path, a choice), so that `123` on the command line is text too."""
    found = [_plain_types(field.annotation) for other, field, _ in setting_fields() if other == name]
    return bool(found) and not any(kinds & {int, float, bool, dict} for kinds in found)


def sections(annotation: Any) -> list[type[BaseModel]]:
    """The tables in a type: itself, or the members of a union or list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections(argument)]


def is_table_list(annotation: Any) -> bool:
    """Whether a setting is a list of tables (`[[reward.functions]]`)."""
    return get_origin(annotation) is list and bool(sections(annotation))


def _kinds(table: type[BaseModel]) -> tuple[str, ...]:
    field = table.model_fields.get("kind")
    return get_args(field.annotation) if field is not None else ()


def _walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo, type[BaseModel]]]:
    for name, field in model.model_fields.items():
        nested = sections(field.annotation)
        if not nested or is_table_list(field.annotation):
            yield prefix + name, field, model
        for section in nested:
            yield from _walk(section, f"{prefix}{name}.")


def _plain_types(annotation: Any) -> set[type]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _plain_types(get_args(annotation)[0])
    if origin is Literal:
        return {type(value) for value in get_args(annotation)}
    if origin in (Union, types.UnionType, list, tuple):
        return set().union(*(_plain_types(argument) for argument in get_args(annotation)))
    return {origin or annotation}
