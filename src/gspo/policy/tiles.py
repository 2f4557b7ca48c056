"""Which blocks of the attention matrix exist for a layout: pure data, no model.

A token sees its prompt and the part of its own response before it. So the matrix falls into causal blocks (each
prompt, each response) and rectangles (a prompt's responses against the prompt); everything else is never computed.
Blocks of like size go into one batch, and long ones are cut into strips of rows, whose keys end at the diagonal.
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
"""Rows of a strip: above, half of the diagonal square is computed for nothing; below, calls dominate."""

CALL = 96 * 96
"""Scores per head that cost about as much as one more batch: blocks are padded into a batch up to this waste."""

BATCH = 1 << 18
"""Scores per head in one batch at most, so that they stay in the cache."""


@dataclass(frozen=True, slots=True)
class Tile:
    """`C` blocks of attention of equal shape, positions as in the flattened forward.

    Padding points to position N, one past the last. `first` tiles come once for every token; the others add keys to
    tokens that have been seen. `mask` is True where the query sees the key; None: everywhere.
    """

    queries: Int[Tensor, "C Q"]
    keys: Int[Tensor, "C Kt"]
    mask: Bool[Tensor, "Cm Q Kt"] | None
    padded: Bool[Tensor, "C Q"]
    first: bool


def plan_tiles(layout: TokenLayout, window: int | None) -> list[Tile]:
    """The tiles of one layer; with a sliding `window` a token sees itself and the `window - 1` before it."""
    size = layout.input_ids.numel()
    segments = [span for piece in layout.pieces for span in (piece.prompt, *(s for _, s in piece.responses))]
    tiles = _causal_tiles([span for span in segments if span.length], size, window)
    tiles += _prompt_tiles(layout, size, window)
    device = layout.input_ids.device
    return [_on(tile, device) for tile in tiles]


def _on(tile: Tile, device: torch.device) -> Tile:
    mask = None if tile.mask is None else tile.mask.to(device)
    return Tile(tile.queries.to(device), tile.keys.to(device), mask, tile.padded.to(device), tile.first)


def _causal_tiles(segments: list[Span], size: int, window: int | None) -> list[Tile]:
    tiles = []
    ordered = sorted(segments, key=lambda span: -span.length)
    for batch in _batches(ordered, [(s.length, min(s.length, STRIP)) for s in ordered]):
        longest = batch[0].length
        for low in range(0, longest, STRIP):
            high = min(low + STRIP, longest)
            reaching = [span for span in batch if span.length > low]
            first_key = 0 if window is None else max(0, low - window + 1)
            query, key = np.arange(low, high)[:, None], np.arange(first_key, high)[None, :]
            mask = key <= query
            if window is not None:
                mask &= key > query - window
            tiles.append(
                _tile(
                    _positions([Span(s.start + low, min(s.length, high) - low) for s in reaching], high - low, size),
                    _positions(
                        [Span(s.start + first_key, min(s.length, high) - first_key) for s in reaching],
                        high - first_key,
                        size,
                    ),
                    mask[None],
                    size,
                    first=True,
                )
            )
    return tiles


def _prompt_tiles(layout: TokenLayout, size: int, window: int | None) -> list[Tile]:
    """The responses of a prompt, end to end, against the prompt."""
    places = np.append(layout.position_ids.flatten().cpu().numpy(), 0)
    pairs = []
    for piece in layout.pieces:
        asking = Span(piece.prompt.stop, piece.responses[-1][1].stop - piece.prompt.stop)
        seen = piece.prompt.length if window is None else min(piece.prompt.length, window - 1)
        if asking.length and seen:
            pairs.append((asking, Span(piece.prompt.stop - seen, seen)))
    pairs.sort(key=lambda pair: (-pair[0].length, -pair[1].length))
    tiles = []
    for batch in _batches(pairs, [(asking.length, seen.length) for asking, seen in pairs]):
        width = max(seen.length for _, seen in batch)
        keys = _positions([seen for _, seen in batch], width, size)
        rows = min(batch[0][0].length, max(1, BATCH // width))
        for low in range(0, batch[0][0].length, rows):
            strips = [Span(asking.start + low, min(asking.length - low, rows)) for asking, _ in batch]
            queries = _positions(strips, rows, size)
            mask = np.broadcast_to(keys[:, None, :] != size, (len(batch), rows, width))
            if window is not None:
                mask = mask & (places[keys[:, None, :]] > places[queries[:, :, None]] - window)
            tiles.append(_tile(queries, keys, None if mask.all() else mask, size, first=False))
    return tiles


def _batches(blocks: list[Block], shapes: list[tuple[int, int]]) -> list[list[Block]]:
    """Neighbours in one batch while padding them to one shape wastes less than the calls it saves would cost."""
    batches: list[list[Block]] = []
    rows = columns = area = 0
    for block, shape in zip(blocks, shapes, strict=True):
        count = len(batches[-1]) + 1 if batches else 1
        wide, high = max(columns, shape[1]), max(rows, shape[0])
        padded = count * wide * high
        if batches and padded <= BATCH and padded - area - shape[0] * shape[1] <= CALL * (count - 1):
            batches[-1].append(block)
            rows, columns, area = high, wide, area + shape[0] * shape[1]
        else:
            batches.append([block])
            rows, columns, area = *shape, shape[0] * shape[1]
    return batches


def _positions(spans: list[Span], width: int, size: int) -> np.ndarray:
    """[C, width] positions; padding is `size`."""
    offsets = np.arange(width)[None, :]
    starts = np.array([span.start for span in spans])[:, None]
    lengths = np.array([span.length for span in spans])[:, None]
    return np.where(offsets < lengths, starts + offsets, size)


def _tile(queries: np.ndarray, keys: np.ndarray, mask: np.ndarray | None, size: int, *, first: bool) -> Tile:
    return Tile(
        torch.from_numpy(queries),
        torch.from_numpy(keys),
        None if mask is None else torch.from_numpy(mask.copy()),
        torch.from_numpy(queries == size),
        first,
    )
