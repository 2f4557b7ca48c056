"""A key-value cache in which rows of different lengths decode side by side, come and go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer


class _Grid:
    """Where the rows lie, the same in every layer: row r occupies columns `starts[r]` up to `column`.

    All rows end at the same column, where the next token is written, so that a decode step writes one column
    and reads one slice; columns before a row's start are zero and masked.
    """

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.column = 0
        self.capacity = 0

    @property
    def first(self) -> int:
        """The first column that any row needs."""
        return min(self.starts, default=self.column)

    @property
    def length(self) -> int:
        """Columns in use."""
        return self.column - self.first


class _AlignedLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, [row, head, column, dim], allocated ahead and written in place.

    With a sliding window all columns are kept and the window's slice is returned: a token is one column, so
    that distance in columns is distance in positions.
    """

    def __init__(self, grid: _Grid, window: int | None) -> None:
        super().__init__()
        self.grid = grid
        self.window = window
        self.is_sliding = window is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("rows enter through AlignedCache.admit")

    def _past(self) -> int:
        return self.grid.length if self.window is None else min(self.grid.length, self.window - 1)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Writes one token per row, [row, head, 1, dim], and returns what it may look at."""
        rows, column = len(self.grid.starts), self.grid.column
        self.keys[:rows, :, column] = key_states[:, :, 0]
        self.values[:rows, :, column] = value_states[:, :, 0]
        seen = slice(column - self._past(), column + 1)
        return self.keys[:rows, :, seen], self.values[:rows, :, seen]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._past() + query_length, self.grid.length - self._past()

    def get_seq_length(self) -> int:
        return self.grid.length

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


class PromptCache(Cache):  # type: ignore[misc]
    """Collects the keys and values of a forward over right-padded prompts, whole even under a sliding window."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[DynamicLayer() for _ in range(layers)])

    def prompt(self, row: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Per layer, the keys and values [1, head, length, dim] of one prompt."""
        return [(x.keys[row : row + 1, :, :length], x.values[row : row + 1, :, :length]) for x in self.layers]


class AlignedCache(Cache):  # type: ignore[misc]
    """The cache of the rows that are being decoded (see `_Grid` for their arrangement)."""

    def __init__(self, windows: Sequence[int | None], rows: int, response: int) -> None:
        """`rows` at a time at most, with up to `response` tokens after their prompts."""
        self.grid = _Grid()
        self.max_rows = rows
        self.response = response
        super().__init__(layers=[_AlignedLayer(self.grid, window) for window in windows])

    def admit(self, prompt: list[tuple[Tensor, Tensor]], count: int) -> None:
        """Appends `count` rows that start as copies of a prefilled prompt."""
        grid = self.grid
        length = prompt[0][0].shape[2]
        if not grid.starts:
            grid.column = length
        if length > grid.column or grid.column >= grid.capacity:
            self._move(prompt, column=max(length, grid.length))
        begin, end = len(grid.starts), len(grid.starts) + count
        start = grid.column - length
        for layer, pair in zip(self.layers, prompt, strict=True):
            for buffer, states in zip((layer.keys, layer.values), pair, strict=True):
                buffer[begin:end, :, :start] = 0
                buffer[begin:end, :, start : grid.column] = states
        grid.starts += [start] * count

    def keep(self, rows: Sequence[int]) -> None:
        """Row i becomes what row `rows[i]` was; a row may only move to a place whose row leaves."""
        column = self.grid.column
        for to, source in enumerate(rows):
            if to != source:
                for layer in self.layers:
                    layer.keys[to, :, :column] = layer.keys[source, :, :column]
                    layer.values[to, :, :column] = layer.values[source, :, :column]
        self.grid.starts = [self.grid.starts[row] for row in rows]

    def reserve(self) -> None:
        """Makes room for the column that the next forward writes."""
        if self.grid.column >= self.grid.capacity:
            states = [(layer.keys, layer.values) for layer in self.layers]
            self._move(states, column=self.grid.length)

    def advance(self) -> None:
        """Counts the column that the last forward wrote."""
        self.grid.column += 1

    def _move(self, like: list[tuple[Tensor, Tensor]], column: int) -> None:
        """New buffers, larger by half or by a response, in which the rows end at `column`."""
        grid = self.grid
        shift, rows = column - grid.column, len(grid.starts)
        old = slice(grid.first, grid.column)
        new = slice(grid.first + shift, column)
        capacity = column + min(self.response, max(64, column // 2))
        for layer, pair in zip(self.layers, like, strict=True):
            for name, states in zip(("keys", "values"), pair, strict=True):
                heads, dim = states.shape[1], states.shape[3]
                buffer = states.new_empty(self.max_rows, heads, capacity, dim)
                if rows:
                    buffer[:rows, :, : new.start] = 0
                    buffer[:rows, :, new] = getattr(layer, name)[:rows, :, old]
                setattr(layer, name, buffer)
            layer.is_initialized = True
        grid.starts = [start + shift for start in grid.starts]
        grid.column, grid.capacity = column, capacity

    def padding_mask(self, device: torch.device) -> Tensor | None:
        """[row, columns in use + 1], False before a row's start; None where no row has padding."""
        first, width = self.grid.first, self.grid.length + 1
        if all(start == first for start in self.grid.starts):
            return None
        starts = torch.tensor(self.grid.starts, device=device)
        return torch.arange(first, first + width, device=device) >= starts[:, None]

    def positions(self, device: torch.device) -> Tensor:
        """Position of each row's next token, [row, 1]."""
        return self.grid.column - torch.tensor(self.grid.starts, device=device)[:, None]
