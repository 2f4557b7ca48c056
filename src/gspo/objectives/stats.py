"""What an objective counted: sums and their denominators, never means, so that adding two records is exact.

Everything stays on the device of the inputs until `as_floats`, which waits for it once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gspo.objectives.clipping import ClipFlags
from gspo.objectives.ratios import MAX_LOG_RATIO, dense_ids

SIDES = ("low", "high")
SIGNS = ("negative", "zero", "positive", "mixed")


@dataclass(frozen=True)
class ClipCounts:
    """Clip accounting at one level; columns are advantage signs (`SIGNS`), rows are sides (`SIDES`).

    `outside`: the ratio lies outside the band. `removed`: the clip took the gradient. A token never has a
    mixed sign; a sequence does when its tokens differ.
    """

    total: Int[Tensor, "4"]
    outside: Int[Tensor, "2 4"]
    removed: Int[Tensor, "2 4"]

    def __add__(self, other: ClipCounts) -> ClipCounts:
        return ClipCounts(self.total + other.total, self.outside + other.outside, self.removed + other.removed)

    def map(self, function: Callable[[Tensor], Tensor]) -> ClipCounts:
        """Applies `function` to every count, for instance a sum over ranks."""
        return ClipCounts(function(self.total), function(self.outside), function(self.removed))


@dataclass(frozen=True)
class ObjectiveStats:
    """Counts of one call; `a + b` is the record of the two calls' rows together.

    `sequences` and `tokens` count rows with a trainable token, and trainable tokens. `units` counts ratios: one
    a sequence, a span or a token, by the objective; `saturated` those beyond +-20 nats. `log_ratio_sum` adds,
    over sequences, the mean token log-ratio in nats. `by_sequence` counts spans where spans are given; a
    sequence (span) is outside or removed when all of its trainable tokens are, and `by_token` counts these.
    """

    sequences: Int[Tensor, ""]
    tokens: Int[Tensor, ""]
    units: Int[Tensor, ""]
    saturated: Int[Tensor, ""]
    log_ratio_sum: Float[Tensor, ""]
    by_sequence: ClipCounts
    by_token: ClipCounts

    def __add__(self, other: ObjectiveStats) -> ObjectiveStats:
        return ObjectiveStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def map(self, function: Callable[[Tensor], Tensor]) -> ObjectiveStats:
        """Applies `function` to every tensor, for instance a sum over ranks."""
        return ObjectiveStats(
            function(self.sequences),
            function(self.tokens),
            function(self.units),
            function(self.saturated),
            function(self.log_ratio_sum),
            self.by_sequence.map(function),
            self.by_token.map(function),
        )

    def as_floats(self) -> dict[str, float]:
        """The figures for a log; shares are of all sequences (tokens), so that the splits add up to the whole.

        Keys: `sequences`, `tokens`, `units`, `saturated`, `log_ratio_mean`, and for each level in (sequence,
        token) and each what in (outside, removed): `{level}_{what}`, `{level}_{what}_{side}` and
        `{level}_{what}_{side}_{sign}`.
        """
        scalars = (self.sequences, self.tokens, self.units, self.saturated, self.log_ratio_sum)
        tables = [
            t for c in (self.by_sequence, self.by_token) for t in (c.total, c.outside.flatten(), c.removed.flatten())
        ]
        flat = torch.cat([torch.stack([s.double() for s in scalars]), *(t.double() for t in tables)]).tolist()
        head, rest = flat[:5], flat[5:]
        figures = dict(zip(("sequences", "tokens", "units", "saturated"), head, strict=False))
        figures["log_ratio_mean"] = head[4] / max(head[0], 1.0)
        for level, table in (("sequence", rest[:20]), ("token", rest[20:])):
            whole = max(sum(table[:4]), 1.0)
            for what, cells in (("outside", table[4:12]), ("removed", table[12:])):
                figures |= _shares(f"{level}_{what}", cells, whole)
        return figures


def _shares(name: str, cells: list[float], whole: float) -> dict[str, float]:
    shares = {name: sum(cells) / whole}
    for row, side in enumerate(SIDES):
        shares[f"{name}_{side}"] = sum(cells[4 * row : 4 * row + 4]) / whole
        for column, sign in enumerate(SIGNS):
            shares[f"{name}_{side}_{sign}"] = cells[4 * row + column] / whole
    return shares


def collect_stats(
    log_ratios: Float[Tensor, "B"] | Float[Tensor, "B T"],
    sequence_log_ratios: Float[Tensor, "B"],
    advantages: Float[Tensor, "B"] | Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    flags: ClipFlags,
    *,
    spans: Int[Tensor, "B T"] | None = None,
    token_units: bool = False,
) -> ObjectiveStats:
    """Counts what `flags` says. `log_ratios` are those of the units; `token_units`: one unit a token.

    `sequence_log_ratios` are the means over each row's tokens. All inputs are detached or boolean.
    """
    signs = torch.stack([advantages < 0, advantages == 0, advantages > 0])
    lengths = mask.sum(1)
    count = _UnitCounter(mask, lengths, signs, None if spans is None else dense_ids(spans))
    total = count(torch.ones_like(flags.outside_low))
    outside = torch.stack([count(flags.outside_low), count(flags.outside_high)])
    removed = torch.stack([count(flags.removed_low), count(flags.removed_high)])
    by_sequence, by_token = _by_sequence(total, outside, removed), _by_token(total, outside, removed)
    beyond = count(log_ratios.abs() > MAX_LOG_RATIO)
    rows, tokens = lengths > 0, lengths.sum()
    return ObjectiveStats(
        sequences=rows.sum(),
        tokens=tokens,
        units=tokens if token_units else by_sequence.total.sum(),
        saturated=beyond.sum() if token_units else (beyond.sum(-1) > 0).sum(),
        log_ratio_sum=torch.where(rows, sequence_log_ratios, 0).double().sum(),
        by_sequence=by_sequence,
        by_token=by_token,
    )


@dataclass(frozen=True)
class _UnitCounter:
    """Counts flagged trainable tokens per sequence (or span) and advantage sign: [U, 3].

    `mask` [B, T], `lengths` [B], `signs` [3, B] or [3, B, T], `span_index` [B, T] or None.
    """

    mask: Tensor
    lengths: Tensor
    signs: Tensor
    span_index: Tensor | None

    def __call__(self, flag: Tensor) -> Tensor:
        """`flag` is [B], one for all tokens of a row, or [B, T]."""
        if self.span_index is None and self.signs.dim() == 2:
            tokens = (flag & self.mask).sum(1) if flag.dim() == 2 else self.lengths * flag
            return (tokens * self.signs).T
        token_flag = (flag if flag.dim() == 2 else flag[:, None]) & self.mask
        signs = self.signs if self.signs.dim() == 3 else self.signs[:, :, None]
        if self.span_index is None:
            return torch.stack([(token_flag & sign).sum(1) for sign in signs], -1)
        zeros = torch.zeros_like(self.span_index)
        counts = [zeros.scatter_add(1, self.span_index, (token_flag & s).to(zeros.dtype)) for s in signs]
        return torch.stack(counts, -1).flatten(0, 1)


def _by_token(total: Tensor, outside: Tensor, removed: Tensor) -> ClipCounts:
    tables = (torch.nn.functional.pad(t.sum(-2), (0, 1)) for t in (total, outside, removed))
    return ClipCounts(*tables)


def _by_sequence(total: Tensor, outside: Tensor, removed: Tensor) -> ClipCounts:
    size = total.sum(-1)
    some = size > 0
    pure = (total == size[:, None]) & some[:, None]
    sign = torch.cat([pure, (some & ~pure.any(-1))[:, None]], -1)

    def whole(counts: Tensor) -> Tensor:
        return ((counts.sum(-1) == size)[..., None] & sign).sum(-2)

    return ClipCounts(sign.sum(0), whole(outside), whole(removed))
