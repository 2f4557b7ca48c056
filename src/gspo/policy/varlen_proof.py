"""Whether the varlen flash kernel computes what `varlen` assumes: tried once for each kind of layer, against tiles.

A kernel with another idea of a window or of its log-sum-exp does not fail, it trains on wrong numbers.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gspo.policy.layout import build_layout
from gspo.policy.tile_attention import TileAttention
from gspo.policy.tiles import plan_tiles
from gspo.policy.trial_rollouts import trial_rollouts
from gspo.policy.varlen import VarlenAttention, plan_calls

logger = logging.getLogger(__name__)

TOLERANCE = 2.0
"""In eps of the dtype, of a tensor's norm. Rounding gives 0.3 to 0.4, a window that is wrong by one token 14."""

GROUPS = [(150, (66, 1, 201)), (1, (7, 132))]
"""Longer and shorter than blocks of 64 and 128; a response of which nothing is fed; a prompt of one token."""

WINDOW = 48


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the kernel may have a version of its own for."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    key_heads: int
    size: int
    windowed: bool


# By kind, the reason not to use the kernel. A process has one torch and one driver: it is tried once.
_found: dict[_Kind, str | None] = {}


def doubt(query: Float[Tensor, "1 H N D"], value: Float[Tensor, "1 Hkv N D"], *, windowed: bool) -> str | None:
    """Why the kernel is not used for such a layer; None once it was proven, output and gradients. Warns once."""
    kind = _Kind(query.device, value.dtype, query.shape[1], value.shape[1], query.shape[-1], windowed)
    if kind not in _found:
        reason = _try(kind)
        if reason is not None:
            logger.warning(f"attention is computed by tiles, more slowly: torch's varlen flash kernel {reason}")
        _found[kind] = reason and f"the kernel {reason}"
    return _found[kind]


@torch.no_grad()
def _try(kind: _Kind) -> str | None:
    layout = build_layout(trial_rollouts(GROUPS, 2), "shared").to(kind.device)
    count, generator = layout.input_ids.numel(), torch.Generator().manual_seed(0)
    window, scale = WINDOW if kind.windowed else None, kind.size**-0.5

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(kind.device, kind.dtype)

    q, k, v = (draw(1, heads, count, kind.size) for heads in (kind.heads, kind.key_heads, kind.key_heads))
    sinks, grad = draw(kind.heads), draw(1, count, kind.heads, kind.size)
    with torch.autocast(kind.device.type, enabled=False):
        try:
            found = _pass(VarlenAttention(plan_calls(layout, window), scale), q, k, v, sinks, grad)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError) as error:  # a GPU, a head size or a signature that it refuses
            return f"raised an error ({str(error).partition(chr(10))[0]})"
        tiles = TileAttention(plan_tiles(layout, window), scale, None)
        expected = _pass(tiles, q.float(), k.float(), v.float(), sinks.float(), grad.float())
    for name, ours, theirs in zip(("output", "dq", "dk", "dv"), found, expected, strict=True):
        off = float((ours.float() - theirs).norm() / theirs.norm())
        if not off <= TOLERANCE * torch.finfo(kind.dtype).eps:  # NaN is in no order
            return f"is off by {off:.1e} in its {name}"
    return None


def _pass(
    way: TileAttention | VarlenAttention, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, grad: Tensor
) -> list[Tensor]:
    """What the kernel makes; sinks change it all, but their own gradient, few sums of many terms, is not its work."""
    out, saved = way.forward(q, k, v, sinks)
    return [out, *way.backward(grad, saved, sinks)[:3]]
