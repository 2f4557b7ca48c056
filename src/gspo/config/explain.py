"""Pydantic's findings in the words of somebody who wrote a config file."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence, Set
from typing import Any, get_args

from pydantic import ValidationError

from gspo.config.data import REWARD_NAMES
from gspo.config.fields import setting_fields, setting_names, task_kinds

Location = list[int | str]

_HINTS = {
    "run.name": "be letters, digits, _, . and -, the first neither . nor -",
    "rollout.servers": "be http://HOST:PORT",
    "task.function": "be package.module:function",
    "reward.functions.function": f"be {', '.join(REWARD_NAMES)} or package.module:function",
}
_WORDS = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
    "a valid boolean": "true or false",
    "a valid array": "a list",
    "a valid list": "a list",
    "an object": "a table of settings",
    "a valid dictionary": "a table of settings",
}


def explain(error: ValidationError, data: Mapping[str, Any], *, flags: Set[str], source: str) -> list[str]:
    """One line per wrong setting: its name, what was found, what is allowed, what to do.

    `data` is what was validated; settings in `flags` came from the command line, the others from `source`.
    """
    lines: dict[str, str] = {}
    for finding in error.errors():
        location = _location(finding["loc"])
        name = _dotted(location)
        given_as_flag = any(flag == name or flag.startswith(f"{name}.") for flag in flags)
        where = f"--{name}" if given_as_flag else f"{source}: {name}" if name else source
        if finding["type"] == "value_error":
            for line in finding["msg"].removeprefix("Value error, ").splitlines():
                lines[line] = f"{where}: {line}"
        elif name in lines:  # the members of a union each complain
            lines[name] += f", or {_allowed(finding, location)}"
        elif finding["type"] in ("union_tag_not_found", "union_tag_invalid"):
            lines[name] = f"{where}.kind: {_kind(finding)}"
        else:
            lines[name] = f"{where}: {_sentence(finding, location, data)}"
    return list(lines.values())


def nearest(name: str, allowed: Sequence[str]) -> str | None:
    """The setting or table that was probably meant: a close spelling in the same table, or the same name in another.

    >>> nearest("training.stps", ["training.steps"]), nearest("steps", ["training.steps"])
    ('training.steps', 'training.steps')
    """
    table, _, leaf = name.rpartition(".")
    beside = {other.rpartition(".")[2]: other for other in allowed if other.rpartition(".")[0] == table}
    leaves = {other.rpartition(".")[2]: other for other in reversed(allowed)}
    for words, cutoff in ((beside, 0.6), (leaves, 0.85)):
        close = difflib.get_close_matches(leaf, list(words), n=1, cutoff=cutoff)
        if close:
            return words[close[0]]
    close = difflib.get_close_matches(name, allowed, n=1, cutoff=0.85)  # the table misspelt
    return close[0] if close else None


def _location(parts: Sequence[int | str]) -> Location:
    """Where a finding belongs, without pydantic's names for the members of unions."""
    kinds = task_kinds()
    return [
        part
        for place, part in enumerate(parts)
        if not (place == 1 and parts[0] == "task" and part in kinds) and not _names_a_type(part)
    ]


def _names_a_type(part: int | str) -> bool:
    return isinstance(part, str) and (part in ("str", "constrained-str") or "[" in part)


def _dotted(location: Sequence[int | str]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _sentence(finding: Any, location: Location, data: Mapping[str, Any]) -> str:
    if finding["type"] == "missing":
        in_list = any(isinstance(part, int) for part in location)
        return "missing" if in_list else f"missing; give it in the file or as --{_dotted(location)} VALUE"
    if finding["type"] == "extra_forbidden":
        return _unknown(location, data)
    spelling = _spelling(finding, location)
    return f"found {_short(finding['input'])}, should {_allowed(finding, location)}{spelling}{_list_of_tables(finding)}"


def _list_of_tables(finding: Any) -> str:
    if finding["type"] != "list_type" or finding["loc"] != ("reward", "functions"):
        return ""
    return """: [[reward.functions]] in the file, or as a flag '[{function = "package.module:function"}]'"""


def _unknown(location: Location, data: Mapping[str, Any]) -> str:
    name = _without_places(location)
    kind = data["task"].get("kind") if isinstance(data["task"], dict) else None
    names = setting_names(kind if kind in task_kinds() else None)
    if name in setting_names():
        own = [other.removeprefix("task.") for other in names if other.startswith("task.")]
        return f'not a setting of task.kind = "{kind}", which has {", ".join(own)}'
    meant = nearest(name, names + sorted({other.rpartition(".")[0] for other in names}))
    return f"unknown setting; did you mean {meant}?" if meant else "unknown setting; docs/settings.md lists all"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _allowed(finding: Any, location: Location) -> str:
    name = _without_places(location)
    if finding["type"] == "string_pattern_mismatch":
        return _HINTS.get(name, f"match {finding['ctx']['pattern']}")
    message: str = finding["msg"].partition(" after validation")[0]
    _, _, rest = message.partition(" should ")
    for word, plain in _WORDS.items():
        if rest.startswith(f"be {word}"):
            return f"be {plain}"
    return rest or message[0].lower() + message[1:]


def _without_places(location: Location) -> str:
    return ".".join(part for part in location if isinstance(part, str))


def _spelling(finding: Any, location: Location) -> str:
    """For one of a few words: which of them was probably meant."""
    name = _without_places(location)
    if finding["type"] == "literal_error" and isinstance(finding["input"], str):
        words = [word for other, field, _ in setting_fields() if other == name for word in _words(field.annotation)]
    elif finding["type"] == "string_pattern_mismatch" and name == "reward.functions.function":
        words = list(REWARD_NAMES)
    else:
        return ""
    close = difflib.get_close_matches(finding["input"], words, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def _words(annotation: Any) -> list[str]:
    if isinstance(annotation, str):
        return [annotation]
    return [word for argument in get_args(annotation) for word in _words(argument)]


def _kind(finding: Any) -> str:
    kinds = task_kinds()
    if finding["type"] == "union_tag_not_found":
        return f"missing; give one of {', '.join(kinds)} in the file or as --task.kind VALUE"
    tag = str(finding["ctx"]["tag"])
    close = difflib.get_close_matches(tag, kinds, n=1, cutoff=0.5)
    meant = f"; did you mean {close[0]!r}?" if close else ""
    return f"found {tag!r}, should be one of {', '.join(kinds)}{meant}"
