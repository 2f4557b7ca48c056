"""Which blocks of the attention matrix exist for a layout: pure data, no model.

A token sees its prompt and the part of its own response before it. So the matrix falls into causal blocks (each
prompt, each response) and rectangles (a prompt's responses against the prompt); everything else is never computed.
Long causal blocks are cut into strips of rows: a square at the diagonal, and a rectangle of all keys before it.
Blocks of like size go into one batch where that costs less than a call of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from gspo.policy.layout import Span, TokenLayout

Block = TypeVar("Block")

STRIP = 128
"""Rows of a strip: above, half of the diagonal square may be computed for nothing; below, calls dominate."""

CALL, CPU_CALL = 96 * 96, 32 * 32
"""Scores per head that cost about as much as one more batch: blocks are padded into a batch up to this waste."""

BATCH = 1 << 18
"""Scores per head in one batch at most, so that they stay in the cache."""


@dataclass(frozen=True, slots=True)
class Tile:
    """`C` blocks of attention of equal shape, positions as in the flattened forward.

    Padding points to position N, one past the last. `first` tiles come once for every token; the others add keys to
    tokens that have been seen. `mask` is True where the query sees the key; None: everywhere. `causal`: the mask
    is the lower triangle, and the queries are the keys. `rows` and `columns` are where a single block lies.
    """

    queries: Int[Tensor, "C Q"]
    keys: Int[Tensor, "C Kt"]
    mask: Bool[Tensor, "Cm Q Kt"] | None
    causal: bool
    first: bool
    rows: slice | None
    columns: slice | None


def plan_tiles(layout: TokenLayout, window: int | None) -> list[Tile]:
    """The tiles of one layer; with a sliding `window` a token sees itself and the `window - 1` before it."""
    size = layout.input_ids.numel()
    segments = [span for piece in layout.pieces for span in (piece.prompt, *(s for _, s in piece.responses))]
    plan = _Plan(size, layout.input_ids.device, [])
    _plan_causal(plan, [span for span in segments if span.length], window)
    _plan_prompts(plan, layout, window)
    return plan.tiles


@dataclass(frozen=True, slots=True)
class _Plan:
    """Tiles as they are found; `size` is N."""

    size: int
    device: torch.device
    tiles: list[Tile]

    def add(
        self, queries: list[Span], keys: list[Span], mask: np.ndarray | None, *, causal: bool = False, first: bool
    ) -> None:
        """Blocks side by side; shorter ones are padded. `mask` may leave padded keys out."""
        single = len(queries) == 1
        self.tiles.append(
            Tile(
                torch.from_numpy(_positions(queries, self.size)).to(self.device),
                torch.from_numpy(_positions(keys, self.size)).to(self.device),
                None if mask is None or mask.all() else torch.from_numpy(mask.copy()).to(self.device),
                causal,
                first,
                slice(queries[0].start, queries[0].stop) if single else None,
                slice(keys[0].start, keys[0].stop) if single else None,
            )
        )

    def batches(self, blocks: list[Block], shapes: list[tuple[int, int]]) -> list[list[Block]]:
        """Neighbours in one batch while padding them to one shape wastes less than the calls it saves would cost."""
        batches: list[list[Block]] = []
        rows = columns = area = 0
        call = CPU_CALL if self.device.type == "cpu" else CALL
        for block, shape in zip(blocks, shapes, strict=True):
            count = len(batches[-1]) + 1 if batches else 1
            wide, high = max(columns, shape[1]), max(rows, shape[0])
            padded = count * wide * high
            waste = padded - area - shape[0] * shape[1]
            if batches and padded <= BATCH and waste <= call * (count - 1):
                batches[-1].append(block)
                rows, columns, area = high, wide, area + shape[0] * shape[1]
            else:
                batches.append([block])
                rows, columns, area = *shape, shape[0] * shape[1]
        return batches


def _plan_causal(plan: _Plan, segments: list[Span], window: int | None) -> None:
    ordered = sorted(segments, key=lambda span: -span.length)
    for batch in plan.batches(ordered, [(s.length, min(s.length, STRIP)) for s in ordered]):
        for low in range(0, batch[0].length, STRIP):
            high = min(low + STRIP, batch[0].length)
            reaching = [span for span in batch if span.length > low]
            rows = [Span(s.start + low, min(s.length, high) - low) for s in reaching]
            distance = np.arange(high - low)[:, None] - np.arange(high - low)[None, :]
            square = (distance >= 0) & (distance < (window or high))
            plan.add(rows, rows, square[None], causal=window is None or window >= high - low, first=True)
            first_key = 0 if window is None else max(0, low - window + 1)
            if first_key < low:
                query, key = np.arange(low, high)[:, None], np.arange(first_key, low)[None, :]
                near = query - key < (window or high)
                plan.add(rows, [Span(s.start + first_key, low - first_key) for s in reaching], near[None], first=False)


def _plan_prompts(plan: _Plan, layout: TokenLayout, window: int | None) -> None:
    """The responses of a prompt, end to end, against the prompt."""
    places = np.append(layout.position_ids.flatten().cpu().numpy(), 0)
    pairs = []
    for piece in layout.pieces:
        asking = Span(piece.prompt.stop, piece.responses[-1][1].stop - piece.prompt.stop)
        seen = piece.prompt.length if window is None else min(piece.prompt.length, window - 1)
        if asking.length and seen:
            pairs.append((asking, Span(piece.prompt.stop - seen, seen)))
    pairs.sort(key=lambda pair: (-pair[0].length, -pair[1].length))
    for batch in plan.batches(pairs, [(asking.length, seen.length) for asking, seen in pairs]):
        rows = max(1, BATCH // max(seen.length for _, seen in batch))
        for low in range(0, batch[0][0].length, rows):
            reaching = [(asking, seen) for asking, seen in batch if asking.length > low]
            strips = [Span(asking.start + low, min(asking.length - low, rows)) for asking, _ in reaching]
            keys = [seen for _, seen in reaching]
            row, column = _positions(strips, plan.size)[:, :, None], _positions(keys, plan.size)[:, None, :]
            mask = np.broadcast_to(column != plan.size, np.broadcast_shapes(row.shape, column.shape))
            if window is not None:
                mask = mask & (places[column] > places[row] - window)
            plan.add(strips, keys, mask, first=False)


def _positions(spans: list[Span], size: int) -> np.ndarray:
    """[C, longest] positions; padding is `size`."""
    starts, lengths = (np.array(values)[:, None] for values in zip(*((s.start, s.length) for s in spans), strict=True))
    offsets = np.arange(lengths.max())[None, :]
    return np.where(offsets < lengths, starts + offsets, size)
