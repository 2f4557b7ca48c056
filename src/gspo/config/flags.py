"""Settings given as flags on the command line."""

from __future__ import annotations

from collections.abc import Sequence

from gspo.config.explain import nearest
from gspo.config.fields import setting_names
from gspo.errors import BadInputError


def split_overrides(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Takes `--section.key value` and `--section.key=value` out of the arguments; the last of a name wins.

    >>> split_overrides(["train", "a.toml", "--training.steps", "5", "--dry-run"])
    (['train', 'a.toml', '--dry-run'], {'training.steps': '5'})
    """
    words: list[str] = []
    overrides: dict[str, str] = {}
    rest = iter(argv)
    for word in rest:
        name, equals, value = word.partition("=")
        if not (name.startswith("--") and "." in name):
            words.append(word)
            continue
        if not equals:
            value = next(rest, "--")
            if value.startswith("--"):
                raise BadInputError(f"{name}: needs a value, as in {name} VALUE")
        overrides[name.removeprefix("--")] = value
    return words, overrides


def why_unknown(word: str) -> str:
    """What to say of an argument that the command does not know: the setting that was probably meant."""
    if not word.startswith("-"):
        return f"{word}: unexpected; see gspo --help"
    name = word.lstrip("-").partition("=")[0].replace("-", "_")
    meant = nearest(name, setting_names())
    return f"{word}: unknown flag; " + (f"did you mean --{meant}?" if meant else "see gspo --help")
