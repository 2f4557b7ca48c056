"""Attention of one new token per row over grouped key-value heads, without repeating the keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "gspo_grouped"


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, Any]:
    """`sdpa` for a decode step, [row, head, 1, dim]: the query heads of a group stand in for query positions.

    Repeating keys and values for each query head, as `sdpa` of transformers up to 5.19 does under a mask, costs
    ten times the attention itself. Anything but a plain decode step goes to `sdpa` unchanged.
    """
    rows, heads, length, dim = query.shape
    shared_mask = attention_mask is None or attention_mask.shape[1] == 1
    if length != 1 or heads == key.shape[1] or not shared_mask or settings.get("position_bias") is not None:
        found: tuple[Tensor, Any] = sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
        return found
    packed = query.reshape(rows, key.shape[1], -1, dim)
    mixed = nn.functional.scaled_dot_product_attention(
        packed, key, value, attn_mask=attention_mask, scale=settings.get("scaling")
    )
    return mixed.reshape(rows, 1, heads, -1), None


def _mask(*, attention_mask: Tensor | None, allow_is_causal_skip: bool = True, **sizes: Any) -> Tensor | None:
    """The mask of `sdpa`; a padding mask that is given is needed, and not read on the host to find out."""
    skip = allow_is_causal_skip and attention_mask is None
    mask: Tensor | None = sdpa_mask(attention_mask=attention_mask, allow_is_causal_skip=skip, **sizes)
    return mask


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, _mask)


@contextmanager
def grouped(model: nn.Module) -> Iterator[None]:
    """Lets a model that uses `sdpa` use `grouped_attention` meanwhile."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    switched = [c for c in configs.values() if getattr(c, "_attn_implementation", None) == "sdpa"]
    try:
        for config in switched:
            config._attn_implementation = {"": NAME}  # this config alone, not those inside it
        yield
    finally:
        for config in switched:
            config._attn_implementation = {"": "sdpa"}
