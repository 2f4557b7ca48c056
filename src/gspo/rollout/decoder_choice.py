"""Which decoder is exact for a model, found by trying."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from gspo.rollout.cache import AlignedCache
from gspo.rollout.decoding import AlignedDecoder, CacheUnusableError, CohortDecoder, Decoder, cache_argument

_log = logging.getLogger(__name__)

MakeDecoder = Callable[[int, int], Decoder]
"""From the most rows at a time and the most tokens of a response to a decoder."""


def choose_decoder(model: Any) -> MakeDecoder:
    """A maker of decoders that are exact for this model, the fastest there are.

    Each candidate has to reproduce the model's own logits, computed without a cache, on a few tokens: what a
    family's forward does with padding, positions and a cache is not written in its config.
    """
    candidates: list[MakeDecoder] = []
    if (windows := _attention_windows(model)) is not None:
        candidates.append(lambda rows, response: AlignedDecoder(model, AlignedCache(windows, rows, response)))
    if cache_argument(model) is not None:
        candidates.append(lambda *_: CohortDecoder(model, cached=True))
    for make in candidates:
        try:
            if _agrees(make(3, 2), model):
                return make
        except CacheUnusableError:
            continue
    _log.warning("%s cannot be generated from with a cache: every token recomputes its sequence", type(model).__name__)
    return lambda *_: CohortDecoder(model, cached=False)


def _agrees(decoder: Decoder, model: Any) -> bool:
    """Whether rows that fork, step and leave get the logits of forwards over their whole sequences."""
    device = next(model.parameters()).device
    prompts: list[list[int]] = [[3, 5, 4], [6, 3, 3]]
    if decoder.wave([3, 1]) == 2:
        prompts[1] = [6]
    first, second = decoder.prefill(prompts)
    decoder.admit(second, 1)
    decoder.admit(first, 2)
    rows = [[*prompts[1], 5], [*prompts[0], 4], [*prompts[0], 6]]
    if not _near(decoder.step(torch.tensor([5, 4, 6], device=device)), rows, model):
        return False
    decoder.keep([2, 1])
    rows = [[*rows[2], 3], [*rows[1], 5]]
    return _near(decoder.step(torch.tensor([3, 5], device=device)), rows, model)


def _near(logits: Float[Tensor, "B V"], rows: Sequence[Sequence[int]], model: Any) -> bool:
    """Whether these are the next-token logits of the rows, up to the rounding of the model's type."""
    exact = next(model.parameters()).dtype == torch.float32 and not torch.is_autocast_enabled(logits.device.type)
    tolerance = 1e-3 if exact else 0.1
    for found, row in zip(logits, rows, strict=True):
        ids = torch.tensor([row], device=logits.device)
        expected = model(input_ids=ids, use_cache=False).logits[0, -1].float()
        if not (found - expected).norm() < tolerance * (expected - expected.mean()).norm():
            return False
    return True


def _attention_windows(model: Any) -> list[int | None] | None:
    """Each layer's sliding window (None: full attention), or None if some layer keeps any other state."""
    parameters = inspect.signature(model.forward).parameters
    config = model.config.get_text_config(decoder=True)
    if cache_argument(model) is None or not {"attention_mask", "position_ids"} <= parameters.keys():
        return None
    if getattr(config, "num_kv_shared_layers", None) or getattr(config, "attention_chunk_size", None):
        return None  # layers that read another layer's keys, or masks that are no window
    windows: list[int | None] = []
    for layer in DynamicCache(config=config).layers:
        if type(layer) is DynamicSlidingWindowLayer:
            windows.append(layer.sliding_window)
        elif type(layer) is DynamicLayer:
            windows.append(None)
        else:
            return None
    return windows
