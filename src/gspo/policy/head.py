"""From hidden states to log-probs and entropy, without ever holding logits for all tokens.

For a token with hidden state h, the logits are z = cap * tanh(scale * (W h + b) / cap) / temperature, where
scale and cap come from the model's config. With p = softmax(z) over the support,

    log-prob = z_target - logsumexp(z)          entropy = logsumexp(z) - sum_j p_j z_j

Work goes through chunks of tokens. The backward pass computes a chunk's logits again: one more product with W,
and nothing of vocabulary size is kept between the two passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

CHUNK_ELEMENTS = 1 << 23
"""Logits in one chunk (32 MiB in float32): large enough for full matrix rate, small beside any model."""


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
    chunk: int | None = None,
) -> tuple[Float[Tensor, "M"], Float[Tensor, "M"]]:
    """Log-prob of each id, and entropy of its distribution, in float32 and nats.

    Args:
        temperature: of the sampling distribution; positive.
        support: renormalise over these tokens alone (top-p, top-k, min-p); a target outside gets -inf.
        entropy: False leaves it out and returns zeros.
        chunk: tokens per chunk; by default as many as `CHUNK_ELEMENTS` logits allow.
    """
    if chunk is None:
        chunk = max(1, CHUNK_ELEMENTS // head.weight.shape[0])
    logprobs, entropies = _TokenLogprobs.apply(
        hidden, head.weight, head.bias, ids, head, temperature, support, entropy, chunk
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
        scaled = scaled.masked_fill(_outside(support, slice(0, len(ids)), scaled.shape[1]), -torch.inf)
    logs = torch.log_softmax(scaled, dim=-1)
    probs = logs.exp()
    entropies = -(probs * logs.masked_fill(probs == 0, 0.0)).sum(-1)
    return logs.gather(1, ids[:, None]).squeeze(1), entropies


def _product(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden @ weight.T, accumulated and returned in float32."""
    if hidden.is_cuda and hidden.dtype == weight.dtype != torch.float32:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return hidden.float() @ weight.float().t()


def _outside(support: Support, rows: slice, vocabulary: int) -> Tensor:
    """[rows, V], True on tokens that are not in the support."""
    offsets = support.offsets[rows.start : rows.stop + 1]
    counts = offsets.diff()
    row = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    outside = torch.ones(len(counts), vocabulary, dtype=torch.bool, device=counts.device)
    outside[row, support.ids[offsets[0] : offsets[-1]].long()] = False
    return outside


def _chunk_logits(
    head: Head, hidden: Tensor, temperature: float, support: Support | None, rows: slice
) -> tuple[Tensor, Tensor | None]:
    """Tempered logits of a chunk, and the slope of the soft cap where there is one; both fresh tensors."""
    z = _product(hidden, head.weight)
    if head.bias is not None:
        z += head.bias.float()
    slope = None
    if head.softcap is None:
        z *= head.scale / temperature
    else:
        z.mul_(head.scale / head.softcap).tanh_()
        slope = 1 - z * z
        z *= head.softcap / temperature
    if support is not None:
        z.masked_fill_(_outside(support, rows, z.shape[1]), -torch.inf)
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
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        count = len(ids)
        logprobs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        norms, entropies = torch.empty_like(logprobs), torch.zeros_like(logprobs)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, count, chunk):
                rows = slice(start, min(start + chunk, count))
                z, _ = _chunk_logits(head, hidden[rows], temperature, support, rows)
                target = z.gather(1, ids[rows, None]).squeeze(1)
                peak = z.amax(1)
                exps = (z - peak[:, None]).exp_()
                total = exps.sum(1)
                norms[rows] = peak + total.log()
                logprobs[rows] = target - norms[rows]
                if entropy:
                    mean = _row_dot(exps, z.nan_to_num_(neginf=0.0) if support else z) / total
                    entropies[rows] = norms[rows] - mean
        ctx.save_for_backward(hidden, weight, bias, ids, norms, entropies)
        ctx.settings = (head, temperature, support, chunk)
        ctx.set_materialize_grads(False)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, norms, entropies = ctx.saved_tensors
        head, temperature, support, chunk = ctx.settings
        grad = torch.zeros_like(norms) if grad is None else grad
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if need_weight else None
        d_bias = torch.zeros(len(weight), device=weight.device) if need_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(ids), chunk):
                rows = slice(start, min(start + chunk, len(ids)))
                z, slope = _chunk_logits(head, hidden[rows], temperature, support, rows)
                z -= norms[rows, None]
                through_entropy = None if grad_entropy is None else grad_entropy[rows]
                g = _logit_gradient(z, ids[rows], grad[rows], through_entropy, entropies[rows])
                if slope is not None:
                    g *= slope
                g *= head.scale / temperature
                if d_hidden is not None:
                    d_hidden[rows] = (g @ weight.float()).to(hidden.dtype)
                if d_weight is not None:
                    d_weight.addmm_(g.t(), hidden[rows].float())
                if d_bias is not None:
                    d_bias += g.sum(0)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None, None, None


def _logit_gradient(logs: Tensor, ids: Tensor, grad: Tensor, grad_entropy: Tensor | None, entropies: Tensor) -> Tensor:
    """d(grad . log-prob + grad_entropy . entropy) / dz, from log p [C, V], which it overwrites.

    d log p_target / dz = onehot - p;  d H / dz_j = -p_j (log p_j + H).
    """
    if grad_entropy is None:
        g = logs.exp_().mul_(-grad[:, None])
    else:
        probs = logs.exp()
        weights = logs.nan_to_num_(neginf=0.0).add_(entropies[:, None]).mul_(-grad_entropy[:, None])
        g = weights.sub_(grad[:, None]).mul_(probs)
    return g.scatter_add_(1, ids[:, None], grad[:, None])


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    """sum_j a_ij b_ij without a temporary of their size."""
    return torch.bmm(a.unsqueeze(1), b.unsqueeze(2)).view(-1)
