"""Low-rank adapters. Nothing else imports peft.

The adapter is put into the `transformers` model in place: scoring, sampling and routing see the same model object
with or without it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from gspo.config import LoraConfig
from gspo.distributed.sharding import whole
from gspo.errors import BadInputError


def add_lora(model: Any, lora: LoraConfig, *, train: bool = True, seed: int = 0) -> Any:
    """Puts a fresh adapter into `model`, whose update starts at exactly 0, and returns peft's handle to it.

    Adapter weights are float32, drawn from `seed` alone. Dropout has no place here: log-probs under dropout are
    those of no policy.

    Raises:
        BadInputError: peft is not installed, or no module is called as `lora.targets` says.
    """
    peft = _peft("model.lora")
    settings = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules=lora.targets, task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        torch.manual_seed(seed)
        # For fused experts peft adds patterns of its own, and then warns that "all-linear" does not use them.
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys")
        try:
            adapter = peft.get_peft_model(model, settings)
        except ValueError as error:
            reason = " ".join(str(error).split())[:160]
            raise BadInputError(f"model.lora.targets: {lora.targets!r} cannot be adapted ({reason})") from None
    if not train:
        adapter.requires_grad_(False)
    return adapter


def restore_lora(adapter: Any, folder: Path) -> None:
    """Puts the weights that `save_lora` wrote into an adapter of the same shape.

    Raises:
        BadInputError: the saved adapter has another rank or other targets.
    """
    peft = _peft("model.lora")
    saved = load_file(folder / "adapter_model.safetensors")
    expected = peft.get_peft_model_state_dict(adapter)
    if {name: t.shape for name, t in saved.items()} != {name: t.shape for name, t in expected.items()}:
        raise BadInputError(
            f"model.lora: the adapter in {str(folder)!r} has another rank or other targets; resume with the settings "
            "of the run"
        )
    peft.set_peft_model_state_dict(adapter, saved)


def merge_lora(model: Any, folder: Path) -> Any:
    """The model with a saved adapter added into its weights for good.

    Raises:
        BadInputError: peft is not installed, or the adapter does not fit the model.
    """
    peft = _peft(f"model.path: {str(folder)!r}")
    try:
        return peft.PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    except (RuntimeError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())[:160]
        raise BadInputError(f"model.path: the adapter {str(folder)!r} cannot be merged ({reason})") from None


def _peft(what: str) -> Any:
    try:
        import peft
    except ImportError:
        raise BadInputError(f"{what}: adapters need peft, which is not installed; pip install 'gspo[peft]'") from None
    return peft


def count_parameters(shell: Any, lora: LoraConfig) -> int:
    """How many parameters such an adapter trains; `shell` is a model on the meta device, and is changed."""
    adapter = add_lora(shell, lora)
    return sum(p.numel() for p in adapter.parameters() if p.requires_grad)


@contextmanager
def adapter_off(adapter: Any) -> Iterator[None]:
    """The model as it was before the adapter: the reference policy."""
    with adapter.disable_adapter():
        yield


def save_lora(adapter: Any, folder: Path, *, write: bool = True) -> None:
    """Writes the adapter alone, in peft's own format, which `PeftModel.from_pretrained` reads.

    A sharded one is gathered from all processes, of which one gives `write`.
    """
    state = {name: whole(tensor) for name, tensor in adapter.state_dict().items() if ".lora_" in name}
    if write:
        adapter.save_pretrained(str(folder), state_dict=state, save_embedding_layers=False)


def without_adapter(
    model: Any, state: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Callable[[], Tensor]]]:
    """The state of `model`, or a part of it, under the names it has without an adapter, the update left out.

    The second dict has, for each adapted weight, what gives it with the update added in. The model itself stays as it
    is: adding the update and taking it away again would not give back the same bits.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    plain_state: dict[str, Tensor] = {}
    merged: dict[str, Callable[[], Tensor]] = {}
    # A layer's weight is adapted, or one of the stacked parameters of a module of experts, which peft wraps once each.
    layers = {
        f"{_plain(name)}.{getattr(module, 'parameter_name', 'weight')}": module
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer)
    }
    for name, tensor in state.items():
        if ".lora_" in name:
            continue
        plain = _plain(name)
        plain_state[plain] = tensor
        if plain in layers:
            merged[plain] = partial(_merged, layers[plain], tensor)
    return plain_state, merged


def _plain(name: str) -> str:
    return re.sub(r"\.base_layer\b", "", name)


@torch.no_grad()
def _merged(layer: Any, weight: Tensor) -> Tensor:
    for name in layer.active_adapters:
        weight = weight + layer.get_delta_weight(name).to(weight.dtype)
    return weight
