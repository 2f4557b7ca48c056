"""Writes the pages that come from the code: `python docs/generate.py`. A test says when it is due."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gspo.config import Config
from gspo.config.fields import is_table_list, sections
from gspo.reporting.metrics import METRICS

_HEAD = "<!-- Made by `python docs/generate.py`; change the source, not this page. -->\n\n"

_SETTINGS_INTRO = """# Settings

A run is described by one TOML file. A setting is what the file says, unless a flag of the same name says otherwise
(`--training.steps 50`, `--task.parameters.max_terms 4`, `--rollout.stop '["\\n"]'`), and its default where neither
does. All settings are checked before a model loads; the resolved ones lie in the run's `config.json`.
"""

_METRICS_INTRO = """# Metrics

Every line of a run's `metrics.jsonl` is one step: `step`, each metric under its name, and `sums`, which holds the sum
and the denominator of each metric that is a quotient. To join steps, add sums and denominators, then divide:
`gspo.reporting.metrics.from_record` reads a line back into `Ratio`s that add exactly. A metric without anything to
count is `null`, never NaN; where a sum itself is not finite, `sums` spells it (`"nan"`, `"inf"`).

"Kept" rollouts are those that could be sampled and scored. `{a,b}` stands for one metric each, `<name>` for any
value. The same names go to the trackers. Evaluations have a file of their own, `evaluations.jsonl`, with intervals
and counts per prompt; the trackers get the figures under `evaluation/`. What differs between machines (seconds per
stage, tokens per second, peak memory) is in `timings.jsonl`.

Intervals are 95 %, over prompts, however many responses stand behind each: 8 wrong responses to one prompt are one
piece of evidence. Where each prompt came out right or wrong they are exact (Clopper and Pearson): 0 of 50 is
[0, 0.071]. Shares of several responses (pass@k, accuracy over samples) are bootstrapped over prompts; where all
prompts have the same share, the interval is the exact one of as many rights and wrongs, rounded outward, since their
spread then says nothing.

| metric | meaning |
| --- | --- |
"""


def metrics_page() -> str:
    """`docs/metrics.md`, from the list that the recorder accepts."""
    rows = "".join(f"| `{name}` | {_cell(text)} |\n" for name, text in METRICS.items())
    return _HEAD + _METRICS_INTRO + rows


def settings_page() -> str:
    """`docs/settings.md`, from the fields of the config."""
    return _HEAD + _SETTINGS_INTRO + "".join(_tables(Config, ""))


def _tables(model: type[BaseModel], path: str) -> list[str]:
    pages = []
    for name, field in model.model_fields.items():
        for section in sections(field.annotation):
            inner = f"{path}{name}"
            title = f"[[{inner}]]" if is_table_list(field.annotation) else f"[{inner}]"
            pages += [_table(section, title), *_tables(section, f"{inner}.")]
    return pages


def _table(section: type[BaseModel], title: str) -> str:
    kind = section.model_fields.get("kind")
    kind_line = f', `kind = "{get_args(kind.annotation)[0]}"`' if kind is not None else ""
    rows = [_row(name, field) for name, field in section.model_fields.items() if name != "kind"]
    head = "| setting | type | default | meaning |\n| --- | --- | --- | --- |\n"
    about = " ".join(inspect.cleandoc(section.__doc__ or "").split())
    plain = [row for row in rows if row]
    return f"\n## `{title}`{kind_line}\n\n{about}\n\n" + (head + "".join(plain) if plain else "")


def _row(name: str, field: FieldInfo) -> str:
    if sections(field.annotation) and not is_table_list(field.annotation):
        return ""
    if field.is_required():
        default = "required"
    else:
        value = field.get_default(call_default_factory=True)
        default = "none" if value is None else f"`{_toml(value)}`"
    kind = " ".join([_type(field.annotation), *_bounds(field)])
    return f"| `{name}` | {_cell(kind)} | {default} | {_cell(field.description or '')} |\n"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return "{}"
    return str(value) if isinstance(value, int | float) else f'"{value}"'


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{_toml(value)}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_type(argument) for argument in arguments if argument is not NoneType)
    if origin in (list, tuple):
        return "list of tables" if sections(annotation) else f"list of {_type(arguments[0])}"
    plain = {str: "text", Path: "path", int: "whole number", float: "number", bool: "true or false", dict: "table"}
    return plain[origin or annotation]


def _bounds(field: FieldInfo) -> list[str]:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    return [
        f"{sign} {getattr(rule, name):g}"
        for rule in field.metadata
        for name, sign in signs.items()
        if getattr(rule, name, None) is not None
    ]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PAGES = {"metrics.md": metrics_page, "settings.md": settings_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (Path(__file__).parent / name).write_text(page(), encoding="utf-8")
