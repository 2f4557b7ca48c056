"""From a file and flags to a `Config`, or to errors that say what to do."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gspo.config.explain import explain
from gspo.config.fields import takes_text
from gspo.config.schema import Config
from gspo.errors import BadInputError


def load_config(path: Path | str, overrides: Mapping[str, str] | None = None) -> Config:
    """Reads a TOML file, applies `section.key -> text` overrides and validates the whole.

    Raises BadInputError, one line per wrong setting.
    """
    return build_config(read_settings(Path(path)), overrides, source=str(path))


def read_settings(path: Path) -> dict[str, Any]:
    """The tables of a TOML file as they are. Raises BadInputError where it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise BadInputError(f"{path}: no such file; give the path of a TOML config") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{path}: cannot be read ({error}); give the path of a TOML config") from None
    except tomllib.TOMLDecodeError as error:
        raise BadInputError(f"{path}: not valid TOML: {error}") from None


def build_config(
    data: Mapping[str, Any], overrides: Mapping[str, str] | None = None, *, source: str = "config"
) -> Config:
    """Validates nested settings, `overrides` (see `load_config`) put over them.

    A number is not taken for text nor text for a number. Raises BadInputError, one line per wrong setting.
    """
    merged: dict[str, Any] = {"model": {}, "task": {}} | json.loads(json.dumps(dict(data), default=str))
    for name, text in (overrides or {}).items():
        _set(merged, name.split("."), _value_of(name, text))
    try:
        return Config.model_validate_json(json.dumps(merged), strict=True)
    except ValidationError as error:
        lines = explain(error, merged, flags=set(overrides or {}), source=source)
        raise BadInputError("\n".join(lines)) from None


def _set(data: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    for key in keys[:-1]:
        if data.get(key) is None:
            data[key] = {}
        data = data[key]
        if not isinstance(data, dict):
            raise BadInputError(f"--{'.'.join(keys)}: {key} is not a table of settings; set {key} as a whole")
    data[keys[-1]] = value


def _value_of(name: str, text: str) -> Any:
    """A flag's text as TOML where it is TOML (numbers, lists, booleans), else as it is."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed["value"]
    if len(parsed) > 1 or (takes_text(name) and not isinstance(value, str | list)):
        return text
    return value
