"""The nouns that every room shares.

Shape legend, used in annotations and docstrings throughout:

    P prompts        G group (responses of one prompt)   B sequences (rollouts)
    T response tokens (padded)    N packed tokens (fed)   M scored tokens
    L MoE layers     K experts per token                  V vocabulary   D hidden
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int32, Int64
from torch import Tensor

Message = dict[str, Any]
"""One chat message, as the chat templates take it: `{"role": "user", "content": "2+2="}`."""

FinishReason = Literal["stop", "length", "error"]
"""`stop`: an EOS id or a stop string; `length`: cut at `max_tokens`; `error`: the engine gave up."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is given to the policy (the paper's x).

    `key` names the prompt for good (records, held-out check); `ids` are the exact tokens that are fed, the
    chat template already applied; `columns` go to the reward functions untouched.

    >>> Prompt(key="a1b2", content="2+2=", ids=(17, 28, 17, 46), columns={"answer": "4"}).ids
    (17, 28, 17, 46)
    """

    key: str
    content: str | list[Message]
    ids: tuple[int, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution that responses are drawn from, whole: an engine adds nothing of its own.

    `temperature` 0 means greedy (evaluation only). `eos_ids` all end a response; a matched stop string too.
    The text of a response excludes the EOS token and the stop string; its ids include what was sampled.
    `record_support`: rollouts carry what truncated sampling kept.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    eos_ids: tuple[int, ...] = ()
    seed: int = 0
    record_support: bool = False

    @property
    def truncated(self) -> bool:
        """Whether part of the vocabulary can never be drawn, so that log-probs need the kept support."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """`samples` responses wanted for one prompt.

    Sampling noise is keyed by (seed, step, slot, sample, turn, position): `slot` is the prompt's place in the
    step, so that noise depends neither on the order of execution nor on which rank or server draws.
    `first_sample` > 0 asks for further samples of the same prompt. In a conversation `prompt` is all of it so
    far, and `turn` counts the policy's turns before.
    """

    prompt: Prompt
    samples: int
    step: int
    slot: int
    first_sample: int = 0
    turn: int = 0


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """From response token `start` on, tokens were sampled by policy version `version` (updates so far)."""

    start: int
    version: int


@dataclass(frozen=True, slots=True)
class KeptSupport:
    """The tokens that top-p, top-k and min-p left to choose from, for each token of a response.

    Those of response token t are `ids[offsets[t] : offsets[t + 1]]`, ascending, the sampled one among them; a token
    that the policy did not sample has none.

    >>> kept = KeptSupport.of([np.array([4, 9], np.int32), np.array([], np.int32), np.array([2], np.int32)])
    >>> kept.ids.tolist(), kept.offsets.tolist()
    ([4, 9, 2], [0, 2, 2, 3])
    """

    ids: Int32[np.ndarray, "kept"]
    offsets: Int64[np.ndarray, "boundaries"]

    @classmethod
    def of(cls, parts: Sequence[np.ndarray]) -> KeptSupport:
        """From the kept ids of each response token."""
        offsets = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        return cls(np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32, copy=False), offsets)

    @classmethod
    def none(cls, tokens: int) -> KeptSupport:
        """That of tokens which the policy did not sample."""
        return cls(np.zeros(0, np.int32), np.zeros(tokens + 1, np.int64))

    @classmethod
    def join(cls, parts: Sequence[KeptSupport | None]) -> KeptSupport | None:
        """That of consecutive parts of a response, or of consecutive responses; None if one of them is."""
        known = [part for part in parts if part is not None]
        if len(known) < len(parts) or not parts:
            return None
        counts = np.concatenate([part.counts for part in known])
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        return cls(np.concatenate([part.ids for part in known]), offsets)

    @property
    def counts(self) -> Int64[np.ndarray, "T"]:
        """How many tokens were kept for each response token."""
        return np.diff(self.offsets)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One response with all that belongs to it.

    `response_ids`, `sampler_logprobs` and `trainable` have one entry per response token; `trainable` is
    False for tokens that the policy did not sample (an environment's, a tool's), whose log-prob is 0.
    `slot` and `sample` place it in the step; `routes` maps a router's name to the experts [n, K] that it chose
    for the n fed tokens: the prompt's, then the response's but for its last. `support` is what truncated sampling
    kept; None where nothing was left out.

    Of a conversation, `prompt` is what stood before the policy's first turn, the response all that came after it,
    `text` the policy's last turn and `messages` every message of the response; `turns` gives each response token
    its turn, from 0 on, and -1 to what the environment wrote; `turn_rewards` has one entry a turn and sums to
    `reward`. `token_rewards` has one entry per response token where a reward function judges tokens.
    `updates_behind` counts the optimizer updates from the weights that drew the first token to those from which the
    step that trains on it starts.

    >>> r = Rollout(prompt=Prompt("k", "hi", (5,)), slot=0, sample=0, response_ids=(7, 2),
    ...             sampler_logprobs=(-0.5, -0.1), trainable=(True, True), finish_reason="stop",
    ...             policy_version=(VersionSpan(0, 0),), text="yo")
    >>> len(r.response_ids), r.reward
    (2, None)
    """

    prompt: Prompt
    slot: int
    sample: int
    response_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    trainable: tuple[bool, ...]
    finish_reason: FinishReason
    policy_version: tuple[VersionSpan, ...]
    text: str
    reward: float | None = None
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    dropped: str | None = None
    routes: Mapping[str, np.ndarray] | None = None
    support: KeptSupport | None = None
    messages: tuple[Message, ...] = ()
    turns: tuple[int, ...] | None = None
    turn_rewards: tuple[float, ...] | None = None
    token_rewards: tuple[float, ...] | None = None
    updates_behind: int = 0

    @property
    def truncated(self) -> bool:
        """Whether the response was cut at the token limit."""
        return self.finish_reason == "length"


@dataclass(frozen=True, slots=True)
class Scores:
    """What a forward pass says of each response token, gathered per rollout; 0 where the mask is False.

    `routes`, where they were recorded, map a router's name to the experts [N, K] of the fed tokens, in the order
    of the forward. `agreement`, where routes were replayed, maps it to the share of the forced choices that the
    current router would have made by itself.
    """

    logprobs: Float[Tensor, "B T"]
    entropy: Float[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    routes: Mapping[str, Tensor] | None = None
    agreement: Mapping[str, float] | None = None


@dataclass(slots=True)
class Batch:
    """The kept rollouts of one step, or of one mini-batch, ready for the objective.

    Rows are sorted by group. `mask` is True on trainable tokens that take part in the loss; a truncated
    response that is masked has an all-False row and still counts in `sequences`. `spans` are given where the
    ratio is taken over parts of a response instead of all of it.
    """

    rollouts: list[Rollout]
    group_ids: Int[Tensor, "B"]
    rewards: Float[Tensor, "B"]
    advantages: Float[Tensor, "B"] | Float[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    sampler_logprobs: Float[Tensor, "B T"]
    old_logprobs: Float[Tensor, "B T"] | None = None
    reference_logprobs: Float[Tensor, "B T"] | None = None
    spans: Int[Tensor, "B T"] | None = None

    def __len__(self) -> int:
        return len(self.rollouts)

    def select(self, rows: Sequence[int]) -> Batch:
        """The given rows, in that order, cut to the longest of their responses."""
        width = max((len(self.rollouts[i].response_ids) for i in rows), default=0)
        index = torch.tensor(rows, dtype=torch.long, device=self.mask.device)
        chosen = self._map(lambda tensor: tensor[index] if tensor.ndim == 1 else tensor[index, :width])
        return replace(chosen, rollouts=[self.rollouts[i] for i in rows])

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        mapped: dict[str, Any] = {name: function(v) if isinstance(v, Tensor) else v for name, v in values.items()}
        return Batch(**mapped)
