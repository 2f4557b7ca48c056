import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.policy import tiles as tiling
from gspo.policy.attention import layout_attention, use_layout
from gspo.policy.layout import TokenLayout, build_layout
from gspo.policy.tiles import plan_tiles
from tests.policy.dense import dense_attention, visible
from tests.policy.tiny import random_rollouts, tiny_model

groups = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(0, 14), min_size=1, max_size=4)), min_size=1, max_size=4
)
windows = st.none() | st.integers(1, 12)


def covered(layout: TokenLayout, window: int | None) -> torch.Tensor:
    """[N, N]: how often the tiles compute each pair."""
    size = layout.input_ids.numel()
    count = torch.zeros(size + 1, size + 1, dtype=torch.long)
    for tile in plan_tiles(layout, window):
        for block, (queries, keys) in enumerate(zip(tile.queries, tile.keys, strict=True)):
            mask = torch.ones(len(queries), len(keys), dtype=torch.bool)
            if tile.mask is not None:
                mask = tile.mask[min(block, len(tile.mask) - 1)]
            count[queries[:, None], keys[None, :]] += mask.long()
    return count[:size, :size]


@settings(deadline=None)
@given(groups, windows, st.sampled_from(["shared", "packed"]), st.sampled_from([(128, 1 << 18), (4, 64), (3, 7)]))
def test_tiles_cover_every_visible_pair_once_and_no_other(shape, window, kind, cut):
    layout = build_layout(random_rollouts(shape), kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "STRIP", cut[0])
        patch.setattr(tiling, "BATCH", cut[1])
        assert torch.equal(covered(layout, window), visible(layout, window).long())


def test_only_the_blocks_that_exist_are_computed():
    layout = build_layout(random_rollouts([(300, (100,) * 8)] * 2), "shared")
    computed = sum(
        tile.queries.shape[0] * tile.queries.shape[1] * tile.keys.shape[1] for tile in plan_tiles(layout, None)
    )
    needed = int(visible(layout, None).sum())
    assert computed < 1.3 * needed < 0.3 * layout.input_ids.numel() ** 2


class Layer(torch.nn.Module):
    """Stands for the attention module that transformers passes along."""


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize(("value_size", "strip"), [(8, 128), (8, 4), (5, 128), (5, 4)])
def test_values_and_gradients_are_those_of_dense_float64(
    monkeypatch, window, softcap, with_sinks, heads, value_size, strip
):
    # Values as wide as keys on a CPU go through torch's own kernel, where a tile is causal and nothing is capped.
    monkeypatch.setattr(tiling, "STRIP", strip)
    layout = build_layout(random_rollouts([(9, (6, 1, 10, 0)), (3, (4, 12)), (12, (2, 5))]), "shared")
    size, scale = layout.input_ids.numel(), 0.4
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads[0], size, 8), (1, heads[1], size, 8), (1, heads[1], size, value_size), (heads[0],)]
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    upstream = torch.randn(1, size, heads[0], value_size, generator=generator)
    if not with_sinks:
        leaves[3] = doubles[3] = None
    with use_layout(tiny_model("llama"), layout):
        found, _ = layout_attention(
            Layer(), *leaves[:3], None, scaling=scale, sliding_window=window, softcap=softcap, s_aux=leaves[3]
        )
        found.backward(upstream)
    expected = dense_attention(*doubles[:3], visible(layout, window), scale, softcap, doubles[3])
    expected.backward(upstream.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(leaves, doubles, strict=True):
        if ours is not None:
            torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=3e-6)


def test_the_model_is_left_as_it_was_even_by_an_error():
    model = tiny_model("llama")
    layout = build_layout(random_rollouts(), "shared")

    def fail() -> None:
        with use_layout(model, layout):
            assert model.config._attn_implementation == "gspo_layout"
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("padding", [0, 96 * 96])
def test_blocks_of_different_lengths_in_one_batch_give_the_same(monkeypatch, padding):
    layout = build_layout(random_rollouts([(9, (6, 1, 10, 0)), (3, (4, 12)), (12, (2, 5))]), "shared")
    monkeypatch.setattr(tiling, "CPU_CALL", padding)
    size, generator = layout.input_ids.numel(), torch.Generator().manual_seed(0)
    assert any((tile.queries == size).any() for tile in plan_tiles(layout, None)) == (padding > 0)
    leaves = [torch.randn(1, heads, size, 8, generator=generator).requires_grad_() for heads in (6, 2, 2)]
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    upstream = torch.randn(1, size, 6, 8, generator=generator)
    with use_layout(tiny_model("llama"), layout):
        found, _ = layout_attention(Layer(), *leaves, None)
        found.backward(upstream)
    expected = dense_attention(*doubles, visible(layout, None), 8**-0.5, None, None)
    expected.backward(upstream.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(leaves, doubles, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=3e-6)
