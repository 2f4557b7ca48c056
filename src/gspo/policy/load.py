"""Weights, tokenizer, dtype and device: from a path to a policy that is ready to train."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from gspo.config import LoraConfig
from gspo.distributed.sharding import gathered, place
from gspo.distributed.world import World
from gspo.errors import BadInputError
from gspo.policy import adapters
from gspo.policy.compiling import CompiledLayers
from gspo.policy.devices import choose_autocast, choose_device, slow_autocast
from gspo.policy.layout import LayoutKind
from gspo.policy.memory import MemoryEstimate, check_fits, estimate_memory, free_memory
from gspo.policy.model import Policy, ScoringModel
from gspo.policy.pretrained import load_config, load_model, load_tokenizer
from gspo.policy.probe import probe
from gspo.policy.sources import adapter_chain, resolve_path


def load_policy(
    path: str | Path,
    *,
    resume: Path | None = None,
    base: str | None = None,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    device: str = "auto",
    layout: Literal["auto", "shared", "packed", "padded"] = "auto",
    activation_checkpointing: bool = False,
    lora: LoraConfig | None = None,
    compile: bool = False,
    batch_invariant: bool = False,
    trust_remote_code: bool = False,
    train: bool = True,
    reference: bool = False,
    tokens: int = 0,
    seed: int = 0,
    world: World | None = None,
    shard: Literal["none", "full"] = "none",
    reshard_after_forward: bool = True,
    samples: bool = False,
) -> Policy:
    """The policy from a hub id, a `from_pretrained` folder, or another run's folder (its last checkpoint).

    Master weights are float32; dropout is off for good. `HF_HUB_OFFLINE=1` keeps it off the network. A folder with a
    saved adapter stands for its base model with the adapter merged in.

    Args:
        resume: a checkpoint of the same run, whose weights or adapter go on; `path` remains the start.
        base: where the model lies that the adapter in `path` belongs to, if not where that or its run says.
        dtype: arithmetic of the passes; see `choose_autocast`.
        compile: run the layers through `torch.compile` when scoring and updating; see `CompiledLayers`.
        batch_invariant: no token's numbers depend on what is computed beside it; takes the padded layout.
        train: False for evaluation: nothing requires a gradient.
        reference: keep the starting weights for the KL (with LoRA they are the model with the adapter off).
        tokens: tokens of a micro-batch, for the memory estimate.
        seed: draws the weights of a new adapter.
        world: the processes that load it together; only the main one reads the weights.
        shard: `full` spreads weights, gradients and optimizer state over them (a world of one has nothing to spread).
        reshard_after_forward: see `Shards`.
        samples: whether responses are drawn from these weights too, for the memory estimate.

    Raises:
        BadInputError: no such model, no weights or tokenizer in it, or it cannot fit into memory.
    """
    world = world or World()
    sharded = _is_sharded(shard, world)
    preview = preview_policy(
        path,
        resume=resume,
        base=base,
        dtype=dtype,
        device=device,
        train=train,
        lora=lora,
        reference=reference,
        tokens=tokens,
        activation_checkpointing=activation_checkpointing,
        compile=compile,
        trust_remote_code=trust_remote_code,
        world=world,
        shard=shard,
        reshard_after_forward=reshard_after_forward,
        samples=samples,
    )
    target, config, tokenizer, autocast = preview.device, preview.config, preview.tokenizer, preview.autocast
    tight = check_fits(str(path), preview.memory, preview.free, lora=lora is not None)
    model = load_model(preview.folder, config, trust_remote_code, base=base, empty=not world.is_main)
    model.requires_grad_(train and lora is None)
    adapter = None
    if lora is not None:
        adapter = adapters.add_lora(model, lora, train=train, seed=seed)
        if resume is not None and world.is_main:
            adapters.restore_lora(adapter, resume)
    placed = {"shard": sharded, "reshard_after_forward": reshard_after_forward}
    shards = place(model, target, world, **placed)
    free_choice: LayoutKind = "padded" if batch_invariant else "shared"
    with gathered(model, layers=False):
        findings = probe(model, free_choice if layout == "auto" else layout, autocast)
    scorer = ScoringModel(
        model,
        # An engine has the model's own logits, and so must whoever is to agree with it to the last bit.
        findings.exact_head and not batch_invariant,
        findings.layout_attention,
        autocast,
        shards=shards,
        batch_invariant=batch_invariant,
    )
    frozen = None
    if reference and lora is None:
        original = load_model(resolve_path(str(path)), config, trust_remote_code, empty=not world.is_main)
        original.requires_grad_(False)
        frozen = _compiled(replace(scorer, model=original, shards=place(original, target, world, **placed)), compile)
    if activation_checkpointing:
        enable_activation_checkpointing(model)
    if shards is None and target.type == "cpu":
        join_tied_gradients(model)
    eos = eos_ids(model, tokenizer)
    return Policy(
        scorer=_compiled(scorer, compile),
        tokenizer=tokenizer,
        eos_ids=eos,
        pad_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (eos[0] if eos else 0),
        context_length=preview.context_length,
        layout_kind=findings.layout,
        notes=(*tight, *slow_autocast(autocast, target), *findings.notes),
        memory=preview.memory,
        adapter=adapter,
        frozen=frozen,
    )


@dataclass(frozen=True, slots=True)
class Preview:
    """What can be said of a policy before its weights are read.

    `memory` is what one process needs of its device, of which `free` bytes are left to it, if that is known.
    """

    folder: str
    device: torch.device
    config: Any
    tokenizer: Any
    context_length: int | None
    memory: MemoryEstimate
    free: int | None
    autocast: torch.dtype | None


def preview_policy(
    path: str | Path,
    *,
    resume: Path | None = None,
    base: str | None = None,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    device: str = "auto",
    activation_checkpointing: bool = False,
    lora: LoraConfig | None = None,
    compile: bool = False,
    trust_remote_code: bool = False,
    train: bool = True,
    reference: bool = False,
    tokens: int = 0,
    world: World | None = None,
    shard: Literal["none", "full"] = "none",
    reshard_after_forward: bool = True,
    samples: bool = False,
) -> Preview:
    """Tokenizer and memory of the policy that `load_policy` would load; takes and raises the same."""
    world = world or World()
    sharded = _is_sharded(shard, world)
    _check_sharding(sharded, compile)
    target = choose_device(device)
    autocast = choose_autocast(dtype, target)
    folder = resolve_path(str(path)) if resume is None or lora is not None else str(resume)
    config = load_config(adapter_chain(folder, base)[0], trust_remote_code)
    memory = memory_of(
        config,
        train=train,
        lora=lora,
        reference=reference,
        tokens=tokens,
        activation_checkpointing=activation_checkpointing,
        trust_remote_code=trust_remote_code,
        autocast=autocast is not None,
        processes=world.size if sharded else 1,
        reshard_after_forward=reshard_after_forward,
        samples=samples,
    )
    tokenizer = load_tokenizer(folder, trust_remote_code)
    free = _share(free_memory(target), target, world)
    return Preview(folder, target, config, tokenizer, context_length(config), memory, free, autocast)


def memory_of(
    config: Any,
    *,
    train: bool = True,
    lora: LoraConfig | None = None,
    reference: bool = False,
    tokens: int = 0,
    activation_checkpointing: bool = False,
    trust_remote_code: bool = False,
    autocast: bool = False,
    processes: int = 1,
    reshard_after_forward: bool = True,
    samples: bool = False,
) -> MemoryEstimate:
    """What a model of this config will need; no weight is read or made."""
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    lora_parameters = None
    if lora is not None:
        lora_parameters = adapters.count_parameters(shell, lora)
    return estimate_memory(
        config,
        shell,
        train=train,
        lora_parameters=lora_parameters,
        reference=reference,
        tokens=tokens,
        activation_checkpointing=activation_checkpointing,
        autocast=autocast,
        processes=processes,
        reshard_after_forward=reshard_after_forward,
        samples=samples,
    )


def _share(free: int | None, device: torch.device, world: World) -> int | None:
    """A GPU is a process's own; the memory of a machine is shared by its processes."""
    return free if free is None or device.type != "cpu" else free // world.size


def _is_sharded(shard: str, world: World) -> bool:
    return shard == "full" and world.size > 1


def _check_sharding(sharded: bool, compile: bool) -> None:
    if sharded and compile:
        raise BadInputError(
            'model.compile = true with distributed.shard = "full": compiled layers are not gathered; set one of them '
            'to false or "none"'
        )


def _compiled(scorer: ScoringModel, wanted: bool) -> ScoringModel:
    return replace(scorer, compiled=CompiledLayers(scorer.model)) if wanted else scorer


def enable_activation_checkpointing(model: Any) -> None:
    """Recomputes each layer in the backward pass. Layers do so in training mode only; dropout is off anyway."""
    if not model.supports_gradient_checkpointing:
        raise BadInputError(
            f"model.activation_checkpointing: {type(model).__name__} does not support it; set it to false"
        )
    # Newer releases of transformers rename the method and warn about the old name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.train()


def join_tied_gradients(model: Any) -> None:
    """Has the lookup of tied embeddings add its gradient to the head's, row by row.

    A dense one would be a second matrix of the whole vocabulary, zero but for a few rows. The sum is dense, because the
    head's gradient is: no optimizer meets a sparse one.
    """
    lookup, head = model.get_input_embeddings(), model.get_output_embeddings()
    if isinstance(lookup, nn.Embedding) and head is not None and head.weight is lookup.weight:
        lookup.sparse = True


def eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a response: those of the generation config, and the tokenizer's."""
    found = getattr(model.generation_config, "eos_token_id", None)
    ids = list(found) if isinstance(found, list | tuple) else [found]
    return tuple(dict.fromkeys(int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None))


def context_length(config: Any) -> int | None:
    """The longest sequence, in tokens, that the model was made for; None if it does not say."""
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if length is None else int(length)
