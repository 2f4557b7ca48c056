"""Attention from its definition, dense and slow."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.policy.layout import TokenLayout


def visible(layout: TokenLayout, window: int | None) -> Tensor:
    """[N, N], from the definition: a token sees its prompt and its own response, up to itself."""
    size = layout.input_ids.numel()
    seen = torch.zeros(size, size, dtype=torch.bool)
    for piece in layout.pieces:
        prompt = list(range(piece.prompt.start, piece.prompt.stop))
        for own in [[], *(list(range(span.start, span.stop)) for _, span in piece.responses)]:
            sequence = prompt + own
            for place, query in enumerate(sequence):
                first = 0 if window is None else max(0, place - window + 1)
                seen[query, sequence[first : place + 1]] = True
    return seen


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """[1, H, N, D], keys and values [1, Hkv, N, D], seen [N, N] -> [1, N, H, D]."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = q @ k.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(1, -1, q.shape[2], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2)


def one_rollout_at_a_time(
    q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, window: int | None, scale: float, sinks: Tensor | None
) -> Tensor:
    """The same over a layout, each response with its prompt as a plain causal sequence of its own."""
    out = torch.zeros(1, q.shape[2], q.shape[1], v.shape[-1], dtype=q.dtype)
    for piece in layout.pieces:
        prompt = torch.arange(piece.prompt.start, piece.prompt.stop)
        for own in [prompt[:0], *(torch.arange(span.start, span.stop) for _, span in piece.responses)]:
            sequence = torch.cat([prompt, own])
            age = torch.arange(len(sequence))[:, None] - torch.arange(len(sequence))
            seen = (age >= 0) & (age < (window or len(sequence)))
            found = dense_attention(*(x[:, :, sequence] for x in (q, k, v)), seen, scale, None, sinks)
            wanted = own if len(own) else prompt
            out = out.index_copy(1, wanted, found[:, -len(wanted) :])
    return out
