"""The policy: model, tokenizer and layout composed into log-probs per response token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gspo.distributed.sharding import Shards
from gspo.policy import head as heads
from gspo.policy.adapters import adapter_off
from gspo.policy.attention import LayoutAttention, use_layout
from gspo.policy.batch_invariance import batch_invariant
from gspo.policy.compiling import CompiledLayers
from gspo.policy.layout import LayoutKind, TokenLayout, build_layout, split_micro_batches
from gspo.policy.memory import MemoryEstimate
from gspo.policy.route_checks import Routes
from gspo.policy.routing import record_routing, replay_routing
from gspo.policy.sampled_routes import padding_rows
from gspo.types import Prompt, Rollout, Scores, VersionSpan

_SMALLEST = Rollout(
    prompt=Prompt("", "", (0,)),
    slot=0,
    sample=0,
    response_ids=(0,),
    sampler_logprobs=(0.0,),
    trainable=(True,),
    finish_reason="stop",
    policy_version=(VersionSpan(0, 0),),
    text="",
)
"""One prompt token and one response token."""


@dataclass(frozen=True, slots=True)
class ScoringModel:
    """A causal language model, and how log-probs come out of it.

    `exact_head`: the head was proven equal to the model's own logits, so that logits are never made for all
    tokens. `layout_attention`: the attention that computes only a layout's own blocks was proven too; else rows
    are packed or padded as `transformers` does it. `autocast`: dtype of the matrix products; None for float32.
    `compiled`: layers that take the place of the model's own in both passes. `shards`: how the model is spread over
    the processes, where it is. `batch_invariant`: a token's numbers do not depend on what is computed beside it
    (padded layouts).
    """

    model: Any
    exact_head: bool
    layout_attention: bool
    autocast: torch.dtype | None = None
    compiled: CompiledLayers | None = None
    shards: Shards | None = None
    batch_invariant: bool = False

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    @contextmanager
    def attending(self, layout: TokenLayout) -> Iterator[LayoutAttention | None]:
        """Spans the forward and the backward pass over `layout`; yields its attention, None where it is the model's."""
        attention = None
        with ExitStack() as contexts:
            if self.layout_attention and layout.kind != "padded":
                attention = contexts.enter_context(use_layout(self.model, layout))
            if self.compiled is not None:
                contexts.enter_context(self.compiled.active())
            if self.batch_invariant:
                contexts.enter_context(batch_invariant(self.model))
            yield attention

    def token_logprobs(
        self, layout: TokenLayout, *, temperature: float, entropy: bool
    ) -> tuple[Float[Tensor, "M"], Float[Tensor, "M"]]:
        """Log-prob and entropy of each scored token over the layout's support; call it inside `attending`."""
        targets, support = layout.targets, layout.support
        if not self.exact_head or heads.find_head(self.model) is None:
            with self._autocast():
                logits = self.model(**_inputs(layout)).logits.flatten(0, 1)[layout.source]
                return heads.logprobs_from_logits(logits, targets, temperature=temperature, support=support)

        def score() -> tuple[Tensor, Tensor]:
            with self._autocast():
                hidden = hidden_states(self.model, layout)
            head = heads.find_head(self.model)
            assert head is not None
            return heads.token_logprobs(
                head, hidden, targets, temperature=temperature, support=support, entropy=entropy
            )

        return score() if self.shards is None else self.shards.run(score)

    def _autocast(self) -> Any:
        if self.autocast is None:
            return nullcontext()
        # The cache would hold a cast copy of every layer, which a sharded model is meant never to hold at once.
        return torch.autocast(self.device.type, dtype=self.autocast, cache_enabled=self.shards is None)


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

    @property
    def sharded(self) -> bool:
        """Whether each process holds a slice of the weights: all must run the same passes, and every backward pass
        has already summed its gradients over all of them."""
        return self.scorer.shards is not None

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
        routes: Routes | None = None,
        record: bool = False,
    ) -> Iterator[Scores]:
        """Scores with gradients. Call `backward` inside: recomputed layers need the layout and routes once more.

        Log-probs and entropies are those of the distribution that was sampled from: at `temperature`, over the
        layout's support.

        `routes` (layer -> [N, K], in the order of this layout) are forced on a Mixture-of-Experts model; `record`
        puts those that it chose into `Scores.routes`. Routes and agreement are complete when the context has ended.

        >>> with policy.forward(layout, temperature=1.0) as scores:  # doctest: +SKIP
        ...     loss(scores.logprobs).backward()
        """
        fed = self._fed(layout)
        with (
            self._uncounted(fed is not layout),
            self.scorer.attending(fed),
            _routing(self.model, layout, routes, record) as routing,
        ):
            yield replace(_score(self.scorer, fed, layout, temperature, entropy), **routing)

    @torch.no_grad()
    def score(
        self,
        layout: TokenLayout,
        *,
        temperature: float,
        entropy: bool = True,
        routes: Routes | None = None,
        record: bool = False,
    ) -> Scores:
        """Scores without gradients: the `old` log-probs."""
        with self.forward(layout, temperature=temperature, entropy=entropy, routes=routes, record=record) as scores:
            return scores

    @torch.no_grad()
    def reference(self, layout: TokenLayout, *, temperature: float) -> Scores:
        """Scores of the starting weights: the frozen copy, or with LoRA the model with its adapter off.

        Raises:
            ValueError: neither was loaded.
        """
        fed = self._fed(layout)
        if self.frozen is not None:
            with self.frozen.attending(fed):
                return _score(self.frozen, fed, layout, temperature, False)
        if self.adapter is None:
            raise ValueError("no reference was loaded: load_policy(reference=True)")
        with adapter_off(self.adapter), self.scorer.attending(fed):
            return _score(self.scorer, fed, layout, temperature, False)

    def take_part(self, *, backward: bool = False, reference: bool = False) -> None:
        """Joins a pass that other processes make and this one has no rollouts for; it changes nothing.

        Args:
            backward: whether theirs is an update's, with `backward`.
            reference: whether theirs is one of `reference`.
        """
        if not self.sharded:
            return
        nothing = self.layout([])
        if reference:
            self.reference(nothing, temperature=1.0)
        elif backward:
            with self.forward(nothing, temperature=1.0, entropy=False) as scores:
                torch.autograd.backward(scores.logprobs.sum())
        else:
            self.score(nothing, temperature=1.0, entropy=False)

    @contextmanager
    def _uncounted(self, stands_in: bool) -> Iterator[None]:
        """Of a pass that runs for the others' sake alone: weights that it puts a gradient of 0 to are not used by it.

        With one process there is no such pass, and an optimizer would leave them alone.
        """
        shards = self.scorer.shards
        if not stands_in or shards is None:
            yield
            return
        before = set(shards.used)
        yield
        shards.used.intersection_update(before)

    def _fed(self, layout: TokenLayout) -> TokenLayout:
        """What runs through the model. A sharded one must run for a layout without scored tokens too."""
        if len(layout.source) > 0 or not self.sharded:
            return layout
        return self.layout([_SMALLEST])

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
    scorer: ScoringModel,
    fed: TokenLayout,
    layout: TokenLayout,
    temperature: float,
    entropy: bool,
) -> Scores:
    """Scores of `layout`; where it has no scored token, `fed` takes its place in the model, and counts for nothing."""
    if len(layout.source) > 0:
        logprobs, entropies = scorer.token_logprobs(layout, temperature=temperature, entropy=entropy)
        return Scores(layout.scatter(logprobs), layout.scatter(entropies), layout.mask)
    # A loss of such scores can be differentiated like any other.
    zeros = torch.zeros(layout.rows, layout.columns, device=scorer.device, requires_grad=torch.is_grad_enabled())
    if fed is layout:
        return Scores(zeros, zeros.detach().clone(), layout.mask)
    logprobs, _ = scorer.token_logprobs(fed, temperature=temperature, entropy=False)
    return Scores(zeros + 0.0 * logprobs.sum(), zeros.detach().clone(), layout.mask)
