"""Forward passes in which a token's numbers do not depend on what is computed beside it, to the last bit.

A matrix product picks the order of its sums by its shape, so that a token decoded on its own and the same token inside
a whole row differ by rounding. Here every product has one shape, whoever asks: rows pass through a linear layer in
blocks of `ROWS`, queries attend in blocks of `QUERIES` to chunks of `KEYS` keys, counted from the first token of the
sequence, and what is missing is zero. The order of the sums is then a property of the token and its past alone.
(He and others, "Defeating Nondeterminism in LLM Inference", 2025, name the idea.)

Whether a library keeps its part, the same sums for the same shape in whatever place of a block, is not promised
anywhere: `gspo.training.bitwise` tries it on the model and the machine at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface

from gspo.errors import BadInputError

NAME = "gspo_batch_invariant"

ROWS = 64
QUERIES = 16
KEYS = 64


@contextmanager
def batch_invariant(model: nn.Module) -> Iterator[None]:
    """Inside, the linear layers and the attention of `model` compute as described above.

    Sequences must begin at the first column, or be decoded over a cache, one token per row. Backward may run inside or
    outside; gradients are those of the plain operations, to rounding.
    """
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    switched = [c for c in configs.values() if getattr(c, "_attn_implementation", None) == "sdpa"]
    try:
        for config in switched:
            config._attn_implementation = {"": NAME}  # this config alone, not those inside it
        with _BlockedLinear():
            yield
    finally:
        for config in switched:
            config._attn_implementation = {"": "sdpa"}


class _BlockedLinear(TorchFunctionMode):
    """Stands in for `torch.nn.functional.linear`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is nn.functional.linear:
            return linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def linear(input: Float[Tensor, "*n K"], weight: Float[Tensor, "D K"], bias: Tensor | None = None) -> Tensor:
    """input @ weight.T + bias in blocks of `ROWS` rows, the last one filled up with zeros."""
    found: Tensor = _Linear.apply(input.reshape(-1, input.shape[-1]), weight, bias)  # type: ignore[no-untyped-call]
    return found.view(*input.shape[:-1], len(weight))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.has_bias = bias is not None
        out = rows.new_empty(len(rows), len(weight))
        for start in range(0, len(rows), ROWS):
            block = rows[start : start + ROWS]
            found = nn.functional.linear(_filled(block, 0, ROWS), weight, bias)
            out[start : start + ROWS] = found[: len(block)]
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        need_rows, need_weight, need_bias = ctx.needs_input_grad
        return (
            grad @ weight if need_rows else None,
            grad.t() @ rows if need_weight else None,
            grad.sum(0) if need_bias and ctx.has_bias else None,
        )


def attention(
    module: nn.Module,
    query: Float[Tensor, "B H S D"],
    key: Float[Tensor, "B Hkv L D"],
    value: Float[Tensor, "B Hkv L Dv"],
    attention_mask: Bool[Tensor, "B L"] | None,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Float[Tensor, "B S H Dv"], None]:
    """The function that `transformers` calls in each layer; queries are the last S positions of their sequences.

    `attention_mask`, from `_mask`, is given where a row's sequence begins later than in the first column. Raises
    BadInputError for windows, soft caps and sinks.
    """
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if settings.get(name) is not None:
            raise BadInputError(
                f"likelihoods.batch_invariant = true: {type(module).__name__} has {name}, which is not computed that "
                "way; set it to false"
            )
    rows, heads, length, dim = query.shape
    shared = key.shape[1]
    last = torch.full((rows,), key.shape[2] - 1, device=query.device)
    if attention_mask is not None:
        starts = (~attention_mask).sum(-1)
        key, value, last = _from_the_start(key, starts), _from_the_start(value, starts), last - starts
    positions = last[:, None] - torch.arange(length - 1, -1, -1, device=query.device)
    # Position by position, the query heads of a group side by side: later chunks of keys concern the end alone.
    groups = heads // shared
    packed = query.view(rows, shared, groups, length, dim).transpose(2, 3).reshape(rows * shared, length * groups, dim)
    asked = positions.repeat_interleave(groups, dim=1).repeat_interleave(shared, dim=0)
    scale = dim**-0.5 if scaling is None else scaling
    out = _Attention.apply(packed, key.flatten(0, 1), value.flatten(0, 1), asked, scale)  # type: ignore[no-untyped-call]
    out = out.view(rows, shared, length, groups, -1).transpose(1, 2)
    return out.reshape(rows, length, heads, -1), None


def _mask(*, attention_mask: Tensor | None, q_length: int, **_: Any) -> Tensor | None:
    """Padding matters in a decode step alone: to the right of a sequence causality hides it."""
    return attention_mask if q_length == 1 else None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _mask)


def _from_the_start(states: Tensor, starts: Int[Tensor, "B"]) -> Tensor:
    """Each row moved so that its first token is in the first column; what follows its last is never looked at."""
    length = states.shape[2]
    columns = torch.arange(length, device=states.device) + starts[:, None]
    index = columns.clamp_(max=length - 1)[:, None, :, None].expand(states.shape)
    return states.gather(2, index)


class _Attention(torch.autograd.Function):
    """q [Z, M, D], k [Z, L, D], v [Z, L, Dv], position of each query [Z, M] -> [Z, M, Dv]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float) -> Tensor:
        out, norms = _attend(q, k, v, positions, scale)
        ctx.save_for_backward(q, k, v, positions, out, norms)
        ctx.scale = scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """With w = exp(s - norm): dv = w' g, ds = w (g v' - g . out), dq = scale ds k, dk = scale ds' q."""
        q, k, v, positions, out, norms = ctx.saved_tensors
        scores = (
            torch.bmm(q, k.transpose(1, 2)).mul_(ctx.scale).masked_fill_(_later(positions, 0, k.shape[1]), -torch.inf)
        )
        weights = scores.sub_(norms).exp_()
        slopes = torch.bmm(grad, v.transpose(1, 2)).sub_((grad * out).sum(-1, keepdim=True)).mul_(weights)
        slopes.mul_(ctx.scale)
        return (
            torch.bmm(slopes, k),
            torch.bmm(slopes.transpose(1, 2), q),
            torch.bmm(weights.transpose(1, 2), grad),
            None,
            None,
        )


def _attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output [Z, M, Dv] and log-sum-exp [Z, M, 1] of the scores; queries lie in the order of their positions."""
    count = q.shape[1]
    q = _in_blocks(_filled(q, 1, QUERIES))
    # The filling takes the last query's place, so that it adds no chunk.
    places = _in_blocks(torch.cat([positions, positions[:, -1:].expand(-1, -count % QUERIES)], 1))
    reach = places.amax((0, 2)).tolist()
    k, v = _filled(k, 1, KEYS), _filled(v, 1, KEYS)
    peak = q.new_full((*q.shape[:3], 1), -torch.inf)
    total = torch.zeros_like(peak)
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    for start in range(0, max(reach) + 1, KEYS):
        first = next(block for block, farthest in enumerate(reach) if farthest >= start)
        keys, values = k[:, None, start : start + KEYS], v[:, None, start : start + KEYS]
        scores = torch.matmul(q[:, first:], keys.transpose(-1, -2)).mul_(scale)
        scores.masked_fill_(_later(places[:, first:], start, KEYS), -torch.inf)
        before, highest = peak[:, first:], torch.maximum(peak[:, first:], scores.amax(-1, keepdim=True))
        weights, kept = scores.sub_(highest).exp_(), (before - highest).exp_()
        total[:, first:] = total[:, first:] * kept + weights.sum(-1, keepdim=True)
        out[:, first:] = out[:, first:] * kept + torch.matmul(weights, values)
        peak[:, first:] = highest
    out.div_(total)
    return out.flatten(1, 2)[:, :count], total.log_().add_(peak).flatten(1, 2)[:, :count]


def _later(positions: Int[Tensor, "*n"], start: int, count: int) -> Bool[Tensor, "*n count"]:
    """True where a key, of those from position `start` on, comes after the query."""
    return torch.arange(start, start + count, device=positions.device) > positions[..., None]


def _in_blocks(x: Tensor) -> Tensor:
    return x.view(len(x), -1, QUERIES, *x.shape[2:])


def _filled(x: Tensor, dim: int, to: int) -> Tensor:
    """`x` with zeros at the end of `dim`, up to a multiple of `to`."""
    missing = -x.shape[dim] % to
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)
