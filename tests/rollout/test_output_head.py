"""The head's product in slices: the same values, and nothing left behind."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gspo.rollout import output_head
from gspo.rollout.output_head import sliced, sliced_product


class _Model:
    def __init__(self, head: nn.Module | None) -> None:
        self.head = head

    def get_output_embeddings(self) -> nn.Module | None:
        return self.head


@given(
    size=st.integers(1, 40), rows=st.integers(1, 5), width=st.integers(1, 16), bias=st.booleans(), seed=st.integers(0)
)
def test_slices_of_any_width_give_the_whole_product(size: int, rows: int, width: int, bias: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed % 2**32)
    hidden = torch.randn(rows, 1, 6, generator=generator)
    weight = torch.randn(size, 6, generator=generator)
    added = torch.randn(size, generator=generator) if bias else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_head, "SLICE", width)
        found = sliced_product(hidden, weight, added)
    expected = torch.einsum("rxd,vd->rxv", hidden.double(), weight.double()) + (0 if added is None else added.double())
    assert found.shape == (rows, 1, size)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_head_is_sliced_inside_and_as_before_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    head = nn.Linear(6, 10)
    calls: list[int] = []
    inner = output_head.sliced_product
    monkeypatch.setattr(output_head, "sliced_product", lambda *a: calls.append(1) or inner(*a))
    hidden = torch.randn(2, 6)
    with torch.no_grad(), sliced(_Model(head)):
        inside = head(hidden)
    assert calls == [1]
    torch.testing.assert_close(inside, head(hidden), rtol=1e-5, atol=1e-6)
    assert calls == [1]
    assert head(hidden).requires_grad


class _Scaled(nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(hidden)


@pytest.mark.parametrize("head", [_Scaled(6, 10), nn.Linear(6, 10).bfloat16(), None], ids=["own", "bfloat16", "none"])
def test_heads_of_another_kind_are_left_alone(head: nn.Module | None) -> None:
    with sliced(_Model(head)):
        assert head is None or "forward" not in vars(head)
