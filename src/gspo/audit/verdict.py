"""What to do about a difference, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gspo.audit.gradient import GradientChange
from gspo.audit.measure import Contender, Decisions, Differences
from gspo.objectives import ClipRange, suggest_clip_range

TOLERATED = 0.05
"""Share of ratios outside the range before any update, and of flipped decisions, that is put up with."""

TOLERATED_GRADIENT = 0.1
"""Relative change of the gradient that is put up with."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`choice` in a word, `text` with its reasons, and the narrowest range that the noise does not decide."""

    choice: Literal["sampler", "recompute", "widen"]
    text: str
    suggested: ClipRange


def judge(
    contender: Contender,
    differences: Differences,
    outside: int,
    units: int,
    decisions: Decisions,
    gradient: GradientChange | None,
    recompute_seconds: float,
    *,
    turns: Sequence[int] = (),
) -> Verdict:
    """Whether the engine's log-probs may stand in this objective's ratio.

    They may where no more than `TOLERATED` of the ratios leave the range by noise alone and of the decisions flip, and
    the gradient changes by no more than `TOLERATED_GRADIENT`. Else recomputing helps, and so may a wider range where
    the noise reaches beyond this one. `turns` are the lengths of turns, for a ratio by turn.
    """
    lengths = {"response": differences.lengths, "turn": turns, "token": [1]}[contender.unit]
    suggested = suggest_clip_range(differences.noise, lengths, share=TOLERATED)
    if differences.tokens.max == 0:
        text = "use the engine's likelihoods: both engines agree to the last bit"
        return Verdict("sampler", text, suggested)
    reasons = _reasons(contender, outside, units, decisions, gradient)
    cost = f"{recompute_seconds:.2g} s a step"
    if not _troubled(outside, units, decisions, gradient):
        return Verdict("sampler", f"use the engine's likelihoods, which saves {cost}: {reasons}", suggested)
    wider = suggested.clip_low > contender.clip_low or suggested.clip_high > contender.clip_high
    if wider:
        low, high = max(suggested.clip_low, contender.clip_low), max(suggested.clip_high, contender.clip_high)
        advice = f"recompute ({cost}), or widen the range to {low:.2g} / {high:.2g} or more"
        return Verdict("widen", f"{advice}: {reasons}", suggested)
    return Verdict("recompute", f"recompute ({cost}): {reasons}", suggested)


def _troubled(outside: int, units: int, decisions: Decisions, gradient: GradientChange | None) -> bool:
    flips = decisions.flipped > TOLERATED * decisions.units
    relative = gradient.relative if gradient is not None else None
    return outside > TOLERATED * units or flips or (relative is not None and relative > TOLERATED_GRADIENT)


def _reasons(
    contender: Contender, outside: int, units: int, decisions: Decisions, gradient: GradientChange | None
) -> str:
    found = [f"before any update {outside} of {units} {contender.unit} ratios lie outside the range by noise alone"]
    if decisions.units:
        found.append(f"after one update {decisions.flipped} of {decisions.units} clip decisions flip")
    else:
        found.append("no reward differs within its group, so that clip decisions and gradients cannot be compared")
    if gradient is not None and gradient.relative is not None:
        found.append(f"the gradient changes by {gradient.relative:.2g} of its norm")
    elif gradient is not None:
        found.append("the clip removes the whole gradient with the training engine's log-probs")
    return ", ".join(found)
