from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gspo.rollout.attention import grouped_attention


def _plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention head by head in float64, [row, 1, head, dim]."""
    groups = query.shape[1] // key.shape[1]
    heads = []
    for head in range(query.shape[1]):
        scores = (query[:, head].double() @ key[:, head // groups].double().transpose(1, 2)) * scale
        if mask is not None:
            scores = scores.masked_fill(~mask[:, 0], -torch.inf)
        heads.append(scores.softmax(-1) @ value[:, head // groups].double())
    return torch.stack(heads, dim=2)


@pytest.mark.parametrize("key_heads", [1, 2, 6])
@pytest.mark.parametrize("masked", [False, True])
def test_a_decode_step_equals_attention_head_by_head(key_heads: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 6, 1, 8, generator=generator)
    # Slices of larger buffers, and values narrower than keys, as caches and families have them.
    key = torch.randn(4, key_heads, 20, 8, generator=generator)[:3, :, 5:16]
    value = torch.randn(4, key_heads, 20, 4, generator=generator)[:3, :, 5:16]
    mask = torch.ones(3, 1, 1, 11, dtype=torch.bool)
    mask[0, ..., :4] = False
    module = nn.Module()
    module.num_key_value_groups = 6 // key_heads  # type: ignore[assignment]
    found, _ = grouped_attention(module, query, key, value, mask if masked else None, scaling=0.3, dropout=0.0)
    assert torch.allclose(found.double(), _plain(query, key, value, mask if masked else None, 0.3), atol=1e-6)
