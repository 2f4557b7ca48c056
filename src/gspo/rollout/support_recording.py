"""What truncated sampling kept at each step, carried to the host without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool
from numpy.typing import NDArray
from torch import Tensor


class SupportRecorder:
    """Puts the kept ids of every step behind those of its rows.

    Their number is known from the transfer that fetches the drawn tokens; the ids follow while the next step is
    computed, and have arrived when that step's tokens have.
    """

    def __init__(self) -> None:
        self._arriving: tuple[Tensor, Sequence[int], Sequence[list[NDArray[np.int32]]]] | None = None

    def add(self, rows: Sequence[list[NDArray[np.int32]]], kept: Bool[Tensor, "B V"], counts: Sequence[int]) -> None:
        """Notes one step, after its tokens were fetched; row i keeps `counts[i]` ids, in ascending order."""
        self._settle()
        ids = torch.nonzero_static(kept, size=sum(counts))[:, 1].to(torch.int32)
        self._arriving = (ids.to("cpu", non_blocking=kept.is_cuda), counts, rows)

    def close(self) -> None:
        """Waits for the last step's ids."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._settle()

    def _settle(self) -> None:
        if self._arriving is None:
            return
        arrived, counts, rows = self._arriving
        ids = arrived.numpy().copy() if arrived.is_pinned() else arrived.numpy()
        for row, part in zip(rows, np.split(ids, np.cumsum(counts)[:-1]), strict=True):
            row.append(part)
        self._arriving = None
