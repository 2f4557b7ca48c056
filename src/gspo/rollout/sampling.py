"""From logits to drawn tokens: keyed noise, the sampled distribution, and its log-probs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from gspo.types import Sampling

_BLOCK = 256


def noise_key(seed: int, step: int, slot: int, sample: int, turn: int) -> tuple[int, ...]:
    """What names a response's stream of noise; a turn of a conversation after the first has one of its own."""
    return (seed, step, slot, sample, turn) if turn else (seed, step, slot, sample)


def uniforms(seed: int, step: int, slot: int, sample: int, count: int, *, turn: int = 0) -> NDArray[np.float64]:
    """The noise of one response: entry t in [0, 1) draws its token at position t.

    The stream is named by its arguments alone (Philox, a counter-based generator), and a longer one begins
    with the shorter: neither the order of execution nor `count` changes what a position gets.
    """
    key = np.random.SeedSequence(noise_key(seed, step, slot, sample, turn))
    return np.random.Generator(np.random.Philox(key)).random(count)


class Drawn(NamedTuple):
    """One token per row, its float32 log-prob, and the tokens that it was drawn among; None for all of them."""

    tokens: Int[Tensor, "B"]
    logprobs: Float[Tensor, "B"]
    kept: Bool[Tensor, "B V"] | None


def draw(logits: Float[Tensor, "B V"], noise: Float[Tensor, "B"], sampling: Sampling) -> Drawn:
    """One token per row, and its log-prob in the distribution that it was drawn from.

    The distribution is softmax(logits / temperature) restricted by top-k, top-p and min-p, in that order, and
    renormalised. At temperature 0 the most likely token is taken; a point mass has log-prob 0 whatever the
    model thinks, so what is reported is the model's own at temperature 1. Rows with NaN or +inf among their
    logits get a non-finite log-prob.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
        return Drawn(tokens, logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1), None)
    if sampling.truncated:
        logits = truncate(logits / sampling.temperature, sampling)
        return Drawn(*_inverse_cdf(logits, noise, 1.0), logits > -torch.inf)
    return Drawn(*_inverse_cdf(logits, noise, sampling.temperature), None)


def fetch(drawn: Drawn, counted: bool) -> list[tuple[int, float, int]]:
    """Tokens, log-probs and how many tokens were kept (0 if not `counted`) on the host, in one transfer.

    (float64 holds every id exactly.)
    """
    counts = drawn.kept.sum(-1) if counted and drawn.kept is not None else torch.zeros_like(drawn.tokens)
    columns = torch.stack([drawn.tokens.double(), drawn.logprobs.double(), counts.double()]).tolist()
    return [(int(token), logprob, int(count)) for token, logprob, count in zip(*columns, strict=True)]


def truncate(logits: Float[Tensor, "B V"], sampling: Sampling) -> Float[Tensor, "B V"]:
    """Tokens outside the kept support set to -inf; the most likely token is always kept."""
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p < 1:
        logits = logits.masked_fill(~_nucleus(logits.softmax(-1), sampling.top_p), -torch.inf)
    if sampling.min_p > 0:
        floor = logits.amax(-1, keepdim=True) + float(np.log(sampling.min_p))
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return logits


def _nucleus(probs: Float[Tensor, "B V"], top_p: float) -> Bool[Tensor, "B V"]:
    """True on the most likely tokens up to the one that brings their sum to `top_p`; of equals the first ids."""
    rows, size = probs.shape
    candidates, ids = probs, torch.arange(size, device=probs.device).expand(rows, -1)
    if probs.device.type == "cpu":
        # All tokens below this share have less than 1 - top_p together, so that none is kept, and sorting a whole
        # vocabulary is slow here. On a GPU it is fast, and counting them would wait for the device.
        row, column = (probs >= (1 - top_p) / size).nonzero(as_tuple=True)
        counts = torch.bincount(row, minlength=rows)
        place = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
        candidates = probs.new_zeros(rows, int(counts.max()))
        candidates[row, place] = probs[row, column]
        ids = torch.full(candidates.shape, size).index_put_((row, place), column)
    ordered, order = candidates.sort(descending=True, stable=True)
    kept = (ordered.cumsum(-1) - ordered < top_p) & (ordered > 0)
    # The column behind the vocabulary takes what only fills the rows.
    return kept.new_zeros(rows, size + 1).scatter_(-1, ids.gather(-1, order), kept)[:, :size]


def _inverse_cdf(
    logits: Float[Tensor, "B V"], noise: Float[Tensor, "B"], temperature: float
) -> tuple[Int[Tensor, "B"], Float[Tensor, "B"]]:
    """The first token at which the cumulated probability exceeds the noise.

    One exponential per logit serves the normaliser and the search. The search goes through the sums of blocks
    first, then through one block: cumulating the whole vocabulary would cost more than the softmax, and lose
    the digits that a block keeps.
    """
    rows, size = logits.shape
    peak = logits.amax(-1, keepdim=True)
    weights = (logits - peak).div_(temperature).exp_()
    if size % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -size % _BLOCK))
    weights = weights.view(rows, -1, _BLOCK)
    ends = weights.sum(-1).double().cumsum(-1)
    total = ends[:, -1:]
    # A target below the last sum, and a remainder below the block's, keep rounding from pointing past the end
    # or at a token of probability zero.
    target = torch.minimum(noise.to(ends)[:, None] * total, total * (1 - 1e-15))
    block = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[-1] - 1)
    start = torch.where(block > 0, ends.gather(-1, (block - 1).clamp_(min=0)), 0.0)
    inside = weights.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].double().cumsum(-1)
    rest = torch.minimum(target - start, inside[:, -1:] * (1 - 1e-15))
    offset = torch.searchsorted(inside, rest, right=True).clamp_(max=_BLOCK - 1)
    tokens = (block * _BLOCK + offset).clamp_(max=size - 1)
    logprobs = (logits.gather(-1, tokens) - peak) / temperature - total.log()
    return tokens[:, 0], logprobs[:, 0].float()
