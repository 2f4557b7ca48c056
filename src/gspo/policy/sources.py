"""Which folder or hub id a path stands for."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path

from gspo.errors import BadInputError

ADAPTER_CONFIG = "adapter_config.json"
"""What tells a saved adapter from a whole model."""


def adapter_chain(folder: str) -> tuple[str, list[Path]]:
    """The whole model that a folder stands for, and the saved adapters to merge into it, first to last."""
    adapters: list[Path] = []
    while (Path(folder) / ADAPTER_CONFIG).is_file() and not (Path(folder) / "config.json").is_file():
        adapters.insert(0, Path(folder))
        folder = resolve_path(base_of(Path(folder)))
    return folder, adapters


def base_of(folder: Path) -> str:
    """The model that a saved adapter belongs to, as the adapter's config names it."""
    base: str = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
    return base


def resolve_path(path: str) -> str:
    """A model folder or hub id; for a run's folder, its last checkpoint.

    Raises:
        BadInputError: a folder that holds neither a model nor checkpoints, or one without weights.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        if (
            path.startswith((".", "/", "~"))
            or path.count("/") > 1
            or (len(folder.parts) == 2 and folder.parent.is_dir())
        ):
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
