"""Attention that understands a layout: each response sees its prompt and itself, and no other block is computed.

Blocks are joined through their log-sum-exp. With scores s = scale * q k (soft-capped where the model does so), a
block's weights relative to all keys of the token are exp(s - L), where L is the log-sum-exp over all blocks (and the
layer's sink). So the backward pass needs L and the output alone: it makes each block's scores again, and nothing of
their size is held in between. Keys and values are never repeated over query heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AttentionInterface

from gspo.policy.layout import TokenLayout
from gspo.policy.tiles import Tile, plan_tiles

NAME = "gspo_layout"


class LayoutTiles:
    """The tiles of one layout, made once per window, and the windows that layers asked for."""

    def __init__(self, layout: TokenLayout) -> None:
        self.layout = layout
        self.by_window: dict[int | None, list[Tile]] = {}

    def of(self, window: int | None) -> list[Tile]:
        if window not in self.by_window:
            self.by_window[window] = plan_tiles(self.layout, window)
        return self.by_window[window]


# A plain list, not a context variable: recomputed layers run in autograd's own threads.
_active: list[LayoutTiles] = []


@contextmanager
def use_layout(model: Any, layout: TokenLayout) -> Iterator[LayoutTiles]:
    """Inside, `model` attends as the layout says. Backward belongs inside too: recomputed layers attend again."""
    before = model.config._attn_implementation
    tiles = LayoutTiles(layout)
    _active.append(tiles)
    model.config._attn_implementation = NAME
    try:
        yield tiles
    finally:
        model.config._attn_implementation = before
        _active.remove(tiles)


def layout_attention(
    module: torch.nn.Module,  # noqa: ARG001 - transformers passes it by position
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 Hkv N D"],
    value: Float[Tensor, "1 Hkv N Dv"],
    attention_mask: Tensor | None,  # noqa: ARG001 - likewise
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "1 N H Dv"], None]:
    """The function that `transformers` calls in each layer; `s_aux` are a layer's sinks, one per head."""
    tiles = _active[-1].of(sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    heads, shared = query.shape[1], key.shape[1]
    grouped = query[0].reshape(shared, heads // shared, *query.shape[2:])
    out = _LayoutAttention.apply(grouped, key[0], value[0], s_aux, tiles, scale, softcap)  # type: ignore[no-untyped-call]
    return out.flatten(0, 1).transpose(0, 1).unsqueeze(0), None


# Opaque to torch.compile: the tiles differ with every layout, and each would be compiled anew.
_opaque = torch.compiler.disable(layout_attention, reason="its tiles differ by layout")  # type: ignore[no-untyped-call]
AttentionInterface.register(NAME, _opaque)


class _LayoutAttention(torch.autograd.Function):
    """q [Hkv, g, N, D], k [Hkv, N, D], v [Hkv, N, Dv] -> [Hkv, g, N, Dv]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        tiles: list[Tile],
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            out, total = _attend(q, k, v, tiles, scale, softcap)
            if sinks is not None:
                with_sink = torch.logaddexp(total, sinks.float().view(*q.shape[:2], 1))
                out *= (total - with_sink).exp().unsqueeze(-1)
                total = with_sink
        out = out.to(v.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, total)
        ctx.settings = (tiles, scale, softcap)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, total = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            delta = (grad.float() * out.float()).sum(-1)
            d_sinks = None
            if sinks is not None:
                weight = (sinks.float().view(*q.shape[:2], 1) - total).exp()
                d_sinks = -(weight * delta).sum(-1).flatten().to(sinks.dtype)
            d_q, d_k, d_v = _attend_backward(q, k, v, grad, total, delta, *ctx.settings)
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), d_sinks, None, None, None


def _with_spare(x: Tensor, value: float = 0.0) -> Tensor:
    """One position more at the end of [.., N, D]: padding reads it and writes to it."""
    return torch.nn.functional.pad(x, (0, 0, 0, 1), value=value)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Positions `index` [C, Q] of [Hkv, g, N + 1, D] as [Hkv * C, g * Q, D]; of [Hkv, N + 1, D] likewise."""
    count, length = index.shape
    picked = x.index_select(-2, index.flatten())
    if x.ndim == 3:
        return picked.view(-1, length, x.shape[-1])
    picked = picked.view(*x.shape[:2], count, length, x.shape[-1]).transpose(1, 2)
    return picked.reshape(x.shape[0] * count, -1, x.shape[-1])


def _back(x: Tensor, index: Tensor, groups: int) -> Tensor:
    """The inverse arrangement of `_rows` for queries: [Hkv, g, C * Q, D]."""
    count, length = index.shape
    return x.view(-1, count, groups, length, x.shape[-1]).transpose(1, 2).flatten(2, 3)


def _scores(q: Tensor, k: Tensor, tile: Tile, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Masked scores [Hkv * C, g * Q, K] in float32, and the slope of the soft cap where there is one."""
    scores = torch.bmm(q, k.transpose(1, 2)).float()
    slope = None
    if softcap is not None:
        scores.div_(softcap).tanh_()
        slope = 1 - scores * scores
        scores.mul_(softcap)
    if tile.mask is not None:
        count, length = tile.queries.shape
        view = scores.view(-1, count, scores.shape[1] // length, length, scores.shape[2])
        view.masked_fill_(~tile.mask[:, None], -torch.inf)
    return scores, slope


def _attend(
    q: Tensor, k: Tensor, v: Tensor, tiles: list[Tile], scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over all tiles, in float32."""
    groups, count = q.shape[1:3]
    q, k, v = _with_spare(q * scale), _with_spare(k), _with_spare(v)
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float32, device=q.device)
    total = torch.full((*q.shape[:3], 1), -torch.inf, dtype=torch.float32, device=q.device)
    for tile in tiles:
        scores, _ = _scores(_rows(q, tile.queries), _rows(k, tile.keys), tile, softcap)
        peak = scores.amax(-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).min)
        weights = scores.sub_(peak).exp_()
        sums = weights.sum(-1, keepdim=True)
        found = torch.bmm(weights.to(v.dtype), _rows(v, tile.keys)).float() / sums.clamp_min(1e-30)
        found = _back(found, tile.queries, groups)
        sums = _back(sums.log_().add_(peak), tile.queries, groups)
        index = tile.queries.flatten()
        if not tile.first:
            seen = total.index_select(2, index)
            joined = torch.logaddexp(seen, sums)
            found = found * (sums - joined).exp() + out.index_select(2, index) * (seen - joined).exp()
            sums = joined
        out.index_copy_(2, index, found)
        total.index_copy_(2, index, sums)
    return out[:, :, :count], total[:, :, :count, 0]


def _attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    total: Tensor,
    delta: Tensor,
    tiles: list[Tile],
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """With w = exp(s - L): dv = w' g, ds = w (g v' - delta), dq = scale ds k, dk = scale ds' q."""
    groups, count = q.shape[1:3]
    q, k, v, grad = _with_spare(q * scale), _with_spare(k), _with_spare(v), _with_spare(grad.to(v.dtype))
    # Padding has weight exp(s - inf) = 0, so that it adds nothing to any key.
    total = _with_spare(total.unsqueeze(-1), torch.inf)
    delta = _with_spare(delta.unsqueeze(-1))
    d_q, d_k, d_v = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    for tile in tiles:
        tile_q, tile_k, tile_grad = _rows(q, tile.queries), _rows(k, tile.keys), _rows(grad, tile.queries)
        scores, slope = _scores(tile_q, tile_k, tile, softcap)
        weights = scores.sub_(_rows(total, tile.queries)).exp_()
        d_scores = torch.bmm(tile_grad, _rows(v, tile.keys).transpose(1, 2)).float()
        d_scores.sub_(_rows(delta, tile.queries)).mul_(weights)
        if slope is not None:
            d_scores.mul_(slope)
        d_scores = d_scores.to(q.dtype)
        _add(d_v, tile.keys, torch.bmm(weights.to(v.dtype).transpose(1, 2), tile_grad))
        _add(d_k, tile.keys, torch.bmm(d_scores.transpose(1, 2), tile_q))
        index = tile.queries.flatten()
        found = _back(torch.bmm(d_scores, tile_k), tile.queries, groups).float()
        d_q.index_copy_(2, index, found if tile.first else found + d_q.index_select(2, index))
    return d_q[:, :, :count] * scale, d_k[:, :count], d_v[:, :count]


def _add(target: Tensor, keys: Tensor, found: Tensor) -> None:
    """Adds [Hkv * C, K, D] at positions `keys`, which differ but for the padding, where 0 is added."""
    index = keys.flatten()
    found = found.view(target.shape[0], len(index), -1)
    target.index_copy_(1, index, target.index_select(1, index) + found)
