"""The experts that an engine's forward passes chose, kept per response."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Integer
from torch import Tensor

from gspo.policy.routing import record_routing


class RouteRecorder:
    """Reads the last forward's experts row by row. A token's are joined over layers: C = the sum of their K."""

    def __init__(self, latest: Mapping[str, Tensor]) -> None:
        self._latest = latest

    def prompts(self, lengths: Sequence[int]) -> list[np.ndarray]:
        """Those of each prompt, [n, C], of a prefill that padded on the right."""
        rows = self._fetch(len(lengths))
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def steps(self, rows: int) -> list[np.ndarray]:
        """Those of each row's newest token, [1, C], whether or not its whole sequence was fed again."""
        return [row[-1:] for row in self._fetch(rows)]

    def routes(self, parts: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """By layer, the experts [n, K] of a response's fed tokens, from its prompt's and its steps' in order."""
        whole = np.concatenate(parts)
        widths = [indices.shape[1] for indices in self._latest.values()]
        cut = np.split(whole, np.cumsum(widths)[:-1], axis=1)
        dtypes = [np.uint8 if indices.dtype == torch.uint8 else np.int16 for indices in self._latest.values()]
        return {
            name: np.ascontiguousarray(part, dtype=dtype)
            for name, part, dtype in zip(self._latest, cut, dtypes, strict=True)
        }

    def _fetch(self, rows: int) -> Integer[np.ndarray, "rows n C"]:
        """All layers in one transfer from the device."""
        joined = torch.cat([indices.to(torch.int16) for indices in self._latest.values()], dim=1)
        return joined.view(rows, -1, joined.shape[1]).cpu().numpy()


@contextmanager
def recording(model: Any, wanted: bool) -> Iterator[RouteRecorder | None]:
    """Records the experts of every forward inside, if `wanted`; None else."""
    if not wanted:
        yield None
        return
    with record_routing(model) as latest:
        yield RouteRecorder(latest)
