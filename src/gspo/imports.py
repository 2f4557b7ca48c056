"""Functions that a config names by import path."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from gspo.errors import BadInputError


def load_function(path: str, setting: str) -> Callable[..., Any]:
    """The function at `package.module:function`; the current folder counts as a place to import from.

    Raises BadInputError naming `setting` if the module does not import or has no such function.
    """
    module_name, _, attribute = path.partition(":")
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        # A console script, unlike `python -m`, does not look for modules where it is called.
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # noqa: BLE001 (a stranger's module may raise anything while it is imported)
        raise BadInputError(
            f"{setting} = {path!r}: importing {module_name} failed ({describe(error)}); "
            "give package.module:function, importable from the current folder or installed"
        ) from None
    for name in attribute.split("."):
        found = getattr(found, name, None)
    if not callable(found):
        raise BadInputError(f"{setting} = {path!r}: {module_name} has no function {attribute!r}; check the name")
    result: Callable[..., Any] = found
    return result


def describe(error: BaseException) -> str:
    """An error in one line: its type, what it says, and the line of the user's code that raised it."""
    text = " ".join(str(error).split())
    text = text if len(text) <= 300 else text[:297] + "..."
    lines = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen ")]
    raised = lines[-1] if lines and lines[-1].filename not in (__file__, importlib.__file__) else None
    place = "" if raised is None else f" at {os.path.basename(raised.filename)}:{raised.lineno}"
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"
