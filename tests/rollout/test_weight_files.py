"""Weights on disk for inference servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gspo.rollout import weight_files
from gspo.rollout.weight_files import write_weights


def test_tied_sliced_and_transposed_tensors_are_written_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "_FILE_BYTES", 100)
    whole = torch.randn(6, 4)
    tensors = {"a": whole, "tied": whole, "slice": whole[2:4], "turned": whole.T, "half": whole.bfloat16()}
    write_weights(iter(tensors.items()), tmp_path / "w")
    files = sorted((tmp_path / "w").iterdir())
    assert [file.name for file in files] == [f"model-0000{i}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 1
    read = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_a_write_that_breaks_off_leaves_no_folder_and_can_be_repeated(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.zeros(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_weights(broken(), tmp_path / "w")
    assert not (tmp_path / "w").exists()
    write_weights([("a", torch.ones(2))], tmp_path / "w")
    assert [path.name for path in tmp_path.iterdir()] == ["w"]
