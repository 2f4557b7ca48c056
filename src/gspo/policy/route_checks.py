"""Whether routes can belong to a model and to the tokens of a forward."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gspo.errors import GspoError
from gspo.policy.moe import MoeLayer

Routes = Mapping[str, Tensor]
"""Layer name -> expert indices [N, K] of any integer dtype, one row per token of the forward."""

ROWS_TO_JUDGE = 16
"""With fewer rows, agreement says too little about alignment."""


class RoutingError(GspoError):
    """A replay that cannot be proven: a router was not overridden, or routes do not fit the tokens."""


def check_routes(layers: Mapping[str, MoeLayer], routes: Routes, native_rows: Bool[Tensor, "N"] | None) -> int:
    """The number of rows; raises RoutingError unless every layer has distinct, existing experts for each row.

    Rows that are True in `native_rows` are not read.
    """
    missing, unknown = layers.keys() - routes.keys(), routes.keys() - layers.keys()
    if missing or unknown:
        raise RoutingError(
            f"routing.replay: {'no routes for' if missing else 'routes for an unknown'} layer "
            f"{min(missing or unknown)}; the routes name {len(routes)} layers, the model has {len(layers)}"
        )
    rows = len(next(iter(routes.values())))
    if native_rows is not None and native_rows.shape != (rows,):
        raise RoutingError(f"routing.replay: native_rows has shape {list(native_rows.shape)} for {rows} rows of routes")
    counts = torch.stack([_count_invalid(layers[name], routes[name], rows, native_rows) for name in layers])
    for name, (outside, twice) in zip(layers, counts.tolist(), strict=True):
        if outside or twice:
            raise RoutingError(
                f"routing.replay: routes of {name}: {outside} rows lack one of experts "
                f"0 to {layers[name].num_experts - 1}, {twice} rows name one twice; every fed token needs "
                "distinct experts, and padding is named in native_rows"
            )
    return rows


def check_shape(layer: MoeLayer, routes: Routes, tokens: int, k: int) -> None:
    """Raise RoutingError unless the layer's routes are [tokens, k]."""
    shape = list(routes[layer.name].shape)
    if [tokens, k] != shape:
        raise RoutingError(
            f"routing.replay: {layer.name} routes {tokens} tokens to {k} experts each, its routes are "
            f"{shape}; record and replay must feed the same tokens in the same layout"
        )


def agreement(
    native: Int[Tensor, "N K"], forced: Int[Tensor, "N K"], num_experts: int, keep: Bool[Tensor, "N"] | None
) -> Float[Tensor, "2"]:
    """The share of choices that two sets of routes have in common, and the share expected by chance.

    Chance is that of independent tokens with the same expert loads. Only rows in `keep` count.
    """
    k = native.shape[1]
    weight = torch.ones(len(native), device=native.device) if keep is None else keep.float()
    total = weight.sum().clamp(min=1)
    hits = (native[:, :, None] == forced[:, None, :]).any(-1).float().mean(-1)
    loads = [
        torch.zeros(num_experts, device=native.device).scatter_add_(
            0, chosen.reshape(-1).clamp(0, num_experts - 1), weight.repeat_interleave(k)
        )
        for chosen in (native, forced)
    ]
    return torch.stack(((hits * weight).sum() / total, (loads[0] * loads[1]).sum() / (k * total * total)))


def check_alignment(name: str, share: float, chance: float, least: float) -> None:
    """Raise RoutingError when agreement beyond chance (Cohen's kappa) is under `least`."""
    if chance < 0.99 and (share - chance) / (1.0 - chance) < least:
        raise RoutingError(
            f"routing.replay: the routes of {name} agree with its router on {share:.0%} of choices, where "
            f"chance alone gives {chance:.0%}; they belong to other tokens or to another layer"
        )


def _count_invalid(layer: MoeLayer, indices: Tensor, rows: int, native_rows: Tensor | None) -> Int[Tensor, "2"]:
    if indices.ndim != 2 or len(indices) != rows or indices.is_floating_point():
        raise RoutingError(
            f"routing.replay: routes of {layer.name} are {indices.dtype} {list(indices.shape)}; "
            f"integers of shape [{rows}, K] are needed"
        )
    ordered = indices.to(torch.long).sort(dim=-1).values
    outside = ((ordered < 0) | (ordered >= layer.num_experts)).any(-1)
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(-1) & ~outside
    if native_rows is not None:
        kept = ~native_rows.to(indices.device)
        outside, twice = outside & kept, twice & kept
    return torch.stack((outside.sum(), twice.sum())).cpu()
