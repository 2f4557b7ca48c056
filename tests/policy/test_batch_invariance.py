"""Numbers that do not depend on what is computed beside them, against plain operations in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gspo.errors import BadInputError
from gspo.policy.batch_invariance import KEYS, attention, batch_invariant, linear
from tests.policy.tiny import tiny_model


def draw(*shape: int, seed: int = 0, **options) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **options)


def plain_attention(query, key, value, scale):
    """softmax(scale q k') v over a sequence's own past, keys repeated over query heads, in float64."""
    q, k, v = query.double(), key.double(), value.double()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = scale * q @ k.transpose(-1, -2)
    length, seen = scores.shape[-2:]
    later = torch.arange(seen) > torch.arange(seen - length, seen)[:, None]
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(1, 2)


@given(rows=st.integers(0, 150), seed=st.integers(0, 9), bias=st.booleans())
@settings(max_examples=20, deadline=None)
def test_a_linear_layers_rows_are_the_same_alone_and_together(rows, seed, bias):
    x, weight = draw(rows, 40, seed=seed), draw(24, 40, seed=seed + 1)
    offset = draw(24, seed=seed + 2) if bias else None
    whole = linear(x, weight, offset)
    assert whole.shape == (rows, 24)
    torch.testing.assert_close(
        whole.double(),
        nn.functional.linear(x.double(), weight.double(), None if offset is None else offset.double()),
        atol=1e-5,
        rtol=1e-5,
    )
    for row in range(0, rows, 37):
        assert torch.equal(linear(x[row], weight, offset), whole[row])
        assert torch.equal(linear(x[row : row + 3], weight, offset), whole[row : row + 3])


def test_the_gradient_of_a_linear_layer_is_that_of_the_plain_one():
    x, weight, bias = draw(2, 70, 12), draw(5, 12, seed=1), draw(5, seed=2)
    found, expected = [], []
    for function, kept in ((linear, found), (nn.functional.linear, expected)):
        inputs = [t.double().requires_grad_() for t in (x, weight, bias)]
        function(*inputs).sin().sum().backward()
        kept += [t.grad for t in inputs]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("length", [1, 5, KEYS, KEYS + 1, 3 * KEYS - 2])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
def test_attention_and_its_gradients_are_the_plain_ones(length, heads):
    asking, shared = heads
    shapes = ((2, asking, length, 8), (2, shared, length, 8), (2, shared, length, 6))
    inputs = [draw(*shape, seed=n, dtype=torch.float64).requires_grad_() for n, shape in enumerate(shapes)]
    found, _ = attention(nn.Identity(), *inputs, None, scaling=0.4)
    expected = plain_attention(*inputs, 0.4)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    weight = draw(*found.shape, seed=9, dtype=torch.float64)
    ours = torch.autograd.grad((found * weight).sum(), inputs)
    theirs = torch.autograd.grad((expected * weight).sum(), inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


def test_a_decoded_token_attends_as_it_does_in_its_whole_row():
    """Rows of 5 to 150 tokens, aligned at their ends as the cache keeps them, and each in a forward of its own."""
    lengths = (5, KEYS, KEYS + 3, 150)
    width = max(lengths)
    query, key, value = draw(4, 6, width, 16), draw(4, 2, width, 16, seed=1), draw(4, 2, width, 16, seed=2)
    seen = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    decoded, _ = attention(nn.Identity(), query[:, :, -1:], key, value, seen)
    for row, length in enumerate(lengths):
        whole, _ = attention(
            nn.Identity(), *(x[row : row + 1, :, -length:].contiguous() for x in (query, key, value)), None
        )
        assert torch.equal(decoded[row, 0], whole[0, -1])


def test_what_it_cannot_compute_is_refused_by_name():
    x = draw(1, 2, 3, 4)
    with pytest.raises(BadInputError, match=r"likelihoods\.batch_invariant = true: Identity has sliding_window"):
        attention(nn.Identity(), x, x, x, None, sliding_window=2)


def test_a_models_tokens_do_not_depend_on_their_neighbours_and_the_mode_ends():
    model = tiny_model("llama").eval()
    ids = torch.randint(3, 61, (5, 100), generator=torch.Generator().manual_seed(0))
    usual = model.config._attn_implementation
    with torch.no_grad():
        plain = model(ids).logits
        with batch_invariant(model):
            whole = model(ids).logits
            part = model(ids[3:4, :77]).logits
        assert torch.equal(part[0], whole[3, :77])
        torch.testing.assert_close(whole, plain, atol=1e-4, rtol=1e-4)
        assert torch.equal(model(ids).logits, plain)
    assert model.config._attn_implementation == usual
