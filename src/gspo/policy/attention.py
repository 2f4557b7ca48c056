"""Attention that understands a layout: each response sees its prompt and itself, and no other block is computed.

Two ways compute it, which agree to rounding: torch's varlen flash kernel on a GPU that has it (`varlen`), where it was
proven (`varlen_proof`), and the layout's tiles as matrix products everywhere else (`tile_attention`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AttentionInterface

from gspo.policy import varlen
from gspo.policy.layout import TokenLayout
from gspo.policy.tile_attention import TileAttention
from gspo.policy.tiles import Tile, plan_tiles
from gspo.policy.varlen_proof import doubt

NAME = "gspo_layout"

KERNEL = "varlen flash"


class LayoutAttention:
    """One layout in the layers of a model: what each window computes is planned once.

    `windows` are those that layers asked for. `ways` says how they were computed: `KERNEL`, or "tiles", and why.
    """

    def __init__(self, layout: TokenLayout) -> None:
        self.layout = layout
        self.windows: set[int | None] = set()
        self.ways: set[str] = set()
        self._tiles: dict[int | None, list[Tile]] = {}
        self._calls: dict[int | None, list[varlen.Call]] = {}

    def tiles(self, window: int | None) -> list[Tile]:
        if window not in self._tiles:
            self._tiles[window] = plan_tiles(self.layout, window)
        return self._tiles[window]

    def calls(self, window: int | None) -> list[varlen.Call]:
        if window not in self._calls:
            self._calls[window] = varlen.plan_calls(self.layout, window)
        return self._calls[window]


# A plain list, not a context variable: recomputed layers run in autograd's own threads.
_active: list[LayoutAttention] = []


@contextmanager
def use_layout(model: Any, layout: TokenLayout) -> Iterator[LayoutAttention]:
    """Inside, `model` attends as the layout says. Backward belongs inside too: recomputed layers attend again."""
    before = model.config._attn_implementation
    attention = LayoutAttention(layout)
    _active.append(attention)
    model.config._attn_implementation = NAME
    try:
        yield attention
    finally:
        model.config._attn_implementation = before
        _active.remove(attention)


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
    attention = _active[-1]
    attention.windows.add(sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # A window that cuts nothing off is computed by the calls of none, which are another case of the kernel.
    why_not = varlen.unserved(query, value, softcap) or doubt(
        query, value, windowed=attention.calls(sliding_window)[0].left >= 0
    )
    attention.ways.add(KERNEL if why_not is None else f"tiles: {why_not}")
    way: TileAttention | varlen.VarlenAttention
    if why_not is None:
        way = varlen.VarlenAttention(attention.calls(sliding_window), scale)
    else:
        way = TileAttention(attention.tiles(sliding_window), scale, softcap)
    return _LayoutAttention.apply(query, key, value, s_aux, way), None  # type: ignore[no-untyped-call]


# Opaque to torch.compile: the plans differ with every layout, and each would be compiled anew.
_opaque = torch.compiler.disable(layout_attention, reason="its plans differ by layout")  # type: ignore[no-untyped-call]
AttentionInterface.register(NAME, _opaque)


class _LayoutAttention(torch.autograd.Function):
    """q [1, H, N, D], k [1, Hkv, N, D], v [1, Hkv, N, Dv], sinks [H] -> [1, N, H, Dv]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, way: TileAttention | varlen.VarlenAttention
    ) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            out, saved = way.forward(q, k, v, sinks)
        ctx.save_for_backward(sinks, *saved)
        ctx.way = way
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sinks, *saved = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            return *ctx.way.backward(grad, tuple(saved), sinks), None
