"""Low-rank adapters. Nothing else imports peft.

The adapter is put into the `transformers` model in place: scoring, sampling and routing see the same model object
with or without it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo.config import LoraConfig
from gspo.errors import BadInputError


def add_lora(model: Any, lora: LoraConfig, *, train: bool = True, seed: int = 0) -> Any:
    """Puts a fresh adapter into `model`, whose update starts at exactly 0, and returns peft's handle to it.

    Adapter weights are float32, drawn from `seed` alone. Dropout has no place here: log-probs under dropout are
    those of no policy.

    Raises:
        BadInputError: peft is not installed, or no module is called as `lora.targets` says.
    """
    try:
        import peft
    except ImportError:
        raise BadInputError("model.lora: peft is not installed; run pip install 'gspo[peft]'") from None
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


def load_lora(model: Any, folder: Path, *, train: bool = True) -> Any:
    """Puts a saved adapter into `model` and returns peft's handle to it."""
    import peft

    return peft.PeftModel.from_pretrained(model, str(folder), is_trainable=train)


def count_parameters(shell: Any, lora: LoraConfig) -> int:
    """How many parameters such an adapter trains; `shell` is a model on the meta device, and is changed."""
    adapter = add_lora(shell, lora)
    return sum(p.numel() for p in adapter.parameters() if p.requires_grad)


@contextmanager
def adapter_off(adapter: Any) -> Iterator[None]:
    """The model as it was before the adapter: the reference policy."""
    with adapter.disable_adapter():
        yield


def save_lora(adapter: Any, folder: Path) -> None:
    """Writes the adapter alone, in peft's own format: `load_lora` and `PeftModel.from_pretrained` read it."""
    adapter.save_pretrained(str(folder))


def merged_parameters(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The model's parameters and buffers under the names they have without an adapter, the update added in.

    The model is left as it is: adding and taking away again would not give back the same bits.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    updates = {}
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            updates[f"{name}.base_layer.weight"] = module
    for name, tensor in model.state_dict().items():
        if ".lora_" in name:
            continue
        plain = name.replace(".base_layer.", ".")
        layer = updates.get(name)
        if layer is None:
            yield plain, tensor
        else:
            deltas = [layer.get_delta_weight(active) for active in layer.active_adapters]
            yield plain, tensor + sum(deltas).to(tensor.dtype)
