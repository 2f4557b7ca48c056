"""Attention over a layout by torch's varlen flash kernel: all blocks in one or two calls, and no scores in memory.

Without a window a layer takes two calls. The first is causal over each prompt and each response on its own; in the
second the responses of a prompt, end to end, see all of it. They are joined through their log-sum-exp, as tiles are.
Where a sliding window cuts the prompt off, one call does: each response's keys are the end of its prompt that its
window reaches, copied before its own, and the last query is level with the last key.

The kernel's backward pass makes its weights anew as exp(s - L), and takes the row sums of gradient * output: given L
and the output over all calls (and the layer's sink), each call returns its own share of the gradients (Dao,
FlashAttention-2, arXiv 2307.08691, algorithm 2).

It is called as `torch.nn.attention.varlen` does. What is assumed, and tried by `varlen_proof` before use: sequences
lie end to end, [tokens, heads, size]; query head h reads key head h // (H / Hkv); the log-sum-exp is natural, of
scaled scores, float32 [H, tokens]; the last query of a sequence is level with its last key; a window's left side
counts the keys before that one. Sequences without a token are never given: versions differ in what they do with them.
dq, and the dk and dv of copied keys, would be summed in no fixed order; the backward pass asks for a fixed one, so that
the same pass gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gspo.policy.layout import Span, TokenLayout

DTYPES = (torch.bfloat16, torch.float16)

LARGEST_HEAD = 256

Places = slice | Int[Tensor, "_"]
"""Positions of the flattened forward; a slice where they follow each other."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of the kernel: `S` sequences, each of some queries and the keys that they see.

    `query_starts` and `key_starts` say where each begins among `queries` and `keys`, and where the last one ends. A
    query sees `left` keys before the one that it is level with, and `right` after it; -1: all of them.
    """

    queries: Places
    keys: Places
    query_starts: Int[Tensor, "S1"]
    key_starts: Int[Tensor, "S1"]
    longest_query: int
    longest_key: int
    left: int
    right: int


def unserved(query: Float[Tensor, "1 H N D"], value: Float[Tensor, "1 Hkv N Dv"], softcap: float | None) -> str | None:
    """Why the kernel does not serve such tensors; None where it does.

    Queries and keys may have another dtype than values: the rotary embedding leaves them in float32 under autocast.
    They are cast to that of the values, as torch's own attention does under autocast.
    """
    if (reason := unfit_device(query.device)) is not None:
        return reason
    if value.dtype not in DTYPES:
        return f"its dtype is {str(value.dtype).removeprefix('torch.')}"
    if softcap is not None:
        return "its scores are soft-capped"
    size, value_size = query.shape[-1], value.shape[-1]
    if size != value_size or size % 8 or size > LARGEST_HEAD:
        return f"its heads are {size} (keys) and {value_size} (values) wide"
    return None


def unfit_device(device: torch.device) -> str | None:
    """Why there is no such kernel on a device; None where there may be."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "not an NVIDIA GPU"
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    return None


def plan_calls(layout: TokenLayout, window: int | None) -> list[Call]:
    """The calls of one layer, for shared and packed layouts. The first has every position as a query, in order."""
    pieces = [(piece.prompt, [s for _, s in piece.responses if s.length]) for piece in layout.pieces]
    longest = max(prompt.length + max([s.length for s in own], default=0) for prompt, own in pieces)
    device = layout.input_ids.device
    if window is not None and window < longest:
        sequences = []
        for prompt, responses in pieces:
            end = min(prompt.length, window - 1)
            seen = Span(prompt.stop - end, end)
            sequences += [(prompt, [prompt]), *((own, [seen, own]) for own in responses)]
        return [_call(sequences, window - 1, 0, device)]
    alone = [(span, [span]) for prompt, responses in pieces for span in (prompt, *responses)]
    across = [
        (Span(own[0].start, own[-1].stop - own[0].start), [prompt]) for prompt, own in pieces if own
    ]  # responses without a token take no place between the others
    calls = [_call(alone, -1, 0, device)]
    return [*calls, _call(across, -1, -1, device)] if across else calls


def _call(sequences: list[tuple[Span, list[Span]]], left: int, right: int, device: torch.device) -> Call:
    queries = [span for span, _ in sequences]
    lengths = [span.length for span in queries]
    seen = [sum(span.length for span in keys) for _, keys in sequences]
    return Call(
        _places(queries, device),
        _places([span for _, keys in sequences for span in keys], device),
        _starts(lengths, device),
        _starts(seen, device),
        # Of queries that are all alone in their sequences the kernel makes another case, for decoding.
        max(2, *lengths),
        max(seen),
        left,
        right,
    )


def _places(spans: list[Span], device: torch.device) -> Places:
    positions = np.concatenate([np.arange(span.start, span.stop) for span in spans])
    if (np.diff(positions) == 1).all():
        return slice(int(positions[0]), int(positions[-1]) + 1)
    return torch.from_numpy(positions).to(device)


def _starts(lengths: list[int], device: torch.device) -> Int[Tensor, "S1"]:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class VarlenAttention:
    """One layer's attention by calls of the kernel."""

    calls: list[Call]
    scale: float

    def forward(
        self,
        q: Float[Tensor, "1 H N D"],
        k: Float[Tensor, "1 Hkv N D"],
        v: Float[Tensor, "1 Hkv N D"],
        sinks: Float[Tensor, "H"] | None,
    ) -> tuple[Float[Tensor, "1 N H D"], tuple[Tensor, ...]]:
        """The output, and what `backward` needs of this pass."""
        q, k, v = (x.squeeze(0).transpose(0, 1).to(v.dtype).contiguous() for x in (q, k, v))
        own, *others = self.calls
        out, total = _kernel(q, k, v, own, self.scale)
        for call in others:
            found, sums = _kernel(q, k, v, call, self.scale)
            seen = total[:, call.queries]
            joined = torch.logaddexp(seen, sums)
            before, here = ((part - joined).exp_().t().unsqueeze(-1) for part in (seen, sums))
            out[call.queries] = (out[call.queries] * before).add_(found * here).to(out.dtype)
            total[:, call.queries] = joined
        if sinks is not None:
            with_sink = torch.logaddexp(total, sinks.to(total.dtype).unsqueeze(1))
            out = (out * (total - with_sink).exp().t().unsqueeze(-1)).to(out.dtype)
            total = with_sink
        return out.unsqueeze(0), (q, k, v, out, total)

    def backward(
        self, grad: Float[Tensor, "1 N H D"], saved: tuple[Tensor, ...], sinks: Float[Tensor, "H"] | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The gradients of queries, keys, values and sinks; autograd rounds each to the dtype of what it belongs to."""
        q, k, v, out, total = saved
        grad = grad.squeeze(0).to(out.dtype)
        d_sinks = None
        if sinks is not None:
            delta = (grad.to(total.dtype) * out).sum(-1).t()
            d_sinks = -((sinks.to(total.dtype).unsqueeze(1) - total).exp() * delta).sum(1).to(sinks.dtype)
        d_q, d_k, d_v = (torch.zeros_like(x, dtype=total.dtype) for x in (q, k, v))
        with _in_fixed_order():
            for call in self.calls:
                found = _kernel_backward(grad, q, k, v, out, total, call, self.scale)
                _add(d_q, call.queries, found[0])
                _add(d_k, call.keys, found[1])
                _add(d_v, call.keys, found[2])
        d_q, d_k, d_v = (x.transpose(0, 1).unsqueeze(0) for x in (d_q, d_k, d_v))
        return d_q, d_k, d_v, d_sinks


@contextmanager
def _in_fixed_order() -> Iterator[None]:
    """Atomic additions are replaced meanwhile: a run that is resumed must not differ by the order of a sum."""
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def _add(x: Tensor, places: Places, found: Tensor) -> None:
    """The same position may come several times: the end of a prompt, before each response."""
    if isinstance(places, slice):
        x[places] += found
    else:
        x.index_add_(0, places, found.to(x.dtype))


def _kernel(q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float) -> tuple[Tensor, Tensor]:
    """Output [queries, H, D] and log-sum-exp [H, queries] of one call."""
    out, sums, *_ = torch.ops.aten._flash_attention_forward(
        q[call.queries], k[call.keys], v[call.keys], *_shape(call), return_debug_mask=False, **_bounds(call, scale)
    )
    if sums.shape != (out.shape[1], out.shape[0]):  # one padded by sequence would be read out of its bounds
        raise RuntimeError(f"its log-sum-exp is {list(sums.shape)} for an output of {list(out.shape)}")
    return out, sums


def _kernel_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, call: Call, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Its share of the gradients; output and log-sum-exp are those over all calls."""
    rows, keys = call.queries, call.keys
    # Read as if in order: other strides would give wrong numbers, not an error.
    total = total[:, rows].contiguous()
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    d_q, d_k, d_v = torch.ops.aten._flash_attention_backward(
        grad[rows].contiguous(), q[rows], k[keys], v[keys], out[rows], total, *_shape(call), *no_dropout,
        **_bounds(call, scale),
    )  # fmt: skip
    return d_q, d_k, d_v


def _shape(call: Call) -> tuple[Tensor, Tensor, int, int, float, bool]:
    causal = (call.left, call.right) == (-1, 0)
    return call.query_starts, call.key_starts, call.longest_query, call.longest_key, 0.0, causal


def _bounds(call: Call, scale: float) -> dict[str, float]:
    return {"scale": scale, "window_size_left": call.left, "window_size_right": call.right}
