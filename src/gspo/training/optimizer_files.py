"""The optimizer's state on disk: one file of whole tensors, or for a sharded policy one file of rows a process.

Either way a tensor is the concatenation of the files' rows, so that any number of processes can go on from what any
other number has written, each reading its own rows alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gspo.distributed.sharding import rows
from gspo.distributed.world import World
from gspo.training.optimizer import STATE_KEYS, load_optimizer_tensors, optimizer_tensors

NAME = "trainer_optimizer"


def save_optimizer(
    optimizer: torch.optim.AdamW, names: Mapping[Tensor, str], folder: Path, world: World | None
) -> None:
    """Writes what this process holds; `world` is None where that is all of it."""
    part = "" if world is None else f"-{world.rank + 1:05}-of-{world.size:05}"
    tensors = {name: tensor.contiguous() for name, tensor in optimizer_tensors(optimizer, names).items()}
    save_file(tensors, folder / f"{NAME}{part}.safetensors")


def load_optimizer_files(optimizer: torch.optim.AdamW, names: Mapping[Tensor, str], folder: Path) -> None:
    """Puts back what `save_optimizer` wrote, by however many processes.

    Raises:
        OSError: a file is missing or damaged.
    """
    with ExitStack() as opened:
        try:
            files = [opened.enter_context(safe_open(path, framework="pt")) for path in _files(folder)]
            saved = set(files[0].keys())
            tensors = {
                f"{name}.{key}": _read(files, f"{name}.{key}", rows(parameter) if key != "step" else None)
                for parameter, name in names.items()
                for key in STATE_KEYS
                if f"{name}.{key}" in saved
            }
        except SafetensorError as error:
            raise OSError(str(error)) from None
        load_optimizer_tensors(optimizer, names, tensors)


def _files(folder: Path) -> list[Path]:
    found = sorted(folder.glob(f"{NAME}*.safetensors"))
    if not found:
        raise FileNotFoundError(f"no {NAME}*.safetensors is there")
    parts = re.search(r"-of-(\d+)$", found[0].stem)
    if (wanted := int(parts.group(1)) if parts else 1) != len(found):
        raise FileNotFoundError(f"{len(found)} of {wanted} files are there")
    return found


def _read(files: list[Any], name: str, wanted: slice | None) -> Tensor:
    """The wanted rows of a tensor whose rows are spread over the files, first to last; None for a scalar."""
    if wanted is None or not files[0].get_slice(name).get_shape():
        whole: Tensor = files[0].get_tensor(name)
        return whole
    pieces, start = [], 0
    for file in files:
        part = file.get_slice(name)
        count = part.get_shape()[0]
        low, high = max(wanted.start - start, 0), min(wanted.stop - start, count)
        if low < high:
            pieces.append(part[low:high])
        start += count
    if pieces:
        return torch.cat(pieces)
    empty: Tensor = files[0].get_slice(name)[0:0]
    return empty
