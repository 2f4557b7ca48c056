"""The trained weights under the names that checkpoints and engines expect; the one source of both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from gspo.policy.model import Policy


def named_tensors(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Checkpoint-format (name, tensor) pairs: an adapter merged in, fused experts split back."""
    if policy.adapter is None:
        state = policy.model.state_dict()
    else:
        from gspo.policy.adapters import merged_parameters

        state = dict(merged_parameters(policy.model))
    yield from revert_weight_conversion(policy.model, state).items()


def save_policy(policy: Policy, folder: Path) -> None:
    """Writes what `AutoModelForCausalLM.from_pretrained` loads; with LoRA the adapter alone."""
    if policy.adapter is None:
        policy.model.save_pretrained(folder)
    else:
        from gspo.policy.adapters import save_lora

        save_lora(policy.adapter, folder)
    policy.tokenizer.save_pretrained(folder)
