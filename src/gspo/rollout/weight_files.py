"""Weights on a disk that inference servers read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

_FILE_BYTES = 4 << 30


def write_weights(named_tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Writes checkpoint-format tensors as safetensors files of about 4 GiB; `folder` appears when it is complete.

    No more than one file's tensors are in memory at a time.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for number, tensors in enumerate(_files(named_tensors), start=1):
        save_file(tensors, partial / f"model-{number:05}.safetensors", metadata={"format": "pt"})
    os.rename(partial, folder)


def _files(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named_tensors:
        # Copied: tied or sliced tensors share memory, which safetensors refuses.
        tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensors[name].nbytes
        if size >= _FILE_BYTES:
            yield tensors
            tensors, size = {}, 0
    if tensors:
        yield tensors
