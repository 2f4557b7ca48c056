"""The arithmetic of a training step on several GPUs: parameters, operations, memory, and bytes that are sent.

Parameters, operations and sent bytes are exact for the shapes; the tests compare them with the models and with what
processes really send. Memory of activations is an estimate. Seconds are these over data-sheet rates, times `Shares`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder-only transformer with grouped-query attention and gated feed-forward layers.

    `experts` = 0 is a dense model; else `intermediate` is the width of one expert and `active` of them see a token.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    tied: bool
    head_dim: int = 128
    vocabulary: int = 151_936
    experts: int = 0
    active: int = 0

    @property
    def attention(self) -> int:
        """Parameters of one layer's four projections."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def expert(self) -> int:
        """Parameters of one feed-forward block."""
        return 3 * self.hidden * self.intermediate

    @property
    def layer(self) -> int:
        """Parameters of one layer: matrices, two norms, and the norms of queries and keys."""
        router = self.experts * self.hidden
        return self.attention + max(1, self.experts) * self.expert + router + 2 * self.hidden + 2 * self.head_dim

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def outside(self) -> int:
        """Parameters outside the layers: embeddings, head and the last norm."""
        return (1 if self.tied else 2) * self.embedding + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.outside

    @property
    def per_token(self) -> int:
        """Matrix parameters that one token is multiplied with in the layers."""
        used = self.active if self.experts else 1
        return self.layers * (self.attention + used * self.expert + self.experts * self.hidden)

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token's keys and values in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


SHAPES = {
    "qwen3-0.6b": Shape(28, 1024, 3072, 16, 8, tied=True),
    "qwen3-1.7b": Shape(28, 2048, 6144, 16, 8, tied=True),
    "qwen3-4b": Shape(36, 2560, 9728, 32, 8, tied=True),
    "qwen3-8b": Shape(36, 4096, 12288, 32, 8, tied=False),
    "qwen3-14b": Shape(40, 5120, 17408, 40, 8, tied=False),
    "qwen3-32b": Shape(64, 5120, 25600, 64, 8, tied=False),
    "qwen3-30b-a3b": Shape(48, 2048, 768, 32, 4, tied=False, experts=128, active=8),
}


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU's data sheet: dense bfloat16 operations a second, memory, its bandwidth, and that of its links one way.

    `inside` links the 8 GPUs of a machine, `outside` is a GPU's share of the network between machines. Bytes, seconds.
    """

    flops: float
    memory: float
    bandwidth: float
    inside: float
    outside: float


CARDS = {
    "A100": Card(312e12, 80e9, 2.0e12, 300e9, 25e9),
    "H100": Card(989e12, 80e9, 3.35e12, 450e9, 50e9),
    "H200": Card(989e12, 141e9, 4.8e12, 450e9, 50e9),
}


@dataclass(frozen=True, slots=True)
class Shares:
    """What a program reaches of a card's rates. Assumed, not measured here: no GPU was at hand."""

    matrix: float = 0.40
    bandwidth: float = 0.60
    links: float = 0.70


@dataclass(frozen=True, slots=True)
class Work:
    """One step: P prompts x G responses, and how it is cut. Lengths in tokens."""

    prompts: int = 64
    group_size: int = 16
    prompt_length: int = 512
    response_mean: int = 2048
    response_max: int = 8192
    minibatches: int = 4
    micro_batch_tokens: int = 32_768

    @property
    def rollouts(self) -> int:
        return self.prompts * self.group_size

    @property
    def response_tokens(self) -> int:
        return self.rollouts * self.response_mean

    @property
    def fed_tokens(self) -> int:
        """Tokens of one forward pass over the rollout batch, each prompt once."""
        return self.prompts * self.prompt_length + self.rollouts * (self.response_mean - 1)

    def passes(self, gpus: int) -> int:
        """Forward and backward passes that each GPU makes in a step."""
        per_update = -(-self.fed_tokens // (self.minibatches * gpus * self.micro_batch_tokens))
        return self.minibatches * max(1, per_update)


def forward_flops(shape: Shape, work: Work) -> float:
    """Operations of one forward pass over the rollout batch: layers, head at response tokens, causal attention."""
    fed = work.response_mean - 1  # the last token of a response is predicted, not fed
    pairs = work.prompts * work.prompt_length * (work.prompt_length + 1) / 2
    pairs += work.rollouts * (fed * (fed + 1) / 2 + fed * work.prompt_length)
    attention = 2 * shape.layers * shape.heads * shape.head_dim * pairs
    return 2.0 * (shape.per_token * work.fed_tokens + shape.embedding * work.response_tokens + attention)


def received_bytes(shape: Shape, work: Work, gpus: int, shard: str, *, reshard: bool = True) -> dict[str, float]:
    """Bytes that each GPU receives in a step, by cause; weights and gradients travel in float32.

    `none`: one sum of all gradients per update. `full`: weights before every pass, layers again before the backward
    pass if `reshard`, gradients after every pass, and the whole model once for the rollout.
    """
    share = 4.0 * (gpus - 1) / gpus
    if shard == "none":
        return {"gradients": 2 * share * shape.parameters * work.minibatches}
    passes = work.passes(gpus)
    scored = passes * (work.minibatches - 1) // work.minibatches
    again = shape.layers * shape.layer if reshard else 0
    return {
        "weights": share * (passes * (shape.parameters + again) + scored * shape.parameters),
        "gradients": share * passes * shape.parameters,
        "rollout": share * shape.parameters,
    }


def training_bytes(shape: Shape, work: Work, gpus: int, shard: str) -> float:
    """Memory of an update: weights, gradients and two moments in float32; activations under checkpointing."""
    state = 16.0 * shape.parameters
    if shard == "full" and gpus > 1:
        state = state / gpus + 4.0 * (2 * shape.outside + 2 * shape.layer)
    tokens = min(work.micro_batch_tokens, work.fed_tokens / (work.minibatches * gpus))
    used = shape.active if shape.experts else 1
    inside = 2 * (8 * shape.hidden + 2 * shape.heads * shape.head_dim + 4 * used * shape.intermediate)
    return state + tokens * (4 * shape.hidden * shape.layers + 2 * inside)


def concurrency(shape: Shape, work: Work, gpus: int, card: Card, shard: str) -> int:
    """Responses that a GPU has room to draw at a time beside the whole policy and the optimizer's moments; 0: none."""
    held = 12.0 * shape.parameters / (gpus if shard == "full" else 1)
    whole = 4.0 * shape.parameters if shard == "full" and gpus > 1 else 0.0
    length = work.response_max + work.prompt_length / work.group_size
    room = (USABLE * card.memory - held - whole) / (length * shape.kv_bytes)
    return max(0, min(MOST_CONCURRENT, -(-work.rollouts // gpus), int(room)))


def rollout_seconds(
    shape: Shape, work: Work, gpus: int, card: Card, shares: Shares, concurrent: int, weight_bytes: int
) -> float:
    """Lower bound of sampling the batch: each step reads the weights, each token the keys and values before it.

    `weight_bytes`: 4 on the policy's own weights, 2 in a bfloat16 engine. Host time of an eager model comes on top.
    """
    if concurrent == 0:
        return float("inf")
    tokens = -(-work.rollouts // gpus) * work.response_mean
    steps = max(work.response_max, tokens / concurrent)
    read = shape.embedding + shape.per_token
    if shape.experts:
        visited = shape.experts * (1 - (1 - shape.active / shape.experts) ** concurrent)
        read += int(shape.layers * shape.expert * (visited - shape.active))
    keys = tokens * (work.response_mean / 2 + work.prompt_length) * shape.kv_bytes
    reading = (steps * weight_bytes * read + keys) / (card.bandwidth * shares.bandwidth)
    computing = 2 * tokens * (shape.per_token + shape.embedding) / (card.flops * shares.matrix)
    return max(reading, computing)


def largest_micro_batch(shape: Shape, work: Work, gpus: int, card: Card, shard: str) -> Work | None:
    """The work with `micro_batch_tokens` halved until an update fits the card; None if not even 4,096 tokens do."""
    while training_bytes(shape, work, gpus, shard) > USABLE * card.memory:
        if work.micro_batch_tokens <= 4096:
            return None
        work = replace(work, micro_batch_tokens=work.micro_batch_tokens // 2)
    return work


MOST_CONCURRENT = 256
"""Responses that a GPU draws at a time, where memory allows."""

USABLE = 0.9
"""Share of a card's memory that may be planned with."""
