"""The policy: model, tokenizer and layout composed into log-probs per response token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gspo.policy import head as heads
from gspo.policy.adapters import adapter_off
from gspo.policy.attention import use_layout
from gspo.policy.compiling import CompiledLayers
from gspo.policy.layout import LayoutKind, TokenLayout, build_layout, split_micro_batches
from gspo.policy.memory import MemoryEstimate
from gspo.policy.route_checks import Routes
from gspo.policy.routing import record_routing, replay_routing
from gspo.policy.sampled_routes import padding_rows
from gspo.types import Rollout, Scores


@dataclass(frozen=True, slots=True)
class ScoringModel:
    """A causal language model, and how log-probs come out of it.

    `exact_head`: the head was proven equal to the model's own logits, so that logits are never made for all
    tokens. `layout_attention`: the attention that computes only a layout's own blocks was proven too; else rows
    are packed or padded as `transformers` does it. `autocast`: dtype of the matrix products; None for float32.
    `compiled`: layers that take the place of the model's own in both passes.
    """

    model: Any
    exact_head: bool
    layout_attention: bool
    autocast: torch.dtype | None = None
    compiled: CompiledLayers | None = None

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    @contextmanager
    def attending(self, layout: TokenLayout) -> Iterator[None]:
        """Spans the forward and the backward pass over `layout`."""
        with ExitStack() as contexts:
            if self.layout_attention and layout.kind != "padded":
                contexts.enter_context(use_layout(self.model, layout))
            if self.compiled is not None:
                contexts.enter_context(self.compiled.active())
            yield

    def token_logprobs(
        self, layout: TokenLayout, *, temperature: float, support: heads.Support | None, entropy: bool
    ) -> tuple[Float[Tensor, "M"], Float[Tensor, "M"]]:
        """Log-prob and entropy of each scored token; call it inside `attending`."""
        head = heads.find_head(self.model) if self.exact_head else None
        with self._autocast():
            if head is None:
                logits = self.model(**_inputs(layout)).logits.flatten(0, 1)[layout.source]
                return heads.logprobs_from_logits(logits, layout.targets, temperature=temperature, support=support)
            hidden = hidden_states(self.model, layout)
        return heads.token_logprobs(
            head, hidden, layout.targets, temperature=temperature, support=support, entropy=entropy
        )

    def _autocast(self) -> Any:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)


def hidden_states(model: Any, layout: TokenLayout) -> Float[Tensor, "M D"]:
    """The last hidden states that predict the scored tokens."""
    hidden: Tensor = model.base_model(**_inputs(layout)).last_hidden_state
    return hidden.flatten(0, 1)[layout.source]


def _inputs(layout: TokenLayout) -> dict[str, Any]:
    # A packed row is recognised by position ids that restart, an absent mask and an absent cache, all three.
    if layout.kind == "padded":
        return {"input_ids": layout.input_ids, "attention_mask": layout.attention_mask.long(), "use_cache": False}
    return {"input_ids": layout.input_ids, "position_ids": layout.position_ids, "use_cache": False}


@dataclass(slots=True)
class Policy:
    """The model that is trained, with everything needed to feed it and read it.

    `layout_kind` is the layout that was proven exact for this model; `notes` say what was found on the way.
    `frozen` holds the starting weights where a reference is wanted without LoRA.
    """

    scorer: ScoringModel
    tokenizer: Any
    eos_ids: tuple[int, ...]
    pad_id: int
    context_length: int | None
    layout_kind: LayoutKind
    notes: tuple[str, ...] = ()
    memory: MemoryEstimate | None = None
    adapter: Any = None
    frozen: ScoringModel | None = field(default=None, repr=False)

    @property
    def model(self) -> Any:
        """The `transformers` model itself, adapters in place; the embedded engine samples from this object."""
        return self.scorer.model

    @property
    def device(self) -> torch.device:
        return self.scorer.device

    def trainable_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """What the optimizer updates."""
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def layout(
        self, rollouts: Sequence[Rollout], *, columns: int | None = None, kind: LayoutKind | None = None
    ) -> TokenLayout:
        """The rollouts in this policy's layout (or `kind`), on its device; `columns` is T."""
        return build_layout(rollouts, kind or self.layout_kind, columns=columns).to(self.device)

    @contextmanager
    def forward(
        self,
        layout: TokenLayout,
        *,
        temperature: float,
        entropy: bool = True,
        support: heads.Support | None = None,
        routes: Routes | None = None,
        record: bool = False,
    ) -> Iterator[Scores]:
        """Scores with gradients. Call `backward` inside: recomputed layers need the layout and routes once more.

        `routes` (layer -> [N, K], in the order of this layout) are forced on a Mixture-of-Experts model; `record`
        puts those that it chose into `Scores.routes`. Routes and agreement are complete when the context has ended.

        >>> with policy.forward(layout, temperature=1.0) as scores:  # doctest: +SKIP
        ...     loss(scores.logprobs).backward()
        """
        with self.scorer.attending(layout), _routing(self.model, layout, routes, record) as routing:
            yield replace(_score(self.scorer, layout, temperature, entropy, support), **routing)

    @torch.no_grad()
    def score(
        self,
        layout: TokenLayout,
        *,
        temperature: float,
        entropy: bool = True,
        support: heads.Support | None = None,
        routes: Routes | None = None,
        record: bool = False,
    ) -> Scores:
        """Scores without gradients: the `old` log-probs."""
        with self.forward(
            layout, temperature=temperature, entropy=entropy, support=support, routes=routes, record=record
        ) as scores:
            return scores

    @torch.no_grad()
    def reference(self, layout: TokenLayout, *, temperature: float) -> Scores:
        """Scores of the starting weights: the frozen copy, or with LoRA the model with its adapter off.

        Raises:
            ValueError: neither was loaded.
        """
        if self.frozen is not None:
            with self.frozen.attending(layout):
                return _score(self.frozen, layout, temperature, False, None)
        if self.adapter is None:
            raise ValueError("no reference was loaded: load_policy(reference=True)")
        with adapter_off(self.adapter), self.scorer.attending(layout):
            return _score(self.scorer, layout, temperature, False, None)

    def micro_batches(
        self, rollouts: Sequence[Rollout], max_tokens: int, *, kind: LayoutKind | None = None
    ) -> list[list[int]]:
        """Indices of the rollouts of each forward pass, at most `max_tokens` positions each."""
        return split_micro_batches(rollouts, max_tokens, kind or self.layout_kind)


@contextmanager
def _routing(model: Any, layout: TokenLayout, routes: Routes | None, record: bool) -> Iterator[dict[str, Any]]:
    """Routes the forward as asked; yields what `Scores` says of it."""
    if len(layout.source) == 0:  # nothing is scored, so that no forward runs
        yield {}
    elif record:
        with record_routing(model) as recorded:
            yield {"routes": recorded}
    elif routes is not None:
        with replay_routing(model, routes, native_rows=padding_rows(layout)) as proof:
            yield {"agreement": proof.agreement}
    else:
        yield {}


def _score(
    scorer: ScoringModel, layout: TokenLayout, temperature: float, entropy: bool, support: heads.Support | None
) -> Scores:
    if len(layout.source) == 0:
        # Without a token there is no forward pass; a loss of such scores can be differentiated like any other.
        zeros = torch.zeros(layout.rows, layout.columns, device=scorer.device, requires_grad=torch.is_grad_enabled())
        return Scores(zeros, zeros.detach().clone(), layout.mask)
    logprobs, entropies = scorer.token_logprobs(layout, temperature=temperature, support=support, entropy=entropy)
    return Scores(layout.scatter(logprobs), layout.scatter(entropies), layout.mask)
