"""aten's `_flash_attention_forward` and `_flash_attention_backward` for sequences end to end, in plain torch on a CPU.

Written from what the CUDA kernels document and check: arguments, shapes, order of memory, the log-sum-exp's layout, the
bounds of windows. Computed in float64; with 16-bit tensors, weights and slopes are rounded as the kernels round them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

FORWARD, BACKWARD = "_flash_attention_forward", "_flash_attention_backward"


@contextmanager
def kernels_on_cpu(forward: Callable[..., Any], backward: Callable[..., Any]) -> Iterator[None]:
    """Inside, torch's two operators run these functions for CPU tensors; outside, it has none for them."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(FORWARD, forward, "CPU")
        library.impl(BACKWARD, backward, "CPU")
        yield


def forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None, block_table: Tensor | None = None, num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    assert (dropout_p, return_debug_mask) == (0.0, False)
    assert seqused_k is alibi_slopes is block_table is num_splits is None
    _check(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
    exact = query.dtype == torch.float64
    out = torch.empty_like(query)
    sums = torch.empty(query.shape[1], len(query), dtype=torch.float64 if exact else torch.float32)
    for rows, keys in _sequences(cum_seq_q, cum_seq_k):
        q, k, v = (x.double() for x in _by_head(query[rows], key[keys], value[keys]))
        scores = _scores(q, k, scale, is_causal, window_size_left, window_size_right)
        peak = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.sum(-1, keepdim=True)
        weights = (scores - peak.clamp_min(-1e30)).exp()
        total = weights.sum(-1, keepdim=True)
        found = _rounded(weights, query) @ v / total
        out[rows] = found.masked_fill(total == 0, 0.0).transpose(0, 1).to(out.dtype)
        sums[:, rows] = (total.log() + peak).masked_fill(total == 0, torch.inf).squeeze(-1).to(sums.dtype)
    nothing = torch.empty(0)
    return out, sums, torch.zeros(2, dtype=torch.uint64), nothing, nothing


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Tensor,
    cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool, _rng: Tensor, _unused: Tensor, *,
    scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert dropout_p == 0.0
    _check(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
    assert out.dtype == grad_out.dtype == query.dtype
    assert out.shape == grad_out.shape == query.shape
    assert logsumexp.shape == (query.shape[1], len(query))
    assert logsumexp.is_contiguous()
    d_q = torch.empty_like(query)
    d_k, d_v = torch.zeros_like(key), torch.zeros_like(value)
    for rows, keys in _sequences(cum_seq_q, cum_seq_k):
        q, k, v = (x.double() for x in _by_head(query[rows], key[keys], value[keys]))
        grad, result = (x[rows].transpose(0, 1).double() for x in (grad_out, out))
        scores = _scores(q, k, scale, is_causal, window_size_left, window_size_right)
        weights = (scores - logsumexp[:, rows, None]).exp()
        slopes = weights * (grad @ v.transpose(1, 2) - (grad * result).sum(-1, keepdim=True))
        slopes = _rounded(slopes, query)
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        d_q[rows] = (slopes @ k * factor).transpose(0, 1).to(d_q.dtype)
        d_k[keys] = _by_key_head(slopes.transpose(1, 2) @ q * factor, key).to(d_k.dtype)
        d_v[keys] = _by_key_head(_rounded(weights, query).transpose(1, 2) @ grad, key).to(d_v.dtype)
    return d_q, d_k, d_v


def _check(q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, max_q: int, max_k: int) -> None:
    assert q.dtype == k.dtype == v.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert k.shape == v.shape
    assert q.shape[2] == k.shape[2]
    assert q.shape[2] % 8 == 0 == q.shape[1] % k.shape[1]
    for starts, longest, tokens in ((starts_q, max_q, len(q)), (starts_k, max_k, len(k))):
        assert starts.dtype == torch.int32
        assert starts.is_contiguous()
        assert starts.tolist()[0] == 0
        assert starts.tolist()[-1] == tokens
        assert int(starts.diff().max()) <= longest
    assert len(starts_q) == len(starts_k) > 1
    assert max_q > 1, "the CUDA kernel makes another case of this"


def _sequences(starts_q: Tensor, starts_k: Tensor) -> Iterator[tuple[slice, slice]]:
    for (low, high), (first, last) in zip(pairwise(starts_q.tolist()), pairwise(starts_k.tolist()), strict=True):
        yield slice(low, high), slice(first, last)


def _by_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    repeats = q.shape[1] // k.shape[1]
    return q.transpose(0, 1), *(x.transpose(0, 1).repeat_interleave(repeats, 0) for x in (k, v))


def _by_key_head(x: Tensor, like: Tensor) -> Tensor:
    """[H, K, D] of all query heads as [K, Hkv, D]."""
    return x.unflatten(0, (like.shape[1], -1)).sum(1).transpose(0, 1)


def _scores(q: Tensor, k: Tensor, scale: float | None, causal: bool, left: int | None, right: int | None) -> Tensor:
    """[H, Q, K]; the last query is level with the last key."""
    count, keys = q.shape[1], k.shape[1]
    level = torch.arange(count)[:, None] + keys - count
    column = torch.arange(keys)
    left, right = -1 if left is None else left, 0 if causal else -1 if right is None else right
    hidden = torch.zeros(count, keys, dtype=torch.bool)
    if left >= 0:
        hidden |= column < level - left
    if right >= 0:
        hidden |= column > level + right
    scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill(hidden, -torch.inf)


def _rounded(x: Tensor, like: Tensor) -> Tensor:
    return x.to(like.dtype).double() if like.dtype.itemsize == 2 else x


def flash_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, starts_q: Tensor, starts_k: Tensor, _q: int, _k: int, _p: float,
    causal: bool, _: bool, *, scale: float, window_size_left: int, window_size_right: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The forward by torch's own flash attention for a CPU, one sequence at a time; windows it has none."""
    assert (window_size_left, window_size_right) == (-1, 0 if causal else -1)
    out, sums = torch.empty_like(query), torch.empty(query.shape[1], len(query))
    for rows, keys in _sequences(starts_q, starts_k):
        q, k, v = (x.unsqueeze(0) for x in _by_head(query[rows], key[keys], value[keys]))
        found, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=causal, scale=scale
        )
        out[rows], sums[:, rows] = found[0].transpose(0, 1), total[0]
    nothing = torch.empty(0)
    return out, sums, torch.zeros(2, dtype=torch.uint64), nothing, nothing


def flash_backward_on_cpu(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, starts_q: Tensor,
    starts_k: Tensor, _q: int, _k: int, _p: float, causal: bool, _s: Tensor, _u: Tensor, *, scale: float, **_: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Its backward, from the output and the log-sum-exp that it is given."""
    d_q, d_k, d_v = (torch.zeros_like(x) for x in (query, key, value))
    for rows, keys in _sequences(starts_q, starts_k):
        q, k, v = (x.unsqueeze(0) for x in _by_head(query[rows], key[keys], value[keys]))
        around = [x[rows].transpose(0, 1).unsqueeze(0) for x in (grad, out)]
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            around[0], q, k, v, around[1], sums[None, :, rows], 0.0, causal, scale=scale
        )
        d_q[rows] = found[0][0].transpose(0, 1)
        d_k[keys], d_v[keys] = (_by_key_head(x[0], key) for x in found[1:])
    return d_q, d_k, d_v
