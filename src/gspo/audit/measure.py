"""What two engines disagree by, and which clip decisions turn on it. Pure functions over [B, T] tensors.

A difference is d_t = log pi_training(y_t) - log pi_engine(y_t) in nats, both at the weights that sampled; the noise
in the ratio that stands in for `likelihoods.old = "sampler"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from gspo.objectives.clipping import Band, ClipFlags, clip_flags
from gspo.objectives.guidance import EngineNoise, engine_differences, measure_noise
from gspo.objectives.ratios import dense_ids, row_mean, span_mean, token_log_ratio

LAGS = 8
"""Autocorrelation is reported up to this many tokens apart."""

_BINS = 41


@dataclass(frozen=True, slots=True)
class Spread:
    """Of `count` differences: mean, 99th percentile and maximum of the absolute values; `bias`, the mean itself."""

    count: int
    mean: float
    p99: float
    max: float
    bias: float


@dataclass(frozen=True, slots=True)
class LengthBin:
    """The responses with `shortest` to `longest` trainable tokens.

    `mean` and `std` are of their length-normalised differences (of |.| and around 0); `expected_std` is what the
    measured token noise alone would give, were it independent from token to token.
    """

    shortest: int
    longest: int
    responses: int
    mean: float
    std: float
    expected_std: float


@dataclass(frozen=True, slots=True)
class Differences:
    """Engine against training engine at equal weights, in nats.

    `identical` is the share of tokens on which both agree to the last bit, `identical_responses` that of responses in
    which they agree on every token. `autocorrelation[k]` is that of
    differences k + 1 tokens apart in one response, None where no response is long enough. `histogram` counts token
    differences between `edges`. `lengths` and `log_ratios` have one entry per response.
    """

    tokens: Spread
    responses: Spread
    identical: float
    identical_responses: float
    autocorrelation: tuple[float | None, ...]
    noise: EngineNoise
    by_length: tuple[LengthBin, ...]
    edges: tuple[float, ...] = field(repr=False)
    histogram: tuple[int, ...] = field(repr=False)
    lengths: tuple[int, ...] = field(repr=False)
    log_ratios: tuple[float, ...] = field(repr=False)


def measure_differences(
    training: Float[Tensor, "B T"], sampler: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Differences:
    """Everything that is reported of the log-probs of some responses. Raises ValueError if no token is trainable."""
    delta = token_log_ratio(training.detach().double().cpu(), sampler.double().cpu(), mask.cpu())
    mask = mask.cpu()
    noise = measure_noise(engine_differences(training.cpu(), sampler.cpu(), mask))
    rows = mask.any(1)
    tokens, means = delta[mask].numpy(), row_mean(delta, mask)[rows].numpy()
    lengths = mask.sum(1)[rows].numpy()
    counts, edges = np.histogram(tokens, bins=_BINS, range=_symmetric(tokens))
    return Differences(
        tokens=_spread(tokens),
        responses=_spread(means),
        identical=float((tokens == 0).mean()),
        identical_responses=float(((delta == 0) | ~mask).all(1)[rows].double().mean()),
        autocorrelation=tuple(autocorrelation(delta, mask, lag) for lag in range(1, LAGS + 1)),
        noise=noise,
        by_length=_by_length(lengths, means, noise),
        edges=tuple(edges.tolist()),
        histogram=tuple(counts.tolist()),
        lengths=tuple(lengths.tolist()),
        log_ratios=tuple(means.tolist()),
    )


def autocorrelation(delta: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], lag: int) -> float | None:
    """Correlation of differences `lag` tokens apart in one response, around the mean over all tokens.

    mean over pairs (d_t - m)(d_{t+lag} - m) / mean over tokens (d_t - m)^2. The mean of all is taken out and not a
    response's own, which would make independent noise look anti-correlated in short responses. None without a pair or
    without variance.
    """
    if lag >= delta.shape[1]:
        return None
    centred = torch.where(mask, delta - delta[mask].mean(), 0)
    pairs = mask[:, lag:] & mask[:, :-lag]
    variance = float(centred.square().sum() / mask.sum())
    if not pairs.any() or variance == 0:
        return None
    return float((centred[:, lag:] * centred[:, :-lag])[pairs].mean()) / variance


@dataclass(frozen=True, slots=True)
class Contender:
    """An objective at a clip range: a ratio for each response (`gspo`), turn of it (`by_turn`) or token (`grpo`)."""

    objective: str
    clip_low: float
    clip_high: float
    dual_clip: float | None = None
    by_turn: bool = False

    @property
    def unit(self) -> str:
        """What is clipped at once."""
        return "token" if self.objective == "grpo" else "turn" if self.by_turn else "response"

    def flags(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, spans: Tensor | None = None
    ) -> tuple[ClipFlags, Tensor, Tensor]:
        """Clip flags, advantages and existence of each unit; responses [B], turns and tokens [B, T].

        A turn is where its first trainable token is. Where advantages are given by token [B, T], each is decided for
        itself, on the ratio that it shares with its turn or response. `spans` are the turns.
        """
        log_ratio = token_log_ratio(logprobs.detach(), old_logprobs, mask)
        by_token = self.unit == "token" or advantages.ndim == 2
        exists = mask
        if self.unit == "turn":
            assert spans is not None
            log_ratio = span_mean(log_ratio, mask, spans)
            exists = mask if by_token else first_of_span(mask, spans)
        elif self.unit == "response":
            log_ratio = row_mean(log_ratio, mask)
            exists = mask if by_token else mask.any(1)
        if by_token and log_ratio.ndim == 1:
            log_ratio = log_ratio[:, None].expand(mask.shape)
        given = advantages[:, None].expand(mask.shape) if exists.ndim > advantages.ndim else advantages
        band = Band(self.clip_low, self.clip_high, self.dual_clip)
        return clip_flags(log_ratio, given, band), given, exists


def first_of_span(mask: Bool[Tensor, "B T"], spans: Int[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """True at the first trainable token of each span."""
    index = dense_ids(spans)
    places = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    first = torch.full_like(index, mask.shape[1]).scatter_reduce(
        1, index, torch.where(mask, places, mask.shape[1]), "amin"
    )
    return mask & (places == first.gather(1, index))


def span_lengths(mask: Bool[Tensor, "B T"], spans: Int[Tensor, "B T"]) -> list[int]:
    """The trainable tokens of each span that has one."""
    index = dense_ids(spans)
    counts = torch.zeros_like(index).scatter_add(1, index, mask.to(index.dtype))
    return [int(count) for count in counts[counts > 0].tolist()]


@dataclass(frozen=True, slots=True)
class Decisions:
    """Clip decisions of `units` with a non-zero advantage, under old log-probs of either engine; `+` adds counts.

    `removed_training` and `removed_engine` lose their gradient to the clip; `flipped` in one case and not in the
    other.
    """

    units: int = 0
    removed_training: int = 0
    removed_engine: int = 0
    flipped: int = 0

    def __add__(self, other: Decisions) -> Decisions:
        return Decisions(
            self.units + other.units,
            self.removed_training + other.removed_training,
            self.removed_engine + other.removed_engine,
            self.flipped + other.flipped,
        )


def clip_decisions(
    contender: Contender,
    logprobs: Float[Tensor, "B T"],
    training: Float[Tensor, "B T"],
    sampler: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B"] | Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    spans: Int[Tensor, "B T"] | None = None,
) -> Decisions:
    """Which decisions differ when the old log-probs are the engine's (`sampler`) and not the training engine's."""
    removed = []
    for old in (training, sampler):
        flags, given, exists = contender.flags(logprobs, old, advantages, mask, spans)
        units = exists & (given != 0)
        removed.append((flags.removed_low | flags.removed_high) & units)
    with_training, with_engine = removed
    counts = (units, with_training, with_engine, with_training ^ with_engine)
    return Decisions(*(int(count.sum()) for count in counts))


def outside_before(
    contender: Contender,
    training: Float[Tensor, "B T"],
    sampler: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    spans: Int[Tensor, "B T"] | None = None,
) -> tuple[int, int]:
    """(units outside the range, units) before any update: outside by the engines' disagreement alone."""
    flags, _, exists = contender.flags(training, sampler, torch.zeros(len(mask), device=mask.device), mask, spans)
    outside = (flags.outside_low | flags.outside_high) & exists
    return int(outside.sum()), int(exists.sum())


def _spread(values: NDArray[np.float64]) -> Spread:
    size = np.abs(values)
    p99 = float(np.quantile(size, 0.99))
    return Spread(len(values), float(size.mean()), p99, float(size.max()), float(values.mean()))


def _symmetric(values: NDArray[np.float64]) -> tuple[float, float]:
    reach = float(np.abs(values).max()) or 1e-9
    return -reach, reach


def _by_length(lengths: NDArray[np.int64], means: NDArray[np.float64], noise: EngineNoise) -> tuple[LengthBin, ...]:
    """Bins that double in length: 1, 2-3, 4-7, 8-15 ..."""
    bins: dict[int, list[int]] = {}
    for index, length in enumerate(lengths.tolist()):
        bins.setdefault(length.bit_length(), []).append(index)
    return tuple(_length_bin(lengths[rows], means[rows], noise) for _, rows in sorted(bins.items()))


def _length_bin(
    lengths: NDArray[np.int64], means: Sequence[float] | NDArray[np.float64], noise: EngineNoise
) -> LengthBin:
    values = np.asarray(means)
    return LengthBin(
        shortest=int(lengths.min()),
        longest=int(lengths.max()),
        responses=len(values),
        mean=float(np.abs(values).mean()),
        std=float(np.sqrt(np.square(values).mean())),
        expected_std=float(noise.token_std * np.sqrt((1 / lengths).mean())),
    )
