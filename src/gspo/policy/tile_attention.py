"""Attention over a layout's tiles, on any device and in any dtype: each tile is a batch of matrix products.

Blocks are joined through their log-sum-exp. With scores s = scale * q k (soft-capped where the model does so), a
block's weights relative to all keys of the token are exp(s - L), where L is the log-sum-exp over all blocks (and the
layer's sink). So the backward pass needs L and the output alone: it makes each block's scores again, and nothing of
their size is held in between. Keys and values are never repeated over query heads.

Inside, positions come before the `g` query heads that share a key head: the rows of any span of positions are then
one matrix, and a single block needs no copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gspo.policy.tiles import Tile

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class TileAttention:
    """One layer's attention by tiles; `softcap` bounds the scores where the model does so."""

    tiles: list[Tile]
    scale: float
    softcap: float | None

    def forward(
        self,
        q: Float[Tensor, "1 H N D"],
        k: Float[Tensor, "1 Hkv N D"],
        v: Float[Tensor, "1 Hkv N Dv"],
        sinks: Float[Tensor, "H"] | None,
    ) -> tuple[Float[Tensor, "1 N H Dv"], tuple[Tensor, ...]]:
        """The output, and what `backward` needs of this pass."""
        heads, count = q.shape[1:3]
        q, k, v = _by_position(q, k.shape[1], self.scale), _by_position(k, k.shape[1]), _by_position(v, k.shape[1])
        out, total = _attend(q, k.squeeze(2), v.squeeze(2), self.tiles, self.softcap)
        if sinks is not None:
            with_sink = torch.logaddexp(total, sinks.float().view(len(k), 1, -1))
            out *= (total - with_sink).exp().unsqueeze(-1)
            total = with_sink
        total[:, count], out[:, count] = 0.0, 0.0
        kept = out.transpose(0, 1).to(v.dtype)
        return kept[:count].view(1, count, heads, -1), (q, k, v, kept, total)

    def backward(
        self, grad: Float[Tensor, "1 N H Dv"], saved: tuple[Tensor, ...], sinks: Float[Tensor, "H"] | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The gradients of queries, keys, values and sinks."""
        q, k, v, kept, total = saved
        grad = _by_position(grad.transpose(1, 2).to(v.dtype), len(k))
        out = kept.transpose(0, 1)
        delta = (grad.float() * out).sum(-1)
        d_sinks = None
        if sinks is not None:
            weight = (sinks.float().view(len(k), 1, -1) - total).exp()
            d_sinks = -(weight * delta)[:, :-1].sum(1).flatten().to(sinks.dtype)
        around = _Around(out, grad, total, delta)
        d_q, d_k, d_v = _attend_backward(q, k.squeeze(2), v.squeeze(2), around, self.tiles, self.softcap)
        return _by_head(d_q, q, self.scale), _by_head(d_k, k), _by_head(d_v, v), d_sinks


def _by_position(x: Tensor, shared: int, scale: float = 1.0) -> Tensor:
    """[1, H, N, D] as [Hkv, N + 1, g, D], scaled. Padding reads the position more, which is 0, and writes to it."""
    heads, count, size = x.shape[1:]
    copy = x.new_empty(shared, count + 1, heads // shared, size)
    copy[:, count] = 0.0
    torch.mul(x.view(shared, -1, count, size).transpose(1, 2), scale, out=copy[:, :count])
    return copy


def _by_head(x: Tensor, like: Tensor, scale: float = 1.0) -> Tensor:
    """The inverse, in the order of memory and the dtype in which a model makes its queries, keys and values."""
    shared, count, groups, size = like.shape
    copy = like.new_empty(count - 1, shared, groups, size)
    copy.transpose(0, 1).copy_(x.view(like.shape)[:, :-1])
    return copy.mul_(scale).view(1, count - 1, -1, size).transpose(1, 2)


def _rows(x: Tensor, index: Tensor, place: slice | None) -> Tensor:
    """Positions `index` [C, Q] of [Hkv, N + 1, ..] as [Hkv * C, Q, ..]; a view where they lie at one `place`."""
    if place is not None:
        return x[:, place]
    return x.index_select(1, index.flatten()).view(-1, index.shape[1], *x.shape[2:])


def _put(x: Tensor, tile: Tile, found: Tensor) -> None:
    """Writes [Hkv * C, Q, ..] to the queries' positions."""
    if tile.rows is not None:
        x[:, tile.rows] = found
    else:
        x.index_copy_(1, tile.queries.flatten(), found.reshape(len(x), -1, *x.shape[2:]))


def _add(x: Tensor, index: Tensor, place: slice | None, found: Tensor) -> None:
    """Adds at positions that differ but for the padding, of which nothing is read."""
    if place is not None:
        x[:, place] += found
    else:
        index = index.flatten()
        found = found.reshape(len(x), -1, *x.shape[2:])
        x.index_copy_(1, index, x.index_select(1, index) + found)


def _scores(q: Tensor, k: Tensor, tile: Tile, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Masked scores [Hkv * C, Q * g, K] in float32, and the slope of the soft cap where there is one."""
    scores = torch.bmm(q.flatten(1, 2), k.transpose(1, 2)).float()
    slope = None
    if softcap is not None:
        scores.div_(softcap).tanh_()
        slope = 1 - scores * scores
        scores.mul_(softcap)
    if tile.mask is not None:
        count, length = tile.queries.shape
        view = scores.view(-1, count, length, q.shape[2], scores.shape[2])
        view.masked_fill_(~tile.mask[:, :, None], -torch.inf)
    return scores, slope


def _is_fused(q: Tensor, v: Tensor, tile: Tile, softcap: float | None) -> bool:
    """Whether torch's flash attention for a CPU can compute the tile: half of a causal square is left out."""
    alike = q.shape[-1] == v.shape[-1] and q.dtype == v.dtype  # under autocast, rotary positions leave q in float32
    return tile.causal and q.device.type == "cpu" and softcap is None and alike


def _heads(x: Tensor, groups: int) -> Tensor:
    """[B, Q, g, D], or keys and values [B, K, D] for all `groups`, as [B, g, Q, D]; a view."""
    return x.transpose(1, 2) if x.ndim == 4 else x.unsqueeze(1).expand(-1, groups, -1, -1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, tiles: list[Tile], softcap: float | None
) -> tuple[Float[Tensor, "Hkv N1 g Dv"], Float[Tensor, "Hkv N1 g"]]:
    """Output and log-sum-exp over all tiles, in float32."""
    shared, count, groups = q.shape[:3]
    out = torch.empty(count, shared, groups, v.shape[-1], dtype=torch.float32, device=q.device).transpose(0, 1)
    total = torch.empty(shared, count, groups, dtype=torch.float32, device=q.device)
    for tile in tiles:
        tile_q = _rows(q, tile.queries, tile.rows)
        tile_k, tile_v = (_rows(x, tile.keys, tile.columns) for x in (k, v))
        if _is_fused(q, v, tile, softcap):
            found, sums = _flash(*(_heads(x, groups) for x in (tile_q, tile_k, tile_v)), is_causal=True, scale=1.0)
            _put(out, tile, found.transpose(1, 2).float())
            _put(total, tile, sums.transpose(1, 2))
            continue
        scores, _ = _scores(tile_q, tile_k, tile, softcap)
        peak = scores.amax(-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).min)
        weights = scores.sub_(peak).exp_()
        sums = weights.sum(-1, keepdim=True).log_().add_(peak)
        found = torch.bmm(weights.to(v.dtype), tile_v).float().view(*tile_q.shape[:3], -1)
        peak, joined = peak.view(tile_q.shape[:3]), sums.view(tile_q.shape[:3])
        if not tile.first:
            seen = _rows(total, tile.queries, tile.rows)
            joined = torch.logaddexp(seen, joined)
        found *= (peak - joined).exp_().unsqueeze(-1)
        if not tile.first:
            found.addcmul_(_rows(out, tile.queries, tile.rows), (seen - joined).exp_().unsqueeze(-1))
        _put(out, tile, found)
        _put(total, tile, joined)
    return out, total


@dataclass(frozen=True, slots=True)
class _Around:
    """What the backward pass of every tile needs of all of them: output, its gradient, log-sum-exp, g . out."""

    out: Float[Tensor, "Hkv N1 g Dv"]
    grad: Float[Tensor, "Hkv N1 g Dv"]
    total: Float[Tensor, "Hkv N1 g"]
    delta: Float[Tensor, "Hkv N1 g"]

    def of(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out, grad, total, delta = (
            _rows(x, tile.queries, tile.rows) for x in (self.out, self.grad, self.total, self.delta)
        )
        return out, grad, total, delta


def _attend_backward(
    q: Tensor, k: Tensor, v: Tensor, around: _Around, tiles: list[Tile], softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """With w = exp(s - L): dv = w' g, ds = w (g v' - delta), dq = ds k, dk = ds' q."""
    d_q = torch.empty_like(q, dtype=torch.float32)
    d_k, d_v = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
    for tile in tiles:
        tile_q = _rows(q, tile.queries, tile.rows)
        tile_k, tile_v = (_rows(x, tile.keys, tile.columns) for x in (k, v))
        if _is_fused(q, v, tile, softcap):
            found = _fused_backward(tile_q, tile_k, tile_v, *around.of(tile))
        else:
            found = _tile_backward(tile_q, tile_k, tile_v, around, tile, softcap)
        if tile.first:
            _put(d_q, tile, found[0])
        else:
            _add(d_q, tile.queries, tile.rows, found[0])
        _add(d_k, tile.keys, tile.columns, found[1])
        _add(d_v, tile.keys, tile.columns, found[2])
    return d_q, d_k, d_v


def _fused_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, total: Tensor, _: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Output and log-sum-exp are those over all tiles, so that the gradients are this tile's share."""
    q, k, v, out, grad = (_heads(x, q.shape[2]) for x in (q, k, v, out, grad))
    d_q, d_k, d_v = _flash_backward(grad, q, k, v, out, total.transpose(1, 2), 0.0, True, scale=1.0)
    return d_q.transpose(1, 2), d_k.sum(1), d_v.sum(1)


def _tile_backward(
    q: Tensor, k: Tensor, v: Tensor, around: _Around, tile: Tile, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    _, grad, total, delta = around.of(tile)
    grad = grad.flatten(1, 2)
    scores, slope = _scores(q, k, tile, softcap)
    weights = scores.sub_(total.flatten(1, 2).unsqueeze(-1)).exp_()
    d_scores = torch.bmm(grad, v.transpose(1, 2)).float()
    d_scores.sub_(delta.flatten(1, 2).unsqueeze(-1)).mul_(weights)
    if slope is not None:
        d_scores.mul_(slope)
    d_scores = d_scores.to(q.dtype)
    d_v = torch.bmm(weights.to(v.dtype).transpose(1, 2), grad)
    d_k = torch.bmm(d_scores.transpose(1, 2), q.flatten(1, 2))
    return torch.bmm(d_scores, k).view(q.shape), d_k, d_v
