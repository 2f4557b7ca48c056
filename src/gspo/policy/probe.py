"""What a model can be trusted with, found by trying: one small batch at load, in float32.

A wrong layout or head does not fail, it trains on wrong numbers. So each claim is checked against the model's own
forward of one sequence at a time, and the next simpler way is taken where it does not hold.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo.policy.attention import KERNEL, use_layout
from gspo.policy.head import agrees, find_head
from gspo.policy.layout import LayoutKind, TokenLayout, build_layout
from gspo.policy.model import hidden_states
from gspo.policy.trial_rollouts import trial_rollouts
from gspo.types import Rollout

logger = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""Relative to the largest hidden value. Rounding stays below 1e-4; a lost or foreign prompt is far above."""


@dataclass(frozen=True, slots=True)
class Findings:
    """`notes` has one line for each thing that had to fall back."""

    layout: LayoutKind
    exact_head: bool
    layout_attention: bool
    notes: tuple[str, ...]


@torch.no_grad()
def probe(model: Any, wanted: LayoutKind, autocast: torch.dtype | None = None) -> Findings:
    """The first layout from `wanted` down that the model computes exactly, and whether its head is understood.

    `autocast` is the dtype of the passes to come: on a GPU it decides how attention is computed, which is noted.
    """
    rollouts = trial_rollouts([(7, (5, 1, 8)), (4, (3, 6))], model.config.get_text_config().vocab_size)
    expected, logits = _one_by_one(model, rollouts)
    notes = []
    head = find_head(model)
    exact_head = head is not None and agrees(head, expected, logits)
    if not exact_head:
        notes.append(
            f"{type(model).__name__}: the output head is not understood; full logits are used, which need more memory"
        )
    ways: list[tuple[LayoutKind, bool]] = [("shared", True), ("packed", True), ("packed", False)]
    ways = [way for way in ways if way[0] == wanted or wanted == "shared"]
    chosen: tuple[LayoutKind, bool] = ("padded", False)
    for kind, ours in ways:
        if _same(model, rollouts, kind, ours, expected):
            chosen = (kind, ours)
            break
    if chosen[0] != wanted:
        notes.append(f"{type(model).__name__}: {wanted} rollouts are not exact for this model; using {chosen[0]}")
    for note in notes:
        logger.warning(note)
    if chosen[1] and autocast is not None and expected.is_cuda:
        notes += slow_attention(model, build_layout(rollouts, chosen[0]).to(expected.device), autocast)
    return Findings(chosen[0], exact_head, chosen[1], tuple(notes))


def _one_by_one(model: Any, rollouts: list[Rollout]) -> tuple[Tensor, Tensor]:
    """Hidden states [M, D] and the model's own logits [M, V], each sequence in a forward of its own."""
    hidden, logits = [], []
    for rollout in rollouts:
        layout = build_layout([rollout], "padded").to(next(model.parameters()).device)
        hidden.append(hidden_states(model, layout))
        logits.append(model(input_ids=layout.input_ids, use_cache=False).logits[0][layout.source])
    return torch.cat(hidden), torch.cat(logits)


def _same(model: Any, rollouts: list[Rollout], kind: LayoutKind, ours: bool, expected: Tensor) -> bool:
    layout = build_layout(rollouts, kind).to(expected.device)
    if not ours:
        found = hidden_states(model, layout)
    elif set(_layer_types(model)) <= {"full_attention", "sliding_attention"}:
        with use_layout(model, layout) as attention:
            found = hidden_states(model, layout)
        if not attention.windows >= _windows(model):
            return False
    else:
        return False
    return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max())


@torch.no_grad()
def slow_attention(model: Any, layout: TokenLayout, autocast: torch.dtype) -> list[str]:
    """A note for each reason for which layers go without torch's varlen flash kernel; proves it where it serves."""
    casting = torch.autocast(layout.source.device.type, autocast, cache_enabled=False)
    with use_layout(model, layout) as attention, casting:
        hidden_states(model, layout)
    return [f"{type(model).__name__}: attention by {way}" for way in sorted(attention.ways - {KERNEL})]


def _layer_types(model: Any) -> list[str]:
    return list(getattr(model.config.get_text_config(), "layer_types", None) or [])


def _windows(model: Any) -> set[int | None]:
    """The windows that layers must ask for. The probe's sequences are too short to tell a forgotten window."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    types = _layer_types(model)
    if (
        window is None
        or not getattr(config, "use_sliding_window", True)
        or (types and "sliding_attention" not in types)
    ):
        return set()
    return {window}
