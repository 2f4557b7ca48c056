"""The trained weights under the names that checkpoints and engines expect; the one source of both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as hf_logging

from gspo.distributed.sharding import parts
from gspo.policy.adapters import save_lora, without_adapter
from gspo.policy.model import Policy


def named_tensors(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Checkpoint-format (name, tensor) pairs: an adapter merged in, fused experts split back, tied weights once.

    Tensors are views of the weights wherever they can be; an adapted weight is merged when its turn comes, so that
    never more than one of them is held. Of a sharded policy one layer at a time is gathered, and its tensors are
    copies: all processes iterate together and to the end.
    """
    for state in parts(policy.model):
        if policy.adapter is None:
            pairs: Iterable[tuple[str, Tensor]] = _checkpoint_format(policy.model, state).items()
        else:
            pairs = _merged(policy.model, state)
        for name, tensor in pairs:
            yield name, tensor.clone() if policy.sharded else tensor


def _merged(model: Any, with_adapter: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    state, merged = without_adapter(model, with_adapter)
    adapted = {state[name].data_ptr(): name for name in merged}
    converted = _checkpoint_format(model, state)
    untouched = {tensor.data_ptr() for name, tensor in converted.items() if _is_whole(tensor, state, adapted)}
    split = {name: merged[name]() for pointer, name in adapted.items() if pointer not in untouched}
    if split:
        converted = _checkpoint_format(model, state | split)
    for name, tensor in converted.items():
        if _is_whole(tensor, state, adapted):
            yield name, merged[adapted[tensor.data_ptr()]]()
        else:
            yield name, tensor


def save_policy(policy: Policy, folder: Path, *, write: bool = True) -> None:
    """Writes what `AutoModelForCausalLM.from_pretrained` loads; with LoRA the adapter alone.

    With LoRA the folder names the model that the adapter belongs to; `save_merged` writes one that needs no other.
    All processes of a sharded policy call it, and one of them gives `write`.
    """
    if policy.adapter is None:
        save_merged(policy, folder, write=write)
        return
    save_lora(policy.adapter, folder, write=write)
    if write:
        policy.tokenizer.save_pretrained(folder)


def save_merged(policy: Policy, folder: Path, *, write: bool = True) -> None:
    """Writes a whole model, an adapter's update added in, that reloads to the same bits. `write`: see `save_policy`."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in named_tensors(policy):
        if write:
            tensors[name] = tensor.cpu() if policy.sharded else tensor
    if not write:
        return
    with _no_progress_bar():
        policy.model.save_pretrained(folder, state_dict=tensors, save_original_format=False)
    policy.tokenizer.save_pretrained(folder)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """A bar a checkpoint would tear the run's own live line apart."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def _checkpoint_format(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `save_pretrained` would write: tied weights under one name, and the conversions of loading undone."""
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    once = {name: tensor for name, tensor in state.items() if not _is_tied(name, state, tied)}
    converted: dict[str, Tensor] = revert_weight_conversion(model, once)
    return converted


def _is_tied(name: str, state: dict[str, Tensor], tied: dict[str, str]) -> bool:
    source = tied.get(name)
    return source in state and state[name].data_ptr() == state[source].data_ptr()


def _is_whole(tensor: Tensor, state: dict[str, Tensor], adapted: dict[int, str]) -> bool:
    name = adapted.get(tensor.data_ptr())
    return name is not None and tensor.shape == state[name].shape
