"""From hidden states to log-probs and entropy, without ever holding logits for all tokens.

For a token with hidden state h, the logits are z = cap * tanh(scale * (W h + b) / cap) / temperature, where
scale and cap come from the model's config. With p = softmax(z) over the support,

    log-prob = z_target - logsumexp(z)          entropy = logsumexp(z) - sum_j p_j z_j

Work goes through tiles of logits, many tokens by a part of the vocabulary: so W and its gradient are read and written
once for all those tokens, and a tile stays in the cache. Sums over the vocabulary are carried from tile to tile,
relative to the largest logit so far. The backward pass computes a tile's logits again: one more product with W, and
nothing of vocabulary size is kept between the two passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gspo.policy.vocabulary import Sums, at_targets, logit_gradient, slices

TILE = 1 << 22
"""Logits in one tile: 16 MiB in float32."""

TOKENS, ENTRIES = 2048, 2048
"""Tokens and vocabulary entries of a tile at most: what a product packs of W stays in the cache."""


@dataclass(frozen=True, slots=True)
class Support:
    """The tokens that truncated sampling kept; for scored token m, `ids[offsets[m] : offsets[m + 1]]`."""

    ids: Int[Tensor, "kept"]
    offsets: Int[Tensor, "boundaries"]

    def to(self, device: torch.device | str) -> Support:
        """The same support on `device`."""
        return Support(self.ids.to(device, non_blocking=True), self.offsets.to(device, non_blocking=True))


@dataclass(frozen=True, slots=True)
class Head:
    """A model's output head: logits = cap * tanh(scale * (W h + b) / cap); no cap, no tanh."""

    weight: Float[Tensor, "V D"]
    bias: Float[Tensor, "V"] | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Float[Tensor, "M D"]) -> Float[Tensor, "M V"]:
        """Logits in float32, at temperature 1."""
        raw = _product(hidden, self.weight)
        if self.bias is not None:
            raw = raw + self.bias.float()
        raw = raw * self.scale
        return raw if self.softcap is None else torch.tanh(raw / self.softcap) * self.softcap


def find_head(model: nn.Module) -> Head | None:
    """The output head as the model's config describes it; None if it is not one linear layer.

    What the config says is a claim: `agrees` proves it against the model's own logits.
    """
    layer = model.get_output_embeddings()  # type: ignore[operator]
    if type(layer) is not nn.Linear:
        return None
    config: Any = model.config
    config = config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere
    scale *= float(getattr(config, "lm_head_multiplier", None) or 1.0)  # Falcon-H1
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite
    softcap = getattr(config, "final_logit_softcapping", None)  # Gemma
    return Head(layer.weight, layer.bias, scale, None if softcap is None else float(softcap))


@torch.no_grad()
def agrees(head: Head, hidden: Float[Tensor, "M D"], logits: Float[Tensor, "M V"]) -> bool:
    """Whether the head turns the model's hidden states into the model's own logits.

    The tolerance is a few roundings of the dtype in which the model made its logits.
    """
    ours = head.logits(hidden)
    if ours.shape != logits.shape:
        return False
    tolerance = 64 * torch.finfo(logits.dtype).eps * max(1.0, float(logits.abs().max()))
    return bool((ours - logits.float()).abs().max() <= tolerance)


def token_logprobs(
    head: Head,
    hidden: Float[Tensor, "M D"],
    ids: Int[Tensor, "M"],
    *,
    temperature: float,
    support: Support | None = None,
    entropy: bool = True,
    tile: int = TILE,
) -> tuple[Float[Tensor, "M"], Float[Tensor, "M"]]:
    """Log-prob of each id, and entropy of its distribution, in float32 and nats.

    Args:
        temperature: of the sampling distribution; positive.
        support: renormalise over these tokens alone (top-p, top-k, min-p); a target outside gets -inf.
        entropy: False leaves it out and returns zeros.
        tile: logits held at once.
    """
    logprobs, entropies = _TokenLogprobs.apply(
        hidden, head.weight, head.bias, ids, head, temperature, support, entropy, tile
    )  # type: ignore[no-untyped-call]
    return logprobs, entropies


def logprobs_from_logits(
    logits: Float[Tensor, "M V"],
    ids: Int[Tensor, "M"],
    *,
    temperature: float,
    support: Support | None = None,
) -> tuple[Float[Tensor, "M"], Float[Tensor, "M"]]:
    """The same from a model's own logits, for heads that `token_logprobs` cannot express."""
    scaled = logits.float() / temperature
    if support is not None:
        scaled = scaled.masked_fill(_outside(support, slice(0, len(ids)), slice(0, scaled.shape[1])), -torch.inf)
    logs = torch.log_softmax(scaled, dim=-1)
    probs = logs.exp()
    entropies = -(probs * logs.masked_fill(probs == 0, 0.0)).sum(-1)
    return logs.gather(1, ids[:, None]).squeeze(1), entropies


def _product(hidden: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """hidden @ weight.T, accumulated and returned in float32; in `out` where it can be."""
    if hidden.is_cuda and hidden.dtype == weight.dtype != torch.float32:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return torch.mm(hidden.float(), weight.float().t(), out=out)


def _outside(support: Support, rows: slice, columns: slice) -> Tensor:
    """[rows, columns], True on tokens that are not in the support."""
    offsets = support.offsets[rows.start : rows.stop + 1]
    counts = offsets.diff()
    ids = support.ids[offsets[0] : offsets[-1]].long() - columns.start
    row = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    here = (ids >= 0) & (ids < columns.stop - columns.start)
    outside = torch.ones(len(counts), columns.stop - columns.start, dtype=torch.bool, device=counts.device)
    outside[row[here], ids[here]] = False
    return outside


@dataclass(frozen=True, slots=True)
class _Logits:
    """Makes tiles of tempered logits; a tile is overwritten by the next."""

    head: Head
    hidden: Tensor
    temperature: float
    support: Support | None
    size: int
    buffer: Tensor

    @classmethod
    def of(cls, head: Head, hidden: Tensor, temperature: float, support: Support | None, size: int) -> _Logits:
        buffer = torch.empty(min(size, len(hidden) * len(head.weight)), device=hidden.device)
        return cls(head, hidden, temperature, support, size, buffer)

    def blocks(self) -> Iterator[slice]:
        """Tokens that are computed together."""
        return slices(len(self.hidden), min(TOKENS, self.size))

    def columns(self, rows: slice) -> Iterator[slice]:
        """The vocabulary in parts, for these tokens."""
        return slices(len(self.head.weight), max(1, min(ENTRIES, self.size // (rows.stop - rows.start))))

    def tile(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor | None]:
        """Logits [rows, columns], and the slope of the soft cap where there is one."""
        head, shape = self.head, (rows.stop - rows.start, columns.stop - columns.start)
        z = _product(self.hidden[rows], head.weight[columns], self.buffer[: shape[0] * shape[1]].view(shape))
        if head.bias is not None:
            z += head.bias[columns].float()
        slope = None
        if head.softcap is not None:
            z.mul_(head.scale / head.softcap).tanh_()
            slope = 1 - z * z
            z *= head.softcap / self.temperature
        elif head.scale != self.temperature:
            z *= head.scale / self.temperature
        if self.support is not None:
            z.masked_fill_(_outside(self.support, rows, columns), -torch.inf)
        return z, slope


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        head: Head,
        temperature: float,
        support: Support | None,
        entropy: bool,
        size: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(ids), dtype=torch.float32, device=hidden.device)
        norms, entropies = torch.empty_like(logprobs), torch.zeros_like(logprobs)
        with torch.autocast(hidden.device.type, enabled=False):
            logits = _Logits.of(head, hidden, temperature, support, size)
            spare = torch.empty_like(logits.buffer) if entropy else None
            for rows in logits.blocks():
                sums = Sums(ids[rows], masked=support is not None)
                for columns in logits.columns(rows):
                    sums.add(logits.tile(rows, columns)[0], columns, spare)
                norms[rows] = sums.norm
                logprobs[rows] = sums.target - norms[rows]
                if entropy:
                    entropies[rows] = sums.entropy
        ctx.save_for_backward(hidden, weight, bias, ids, norms, entropies)
        ctx.settings = (head, temperature, support, size)
        ctx.set_materialize_grads(False)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, norms, entropies = ctx.saved_tensors
        head, temperature, support, size = ctx.settings
        grad = torch.zeros_like(norms) if grad is None else grad
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty(hidden.shape, device=hidden.device) if need_hidden else None
        make = torch.empty if len(hidden) else torch.zeros
        d_weight = make(weight.shape, device=weight.device) if need_weight else None
        d_bias = torch.zeros(len(weight), device=weight.device) if need_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            logits = _Logits.of(head, hidden, temperature, support, size)
            for rows in logits.blocks():
                through_entropy = None if grad_entropy is None else grad_entropy[rows]
                for columns in logits.columns(rows):
                    z, slope = logits.tile(rows, columns)
                    z -= norms[rows, None]
                    target = at_targets(ids[rows], columns)
                    g = logit_gradient(z, target, grad[rows], through_entropy, entropies[rows])
                    if slope is not None:
                        g *= slope
                    if head.scale != temperature:
                        g *= head.scale / temperature
                    if d_hidden is not None:
                        d_hidden[rows].addmm_(g, weight[columns].float(), beta=min(columns.start, 1))
                    if d_weight is not None:
                        d_weight[columns].addmm_(g.t(), hidden[rows].float(), beta=min(rows.start, 1))
                    if d_bias is not None:
                        d_bias[columns] += g.sum(0)
        pairs = ((d_hidden, hidden), (d_weight, weight), (d_bias, bias))
        return *(None if found is None else found.to(like.dtype) for found, like in pairs), *(None,) * 6
