"""How much memory training will need, from the model's config alone, and how much there is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from gspo.errors import BadInputError

GB = 1e9
FLOAT32, BFLOAT16 = 4, 2


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of one process by purpose. Master weights, gradients and the two AdamW moments are float32.

    `parameters` are all that the weights hold, an adapter among them.
    `gathered` is what a process of several that share the weights holds of the others' at a time.
    """

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    gathered: int = 0

    @property
    def total(self) -> int:
        held = self.weights + self.gradients + self.optimizer + self.reference
        return held + self.gathered + self.activations

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "reference": self.reference,
            "gathered": self.gathered,
            "activations": self.activations,
        }
        named = ", ".join(f"{name} {size / GB:.1f}" for name, size in parts.items() if size)
        return f"about {self.total / GB:.1f} GB ({named})"


def estimate_memory(
    config: Any,
    model: torch.nn.Module,
    *,
    train: bool = True,
    lora_parameters: int | None = None,
    reference: bool = False,
    tokens: int = 0,
    activation_checkpointing: bool = False,
    autocast: bool = False,
    processes: int = 1,
    reshard_after_forward: bool = True,
    samples: bool = False,
) -> MemoryEstimate:
    """What training needs, before any weight is read.

    Args:
        config: the model's config.
        model: the model on the meta device, for its parameter count; with its adapter in it, if it gets one.
        train: False counts the weights alone.
        lora_parameters: trainable parameters if only an adapter is trained.
        reference: whether a frozen copy of the model is held too (KL without LoRA).
        tokens: tokens of a micro-batch; 0 leaves activations out.
        autocast: whether matrix products run in bfloat16; a pass then holds a bfloat16 copy of each matrix.
        processes: among how many the weights and all that belongs to them are divided.
        reshard_after_forward: whether such processes let go of a layer between its two passes.
        samples: whether responses are drawn from these weights, of which each process then gathers all.
    """
    count = _count(model)
    trainable = (count if lora_parameters is None else lora_parameters) if train else 0
    activations = 0
    if train and tokens:
        activations = tokens * _activation_bytes(config.get_text_config(), activation_checkpointing, autocast)
        activations += BFLOAT16 * _matrix_elements(model) if autocast else 0
    gathered = 0
    if processes > 1:
        gathered = _gathered_elements(model, reshard_after_forward, trainable > 0)
        gathered = max(gathered, count) if samples else gathered
    return MemoryEstimate(
        parameters=count,
        weights=FLOAT32 * count // processes,
        gradients=FLOAT32 * trainable // processes,
        optimizer=2 * FLOAT32 * trainable // processes,
        reference=FLOAT32 * count // processes if reference and lora_parameters is None else 0,
        activations=activations,
        gathered=FLOAT32 * gathered,
    )


def _gathered_elements(model: torch.nn.Module, reshard_after_forward: bool, train: bool) -> int:
    """Elements of the root and of two layers, one at work and one on its way; with gradients as large again.

    A layer that is not let go of between its passes stays beside all others.
    """
    layers = [_count(m) for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        return _count(model)
    held = 2 * max(layers) if reshard_after_forward else sum(layers)
    root = _count(model) - sum(layers)
    return root + held + (max(root, max(layers)) if train else 0)


def _count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _matrix_elements(model: torch.nn.Module) -> int:
    """Elements of the layers' matrices; embeddings are looked up, and the head is multiplied in float32."""
    apart = {id(model.get_input_embeddings().weight)}  # type: ignore[operator]
    head = model.get_output_embeddings()  # type: ignore[operator]
    apart.add(id(getattr(head, "weight", None)))
    return sum(p.numel() for p in model.parameters() if p.ndim >= 2 and id(p) not in apart)


def _activation_bytes(config: Any, checkpointing: bool, autocast: bool) -> int:
    """Bytes one token leaves behind for the backward pass.

    A layer keeps about twelve tensors of the hidden width (norms, queries, keys, values, residuals) and four
    of the feed-forward width, for each expert that the token visits. Under autocast only the latter are bfloat16:
    norms and residuals stay float32, and their casts are kept beside them.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    experts = getattr(config, "num_experts_per_tok", None)
    width = getattr(config, "moe_intermediate_size", None) if experts else None
    width = width or getattr(config, "intermediate_size", None) or 4 * hidden
    wide = BFLOAT16 if autocast else FLOAT32
    layer = FLOAT32 * 12 * hidden + wide * 4 * int(width) * (experts or 1)
    return int(layer + layers * FLOAT32 * hidden if checkpointing else layers * layer)


def free_memory(device: torch.device) -> int | None:
    """Bytes that this process can still take on the device; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    limits = [_available(Path("/proc/meminfo")), _cgroup_room(Path("/sys/fs/cgroup"))]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _available(meminfo: Path) -> int | None:
    if not meminfo.exists():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_room(folder: Path) -> int | None:
    """What the container's limit leaves; page cache can be dropped and does not count."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + int(stat.get("file", 0))


def check_fits(name: str, estimate: MemoryEstimate, free: int | None, *, lora: bool) -> tuple[str, ...]:
    """Refuses a model that cannot fit; returns a note where only the activations, known roughly, would not.

    Raises:
        BadInputError: weights, gradients, optimizer and reference alone are above the free memory.
    """
    if free is None or estimate.total <= free:
        return ()
    needs = f"{name} needs {estimate}, {free / GB:.1f} GB are free"
    if estimate.total - estimate.activations <= free:
        return (f"{needs}: should it run out, lower training.micro_batch_tokens or set model.activation_checkpointing",)
    tries = "a smaller model" if lora else "model.lora (trains an adapter only), or a smaller model"
    raise BadInputError(f"model.path: {needs}: try {tries}")
