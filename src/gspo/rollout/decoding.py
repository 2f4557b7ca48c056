"""The forward passes of generation: prompts once, then one token per row and step."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from gspo.rollout.cache import AlignedCache, PromptCache


@dataclass(slots=True)
class Prefix:
    """A prefilled prompt: the logits of its next token, and what its rows start from."""

    logits: Float[Tensor, "V"]
    state: Any


@runtime_checkable
class Decoder(Protocol):
    """Rows in flight. A fresh one is made for each call of the engine, so that nothing outlives the weights."""

    def wave(self, lengths: Sequence[int]) -> int:
        """How many of the waiting prompts, by length, one prefill should take; at least 1."""
        ...

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Prefix]:
        """Computes each prompt once."""
        ...

    def admits(self, prefix: Prefix) -> bool:
        """Whether rows of this prompt can join those in flight now."""
        ...

    def admit(self, prefix: Prefix, count: int) -> None:
        """Appends `count` rows that continue the prompt."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Row i becomes what row `rows[i]` was; a row may only move to a place whose row leaves."""
        ...

    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        """Feeds one token per row and returns the logits of the next ones."""
        ...


class CacheUnusableError(Exception):
    """The model's forward did not fill the cache that it was given."""


def cache_argument(model: Any) -> str | None:
    """What the model's forward calls its cache; None if it takes none that we know."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values", "cache_params") if name in parameters), None)


def _forward(model: Any, ids: Tensor, cache: Cache | None, last: Tensor, **arguments: Any) -> Tensor:
    """Logits [B, V] in float32 at column `last` [B] of each row; only these columns go through the head."""

    def at_last(hidden: Tensor) -> Tensor:
        return hidden[torch.arange(len(last), device=hidden.device), last][:, None]

    def select(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (at_last(inputs[0]), *inputs[1:]) if inputs[0].shape[1] > 1 else inputs

    name = cache_argument(model)
    arguments |= {"use_cache": False} if name is None or cache is None else {name: cache, "use_cache": True}
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(select) if head is not None and ids.shape[1] > 1 else None
    try:
        logits: Tensor = model(input_ids=ids, **arguments).logits
    finally:
        if hook is not None:
            hook.remove()
    return (at_last(logits) if logits.shape[1] > 1 else logits)[:, 0].float()


@contextmanager
def float32_head(model: Any, device: str) -> Iterator[None]:
    """Under autocast, has the head compute in its own type: logits rounded to bfloat16 would set the noise of
    every log-prob."""
    head = model.get_output_embeddings()
    if head is None:
        yield
        return
    scope = ExitStack()

    def enter(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        scope.enter_context(torch.autocast(device, enabled=False))
        return (inputs[0].to(head.weight.dtype), *inputs[1:])

    def leave(*_: Any) -> None:
        scope.close()

    hooks = [head.register_forward_pre_hook(enter), head.register_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class AlignedDecoder:
    """Continuous batching for attention models: rows of any length, admitted and dismissed at any step."""

    prefill_tokens = 4096

    def __init__(self, model: Any, cache: AlignedCache) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.cache = cache

    def wave(self, lengths: Sequence[int]) -> int:
        """As many as fill the device's matrix units, then only those that need no padding, up to `prefill_tokens`."""
        enough = 128 if self.device.type == "cpu" else 2048
        longest = lengths[0]
        for count, length in enumerate(lengths[1:], start=1):
            longest = max(longest, length)
            padded = length != longest or longest != lengths[0]
            if (count + 1) * longest > self.prefill_tokens or (padded and count * longest >= enough):
                return count
        return len(lengths)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Prefix]:
        """One forward, padded on the right: causal attention alone keeps padding out of sight, no mask is needed."""
        ids, lengths = _pad(prompts, self.device)
        cache = PromptCache(len(self.cache.layers))
        logits = _forward(self.model, ids, cache, lengths - 1)
        if not all(layer.is_initialized for layer in cache.layers):
            raise CacheUnusableError
        return [Prefix(logits[row], cache.prompt(row, len(prompt))) for row, prompt in enumerate(prompts)]

    def admits(self, prefix: Prefix) -> bool:  # noqa: ARG002
        return True

    def admit(self, prefix: Prefix, count: int) -> None:
        self.cache.admit(prefix.state, count)

    def keep(self, rows: Sequence[int]) -> None:
        self.cache.keep(rows)

    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        self.cache.reserve()
        mask, positions = self.cache.padding_mask(self.device), self.cache.positions(self.device)
        last = torch.zeros_like(tokens)
        logits = _forward(self.model, tokens[:, None], self.cache, last, attention_mask=mask, position_ids=positions)
        self.cache.advance()
        return logits


def _pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids [n, longest] padded on the right with id 0, and lengths [n]."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
    return ids, torch.tensor([len(prompt) for prompt in prompts], device=device)


@dataclass(slots=True)
class _Cohort:
    """Prompts of one length, prefilled together."""

    ids: Int[Tensor, "n p"]
    cache: Cache | None


class CohortDecoder:
    """For every other model (state-space, linear attention, its own cache or none): equal lengths only.

    The rows of a cohort start from prompts of one length and go in lockstep, so that the model sees neither
    padding nor a mask; the next cohort enters when the last row has left. Without `cached`, sequences are
    recomputed at each step.
    """

    prefill_tokens = 4096

    def __init__(self, model: Any, *, cached: bool) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.cached = cached
        self.cohort: _Cohort | None = None
        self.members: list[int] = []
        self.running: _Cohort | None = None

    def wave(self, lengths: Sequence[int]) -> int:
        """The first prompts of equal length that stay within `prefill_tokens`."""
        most = max(1, self.prefill_tokens // lengths[0])
        same = next((i for i, length in enumerate(lengths) if length != lengths[0]), len(lengths))
        return min(same, most)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Prefix]:
        ids, lengths = _pad(prompts, self.device)
        config = self.model.config.get_text_config(decoder=True)
        cohort = _Cohort(ids, DynamicCache(config=config) if self.cached else None)
        logits = _forward(self.model, ids, cohort.cache, lengths - 1)
        return [Prefix(logits[row], (cohort, row)) for row in range(len(prompts))]

    def admits(self, prefix: Prefix) -> bool:
        return not self.members or (self.running is None and self.cohort is prefix.state[0])

    def admit(self, prefix: Prefix, count: int) -> None:
        if not self.members:
            self.cohort, self.running = prefix.state[0], None
        self.members += [prefix.state[1]] * count

    def keep(self, rows: Sequence[int]) -> None:
        self.members = [self.members[row] for row in rows]
        if self.running is not None and rows:
            self._select(self.running, rows)

    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        if self.running is None:
            self.running = copy.deepcopy(self.cohort)
            assert self.running is not None
            self._select(self.running, self.members)
        self.running.ids = torch.cat([self.running.ids, tokens[:, None]], dim=1)
        fed = tokens[:, None] if self.cached else self.running.ids
        last = torch.full_like(tokens, fed.shape[1] - 1)
        return _forward(self.model, fed, self.running.cache, last)

    def _select(self, cohort: _Cohort, rows: Sequence[int]) -> None:
        index = torch.tensor(rows, device=self.device)
        cohort.ids = cohort.ids[index]
        if cohort.cache is not None:
            cohort.cache.reorder_cache(index)
