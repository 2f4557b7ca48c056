"""Where each token of the rollouts sits in a forward pass: pure data, no model.

This module alone knows packing, padding and shared prompts. Three kinds, which agree in every log-prob:

    shared   one row; each prompt is fed once, followed by all of its responses: x y1 .. yG, x' y1' ..
    packed   one row; the prompt is fed again before each of its responses: x y1 x y2 ..
    padded   one row per rollout, padded on the right to the longest

Position ids restart with every prompt, and go on from the prompt's end in every response. A response's last
token is a target only and is never fed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gspo.policy.head import Support
from gspo.policy.sampled_support import sampled_support
from gspo.types import Rollout

LayoutKind = Literal["shared", "packed", "padded"]


@dataclass(frozen=True, slots=True)
class Span:
    """`length` consecutive positions of the flattened forward, from `start` on."""

    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Piece:
    """A prompt as it is fed once, and the responses that continue it: (index of the rollout, fed tokens)."""

    slot: int
    prompt: Span
    responses: tuple[tuple[int, Span], ...]


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """The order of one forward pass over `B` rollouts, and the way back to `[B, T]`.

    `R` rows of `S` positions are fed; positions are numbered through, `r * S + s`. Each of the `M` scored
    tokens has the position whose hidden state predicts it, its id, and its place in `[B, T]`;
    `support` says what each was drawn among.

    >>> from gspo.types import Prompt, Rollout, VersionSpan
    >>> def rollout(sample, ids):
    ...     return Rollout(Prompt("k", "hi", (5, 6)), 0, sample, ids, (0.0,) * len(ids), (True,) * len(ids),
    ...                    "stop", (VersionSpan(0, 0),), "")
    >>> layout = build_layout([rollout(0, (7, 8, 2)), rollout(1, (9, 2))], "shared")
    >>> layout.input_ids.tolist(), layout.position_ids.tolist()
    ([[5, 6, 7, 8, 9]], [[0, 1, 2, 3, 2]])
    >>> layout.source.tolist(), layout.targets.tolist()
    ([1, 2, 3, 1, 4], [7, 8, 2, 9, 2])
    """

    kind: LayoutKind
    input_ids: Int[Tensor, "R S"]
    position_ids: Int[Tensor, "R S"]
    attention_mask: Bool[Tensor, "R S"]
    pieces: tuple[Piece, ...]
    source: Int[Tensor, "M"]
    targets: Int[Tensor, "M"]
    places: Int[Tensor, "M"]
    rows: int
    columns: int
    support: Support | None = None

    @property
    def fed_tokens(self) -> int:
        """How many tokens the model computes, padding left out."""
        return sum(p.prompt.length + sum(span.length for _, span in p.responses) for p in self.pieces)

    def to(self, device: torch.device | str) -> TokenLayout:
        """The same layout with its tensors on `device`."""
        names = ("input_ids", "position_ids", "attention_mask", "source", "targets", "places")
        moved: dict[str, Any] = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        return replace(self, support=self.support and self.support.to(device), **moved)

    @property
    def mask(self) -> Bool[Tensor, "B T"]:
        """True on scored tokens."""
        flat = torch.zeros(self.rows * self.columns, dtype=torch.bool, device=self.places.device)
        return flat.index_fill_(0, self.places, True).view(self.rows, self.columns)

    def scatter(self, values: Float[Tensor, "M"]) -> Float[Tensor, "B T"]:
        """Values of scored tokens in their places per rollout; 0 elsewhere. Gradients flow."""
        flat = values.new_zeros(self.rows * self.columns)
        return flat.index_copy(0, self.places, values).view(self.rows, self.columns)

    def gather(self, values: Tensor) -> Tensor:
        """The inverse of `scatter`: `[B, T]` to the scored tokens `[M]`."""
        return values.reshape(-1)[self.places.to(values.device)]

    def place_routes(self, routes: Sequence[np.ndarray]) -> Int[np.ndarray, "N K"]:
        """One router's experts in the order of the forward.

        `routes` has for each rollout the experts [n, K] of its fed tokens: the prompt's, then the response's but
        for its last. A shared prompt takes those of its first rollout. Padding gets experts 0 .. K-1: distinct,
        as a router's own choice is, and never scored.

        Raises:
            ValueError: a rollout's routes do not have one row per fed token.
        """
        placed = np.tile(np.arange(routes[0].shape[1], dtype=np.int64), (self.input_ids.numel(), 1))
        for piece in self.pieces:
            for index, span in piece.responses:
                given, fed = len(routes[index]), piece.prompt.length + span.length
                if given != fed:
                    raise ValueError(f"rollout {index}: {given} rows of routes for {fed} fed tokens")
                placed[span.start : span.stop] = routes[index][piece.prompt.length :]
            placed[piece.prompt.start : piece.prompt.stop] = routes[piece.responses[0][0]][: piece.prompt.length]
        return placed


def build_layout(rollouts: Sequence[Rollout], kind: LayoutKind, *, columns: int | None = None) -> TokenLayout:
    """Lays out the rollouts; those of the same slot are a group and share their prompt.

    `columns` is T, the width of the tensors per rollout; by default that of the longest response.

    Raises:
        ValueError: an empty prompt, two prompts in one slot, a response longer than `columns`, or unfit supports.
    """
    longest = max((len(r.response_ids) for r in rollouts), default=0)
    if columns is None:
        columns = longest
    if longest > columns:
        raise ValueError(f"a response of {longest} tokens does not fit into {columns} columns")
    pieces = _pieces(rollouts, kind)
    size = max((p.responses[-1][1].stop for p in pieces), default=0)
    width = size if kind != "padded" else max((_fed(r) for r in rollouts), default=0)
    count = len(rollouts) * width if kind == "padded" else size
    ids, positions, real = np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, bool)
    source, targets, places = [], [], []
    for piece in pieces:
        start = piece.prompt.length
        _fill(ids, positions, real, piece.prompt, rollouts[piece.responses[0][0]].prompt.ids, 0)
        for index, span in piece.responses:
            rollout = rollouts[index]
            _fill(ids, positions, real, span, rollout.response_ids[:-1], start)
            scored = np.flatnonzero(np.asarray(rollout.trainable, bool))
            source.append(np.where(scored == 0, piece.prompt.stop - 1, span.start + scored - 1))
            targets.append(np.asarray(rollout.response_ids, np.int64)[scored])
            places.append(index * columns + scored)
    shape = (len(rollouts), width) if kind == "padded" else (1, count)
    order = np.argsort(_joined(places))
    return TokenLayout(
        kind,
        torch.from_numpy(ids).view(shape),
        torch.from_numpy(positions).view(shape),
        torch.from_numpy(real).view(shape),
        pieces,
        torch.from_numpy(_joined(source)[order]),
        torch.from_numpy(_joined(targets)[order]),
        torch.from_numpy(_joined(places)[order]),
        len(rollouts),
        columns,
        sampled_support(rollouts),
    )


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _fill(
    ids: np.ndarray, positions: np.ndarray, real: np.ndarray, span: Span, tokens: Sequence[int], first: int
) -> None:
    ids[span.start : span.stop] = tokens
    positions[span.start : span.stop] = np.arange(first, first + span.length)
    real[span.start : span.stop] = True


def _fed_response(rollout: Rollout) -> int:
    return max(len(rollout.response_ids) - 1, 0)


def _fed(rollout: Rollout) -> int:
    return len(rollout.prompt.ids) + _fed_response(rollout)


def _pieces(rollouts: Sequence[Rollout], kind: LayoutKind) -> tuple[Piece, ...]:
    groups = by_slot(rollouts)
    parts = list(groups.values()) if kind == "shared" else [[index] for index in range(len(rollouts))]
    width = max((_fed(r) for r in rollouts), default=0)
    pieces, start = [], 0
    for number, members in enumerate(parts):
        if kind == "padded":
            start = number * width
        first = rollouts[members[0]]
        prompt = Span(start, len(first.prompt.ids))
        start, responses = prompt.stop, []
        for index in members:
            responses.append((index, Span(start, _fed_response(rollouts[index]))))
            start = responses[-1][1].stop
        pieces.append(Piece(first.slot, prompt, tuple(responses)))
    return tuple(pieces)


def by_slot(rollouts: Sequence[Rollout]) -> dict[int, list[int]]:
    """The groups: for each slot the indices of its rollouts, in order of first appearance.

    Raises:
        ValueError: an empty prompt, or two different prompts in one slot.
    """
    groups: dict[int, list[int]] = {}
    for index, rollout in enumerate(rollouts):
        members = groups.setdefault(rollout.slot, [])
        members.append(index)
        if not rollout.prompt.ids:
            raise ValueError(f"slot {rollout.slot}: the prompt has no tokens")
        if rollout.prompt.ids != rollouts[members[0]].prompt.ids:
            raise ValueError(f"slot {rollout.slot}: two different prompts in one group")
    return groups


def split_micro_batches(rollouts: Sequence[Rollout], max_tokens: int, kind: LayoutKind) -> list[list[int]]:
    """Indices of the rollouts of each micro-batch: at most `max_tokens` positions each, balanced.

    Groups stay whole where they fit, so that a shared prompt is computed once; a group over the budget is
    split, and its prompt is computed again in each part. A rollout that alone exceeds the budget is a
    micro-batch of its own.
    """
    groups = by_slot(rollouts)
    if kind == "shared":
        parts = [part for members in groups.values() for part in _split_group(rollouts, members, max_tokens)]
    else:
        parts = [[index] for members in groups.values() for index in members]
    costs = [fed_tokens(rollouts, part, kind) for part in parts]
    if kind == "padded":
        return _fill_padded(parts, costs, max_tokens)
    return _fill_balanced(parts, costs, max_tokens)


def fed_tokens(rollouts: Sequence[Rollout], part: Iterable[int], kind: LayoutKind) -> int:
    """How many tokens a part of the rollouts feeds, padding left out; one that shares its prompt is of one group."""
    part = list(part)
    if kind == "shared":
        return len(rollouts[part[0]].prompt.ids) + sum(_fed_response(rollouts[i]) for i in part)
    return sum(_fed(rollouts[i]) for i in part)


def _split_group(rollouts: Sequence[Rollout], members: list[int], budget: int) -> list[list[int]]:
    prompt = len(rollouts[members[0]].prompt.ids)
    lengths = [_fed_response(rollouts[index]) for index in members]
    return _fill_balanced([[index] for index in members], lengths, max(budget - prompt, 0))


def _fill_balanced(parts: list[list[int]], costs: list[int], budget: int) -> list[list[int]]:
    """Longest part first into the emptiest bin; one bin more whenever a bin would run over."""
    order = sorted(range(len(parts)), key=lambda n: (-costs[n], n))
    count = max(1, -(-sum(costs) // max(budget, 1)))
    while True:
        bins: list[list[int]] = [[] for _ in range(min(count, len(parts)))]
        loads = [0] * len(bins)
        for n in order:
            least = min(range(len(bins)), key=lambda b: (loads[b], b))
            bins[least].append(n)
            loads[least] += costs[n]
        over = any(load > budget and len(b) > 1 for b, load in zip(bins, loads, strict=True))
        if not over or len(bins) == len(parts):
            return _in_order(parts, bins)
        count += 1


def _fill_padded(parts: list[list[int]], costs: list[int], budget: int) -> list[list[int]]:
    """Rows of like length together: what is paid for is rows times the longest."""
    bins: list[list[int]] = []
    for n in sorted(range(len(parts)), key=lambda n: (-costs[n], n)):
        if bins and (len(bins[-1]) + 1) * costs[bins[-1][0]] <= budget:
            bins[-1].append(n)
        else:
            bins.append([n])
    return _in_order(parts, bins)


def _in_order(parts: list[list[int]], bins: list[list[int]]) -> list[list[int]]:
    filled = [sorted(index for n in chosen for index in parts[n]) for chosen in bins if chosen]
    return sorted(filled)
