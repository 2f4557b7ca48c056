"""Which folder or hub id a path stands for."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path

from gspo.errors import BadInputError

ADAPTER_CONFIG = "adapter_config.json"
"""What tells a saved adapter from a whole model."""


def adapter_chain(folder: str, base: str | None = None) -> tuple[str, list[Path]]:
    """The whole model that a folder stands for, and the saved adapters to merge into it, first to last.

    `base` is where the model lies that the adapter in `folder` belongs to, if not where that says.

    Raises:
        BadInputError: a base that is not found, or one given for a whole model.
    """
    adapters: list[Path] = []
    while _is_adapter(Path(folder)):
        adapters.insert(0, Path(folder))
        folder = _base_of(Path(folder)) if base is None else resolve_path(base)
        base = None
    if base is not None:
        raise BadInputError(f"model.path = {base!r}: {folder!r} is a whole model and belongs to no other; leave it out")
    return folder, adapters


def _is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def _base_of(folder: Path) -> str:
    """The model that a saved adapter belongs to: the one that it names, else the one that its run began from.

    The first is an absolute path, which a model that was moved leaves behind; the second is what the user wrote.
    """
    named: str = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
    of_run = _path_of_run(folder.resolve().parent.parent / "config.json")
    if _exists(named) or not _is_place(named):
        return resolve_path(named)
    if of_run is not None and _exists(of_run):
        return resolve_path(of_run)
    also = "" if of_run in (None, named) else f", and neither does {of_run!r}, from which its run began"
    raise BadInputError(
        f"model.path: the adapter {str(folder)!r} belongs to {named!r}, which does not exist{also}; say where it is "
        f"now (gspo eval and gspo export: --model.path FOLDER), or in {ADAPTER_CONFIG}, base_model_name_or_path"
    )


def _path_of_run(file: Path) -> str | None:
    """`model.path` in the config of a run, None where the file is none."""
    try:
        path = json.loads(file.read_bytes())["model"]["path"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return path if isinstance(path, str) else None


def resolve_path(path: str) -> str:
    """A model folder or hub id; for a run's folder, its last checkpoint.

    Raises:
        BadInputError: a folder that holds neither a model nor checkpoints, or one without weights.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        if _is_place(path):
            raise BadInputError(
                f"model.path: {path!r} does not exist{_meant(folder)}; give a folder or a hub id such as org/name"
            )
        return path
    # A run's folder has a config.json too: that of the run.
    checkpoints = [f for f in folder.glob("checkpoints/step-*") if _is_model(f)]
    if checkpoints:
        folder = max(checkpoints, key=lambda f: _step_of(f.name))
    elif not _is_model(folder):
        raise BadInputError(
            f"model.path: {path!r} has no config.json and no checkpoints; give a folder that from_pretrained loads"
        )
    if not any(folder.glob("*.safetensors")):
        raise BadInputError(
            f"model.path: {str(folder)!r} has no weights (*.safetensors); pickled weights (*.bin) are not read: "
            "save the model with save_pretrained(safe_serialization=True)"
        )
    return str(folder.resolve())


def _exists(path: str) -> bool:
    return Path(path).expanduser().exists()


def _is_place(path: str) -> bool:
    """Whether a path is one on this machine, and no hub id."""
    folder = Path(path).expanduser()
    return (
        path.startswith((".", "/", "~")) or path.count("/") > 1 or (len(folder.parts) == 2 and folder.parent.is_dir())
    )


def _meant(folder: Path) -> str:
    """Where the folder above exists, the name in it that was probably meant."""
    beside = [other.name for other in folder.parent.iterdir() if other.is_dir()] if folder.parent.is_dir() else []
    close = difflib.get_close_matches(folder.name, beside, n=1)
    return f"; did you mean {str(folder.parent / close[0])!r}?" if close else ""


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or (folder / ADAPTER_CONFIG).is_file()


def _step_of(name: str) -> tuple[int, str]:
    number = re.search(r"\d+$", name)
    return (int(number.group()) if number else -1, name)
