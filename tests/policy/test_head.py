import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.policy import head as heads
from gspo.policy.head import Head, Support, agrees, logprobs_from_logits, token_logprobs

M, D, V = 11, 6, 23


def random_head(*, bias: bool, scale: float, softcap: float | None, dtype=torch.float32) -> Head:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(V, D, generator=generator).to(dtype).requires_grad_()
    offset = torch.randn(V, generator=generator).to(dtype).requires_grad_() if bias else None
    return Head(weight, offset, scale, softcap)


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(M, D, generator=generator).to(dtype).requires_grad_()
    ids = torch.randint(0, V, (M,), generator=generator)
    return hidden, ids, torch.randn(2, M, generator=generator)


def kept_support(ids: torch.Tensor) -> tuple[Support, torch.Tensor]:
    """A ragged support of 2 to 9 tokens that holds the target, and the same as a mask [M, V]."""
    generator = torch.Generator().manual_seed(3)
    kept = torch.zeros(M, V, dtype=torch.bool)
    for row in range(M):
        count = int(torch.randint(1, 9, (1,), generator=generator))
        kept[row, torch.randperm(V, generator=generator)[:count]] = True
        kept[row, ids[row]] = True
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), kept.sum(1).cumsum(0)])
    return Support(kept.nonzero()[:, 1], offsets), kept


def in_float64(head: Head, hidden, ids, temperature: float, kept=None):
    """Log-probs, entropies and leaf tensors of a plain float64 derivation."""
    h, w = hidden.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()
    b = None if head.bias is None else head.bias.detach().double().requires_grad_()
    z = h @ w.t() + (0 if b is None else b)
    z = z * head.scale
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    z = z / temperature
    if kept is None:
        kept = torch.ones_like(z, dtype=torch.bool)
    probs = torch.where(kept, (z - z.detach().max()).exp(), 0.0)
    probs = probs / probs.sum(1, keepdim=True)
    logs = torch.where(kept, torch.where(kept, probs, 1.0).log(), 0.0)
    return logs.gather(1, ids[:, None]).squeeze(1), -(probs * logs).sum(1), [h, w, b]


@pytest.mark.parametrize(("tile", "tokens"), [(1, 1), (25, 4), (90, 2048), (5000, 2048)])
@pytest.mark.parametrize("supported", [False, True])
@pytest.mark.parametrize(
    ("bias", "scale", "softcap", "temperature"),
    [(False, 1.0, None, 1.0), (True, 0.3, None, 0.7), (False, 1.0, 2.0, 1.3), (True, 2.0, 3.0, 0.5)],
)
def test_values_and_gradients_are_those_of_float64(
    monkeypatch, bias, scale, softcap, temperature, supported, tile, tokens
):
    monkeypatch.setattr(heads, "TOKENS", tokens)
    head = random_head(bias=bias, scale=scale, softcap=softcap)
    hidden, ids, weights = inputs()
    support, kept = kept_support(ids) if supported else (None, None)
    found = token_logprobs(head, hidden, ids, temperature=temperature, support=support, tile=tile)
    *expected, leaves = in_float64(head, hidden, ids, temperature, kept)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=2e-6)
    (found[0] @ weights[0] + found[1] @ weights[1]).backward()
    (expected[0] @ weights[0].double() + expected[1] @ weights[1].double()).backward()
    for ours, theirs in zip([hidden, head.weight, head.bias], leaves, strict=True):
        if ours is not None:
            torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)


def test_two_tokens_by_hand():
    # Logits 0 and ln 3 at temperature 1: probabilities 1/4 and 3/4.
    head = Head(torch.tensor([[0.0], [1.0986123]]))
    logprobs, entropy = token_logprobs(head, torch.ones(2, 1), torch.tensor([0, 1]), temperature=1.0)
    assert logprobs.tolist() == pytest.approx([-1.3862944, -0.2876821], abs=1e-6)
    assert entropy.tolist() == pytest.approx([0.5623351, 0.5623351], abs=1e-6)
    # At temperature 2 the odds are 1 to sqrt(3).
    logprobs, _ = token_logprobs(head, torch.ones(1, 1), torch.tensor([0]), temperature=2.0)
    assert logprobs.item() == pytest.approx(-1.0050525, abs=1e-6)


def test_without_entropy_it_is_zero_and_carries_no_gradient():
    head = random_head(bias=False, scale=1.0, softcap=None)
    hidden, ids, _ = inputs()
    logprobs, entropy = token_logprobs(head, hidden, ids, temperature=1.0, entropy=False)
    assert not entropy.any()
    assert logprobs.requires_grad
    assert not entropy.requires_grad


def test_a_frozen_head_gets_no_gradient_and_hidden_does():
    head = Head(random_head(bias=False, scale=1.0, softcap=None).weight.detach())
    hidden, ids, _ = inputs()
    token_logprobs(head, hidden, ids, temperature=1.0)[0].sum().backward()
    assert hidden.grad.abs().sum() > 0
    assert head.weight.grad is None


def test_bfloat16_inputs_make_float32_logits():
    head = random_head(bias=False, scale=1.0, softcap=None, dtype=torch.bfloat16)
    hidden, ids, _ = inputs(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, _ = token_logprobs(head, hidden, ids, temperature=1.0)
    expected, _, _ = in_float64(head, hidden, ids, 1.0)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=2e-6)
    logprobs.sum().backward()
    assert hidden.grad.dtype == head.weight.grad.dtype == torch.bfloat16


def test_a_target_outside_its_support_has_probability_zero():
    head = random_head(bias=False, scale=1.0, softcap=None)
    hidden, _, _ = inputs()
    support = Support(torch.tensor([1, 2]), torch.tensor([0, 2]))
    logprobs, entropy = token_logprobs(head, hidden[:1], torch.tensor([5]), temperature=1.0, support=support)
    assert logprobs.item() == -torch.inf
    assert 0 < entropy.item() < 0.6932


def test_no_tokens_give_no_scores():
    head = random_head(bias=False, scale=1.0, softcap=None)
    hidden = torch.zeros(0, D, requires_grad=True)
    logprobs, entropy = token_logprobs(head, hidden, torch.zeros(0, dtype=torch.long), temperature=1.0)
    assert logprobs.shape == entropy.shape == (0,)


@settings(deadline=None)
@given(st.floats(-3e4, 3e4), st.floats(0.1, 3.0))
def test_large_logits_stay_finite(size, temperature):
    head = Head(torch.tensor([[size], [0.0], [1.0]]).requires_grad_())
    logprobs, entropy = token_logprobs(head, torch.ones(1, 1), torch.tensor([1]), temperature=temperature)
    logprobs.sum().backward()
    assert torch.isfinite(logprobs).all()
    assert torch.isfinite(entropy).all()
    assert torch.isfinite(head.weight.grad).all()


@pytest.mark.parametrize("supported", [False, True])
def test_logits_give_the_same(supported):
    head = random_head(bias=True, scale=0.5, softcap=2.0)
    hidden, ids, _ = inputs()
    support, _ = kept_support(ids) if supported else (None, None)
    chunked = token_logprobs(head, hidden, ids, temperature=0.8, support=support)
    plain = logprobs_from_logits(head.logits(hidden), ids, temperature=0.8, support=support)
    for a, b in zip(chunked, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_head_that_leaves_something_out_is_found():
    head = random_head(bias=True, scale=0.5, softcap=2.0)
    hidden, _, _ = inputs()
    logits = head.logits(hidden)
    assert agrees(head, hidden, logits)
    assert not agrees(Head(head.weight, None, 0.5, 2.0), hidden, logits)
    assert not agrees(Head(head.weight, head.bias, 1.0, 2.0), hidden, logits)
    assert not agrees(Head(head.weight, head.bias, 0.5, None), hidden, logits)
    assert not agrees(Head(head.weight, head.bias, 0.5, 2.0), hidden, logits[:, :-1])


def test_memory_does_not_grow_with_the_number_of_tokens():
    # Every tensor that torch makes during both passes is seen; none may have room for all tokens' logits.
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, torch.Tensor):
                    self.size = max(self.size, tensor.numel())
            return out

    tokens, vocabulary, tile = 64, 400, 1600
    head = Head(torch.randn(vocabulary, 2).requires_grad_())
    hidden = torch.randn(tokens, 2, requires_grad=True)
    with Largest() as seen:
        logprobs, entropy = token_logprobs(
            head, hidden, torch.zeros(tokens, dtype=torch.long), temperature=1.0, tile=tile
        )
        (logprobs + entropy).sum().backward()
    assert seen.size == tile


def test_a_support_of_three_of_five_tokens_by_hand():
    """Shares .4 .3 .15 of a temperature-2 distribution over what top-p .8 kept; gradient onehot - p, halved."""
    shares = torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1])
    hidden = (shares.log() * 2 + 3)[None].requires_grad_()
    support = Support(torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor([0, 3]))
    logprobs, entropy = token_logprobs(Head(torch.eye(5)), hidden, torch.tensor([3]), temperature=2.0, support=support)
    logprobs.sum().backward()
    assert logprobs.item() == pytest.approx(math.log(0.3 / 0.85), abs=1e-6)
    p = [0.4 / 0.85, 0.15 / 0.85, 0.3 / 0.85]
    assert entropy.item() == pytest.approx(-sum(x * math.log(x) for x in p), abs=1e-6)
    assert hidden.grad[0].tolist() == pytest.approx([0, -p[0] / 2, -p[1] / 2, (1 - p[2]) / 2, 0], abs=1e-6)
