"""Weights, tokenizer, dtype and device: from a path to a policy that is ready to train."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as hf_logging

from gspo.config import LoraConfig
from gspo.distributed.sharding import gathered, place
from gspo.distributed.world import World
from gspo.errors import BadInputError
from gspo.policy import adapters
from gspo.policy.compiling import CompiledLayers
from gspo.policy.devices import choose_autocast, choose_device, slow_autocast
from gspo.policy.memory import MemoryEstimate, check_fits, estimate_memory, free_memory
from gspo.policy.model import Policy, ScoringModel
from gspo.policy.probe import probe
from gspo.policy.sources import adapter_chain, resolve_path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")


def load_policy(
    path: str | Path,
    *,
    resume: Path | None = None,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    device: str = "auto",
    layout: Literal["auto", "shared", "packed", "padded"] = "auto",
    activation_checkpointing: bool = False,
    lora: LoraConfig | None = None,
    compile: bool = False,
    trust_remote_code: bool = False,
    train: bool = True,
    reference: bool = False,
    tokens: int = 0,
    seed: int = 0,
    world: World | None = None,
    shard: Literal["none", "full"] = "none",
    reshard_after_forward: bool = True,
) -> Policy:
    """The policy from a hub id, a `from_pretrained` folder, or another run's folder (its last checkpoint).

    Master weights are float32; dropout is off for good. `HF_HUB_OFFLINE=1` keeps it off the network. A folder with a
    saved adapter stands for its base model with the adapter merged in.

    Args:
        resume: a checkpoint of the same run, whose weights or adapter go on; `path` remains the start.
        dtype: arithmetic of the passes; see `choose_autocast`.
        compile: run the layers through `torch.compile` when scoring and updating; see `CompiledLayers`.
        train: False for evaluation: nothing requires a gradient.
        reference: keep the starting weights for the KL (with LoRA they are the model with the adapter off).
        tokens: tokens of a micro-batch, for the memory estimate.
        seed: draws the weights of a new adapter.
        world: the processes that load it together; only the main one reads the weights.
        shard: `full` spreads weights, gradients and optimizer state over them (a world of one has nothing to spread).
        reshard_after_forward: see `Shards`.

    Raises:
        BadInputError: no such model, no weights or tokenizer in it, or it cannot fit into memory.
    """
    world = world or World()
    _check_sharding(shard, world, compile)
    preview = preview_policy(
        path,
        resume=resume,
        dtype=dtype,
        device=device,
        train=train,
        lora=lora,
        reference=reference,
        tokens=tokens,
        activation_checkpointing=activation_checkpointing,
        trust_remote_code=trust_remote_code,
    )
    target, config, tokenizer, autocast = preview.device, preview.config, preview.tokenizer, preview.autocast
    tight = check_fits(str(path), preview.memory, preview.free, lora=lora is not None)
    model = _load_model(preview.folder, config, trust_remote_code, empty=not world.is_main)
    model.requires_grad_(train and lora is None)
    adapter = None
    if lora is not None:
        adapter = adapters.add_lora(model, lora, train=train, seed=seed)
        if resume is not None and world.is_main:
            adapters.restore_lora(adapter, resume)
    placed = {"shard": shard == "full", "reshard_after_forward": reshard_after_forward}
    shards = place(model, target, world, **placed)
    with gathered(model, layers=False):
        findings = probe(model, "shared" if layout == "auto" else layout)
    scorer = ScoringModel(model, findings.exact_head, findings.layout_attention, autocast, shards=shards)
    frozen = None
    if reference and lora is None:
        original = _load_model(resolve_path(str(path)), config, trust_remote_code, empty=not world.is_main)
        original.requires_grad_(False)
        frozen = _compiled(replace(scorer, model=original, shards=place(original, target, world, **placed)), compile)
    if activation_checkpointing:
        enable_activation_checkpointing(model)
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
    """What can be said of a policy before its weights are read. `free` bytes are left on its device, if known."""

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
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    device: str = "auto",
    activation_checkpointing: bool = False,
    lora: LoraConfig | None = None,
    trust_remote_code: bool = False,
    train: bool = True,
    reference: bool = False,
    tokens: int = 0,
) -> Preview:
    """Tokenizer and memory of the policy that `load_policy` would load; takes and raises the same."""
    target = choose_device(device)
    autocast = choose_autocast(dtype, target)
    folder = resolve_path(str(path)) if resume is None or lora is not None else str(resume)
    config = _load_config(adapter_chain(folder)[0], trust_remote_code)
    memory = memory_of(
        config,
        train=train,
        lora=lora,
        reference=reference,
        tokens=tokens,
        activation_checkpointing=activation_checkpointing,
        trust_remote_code=trust_remote_code,
        autocast=autocast is not None,
    )
    tokenizer = _load_tokenizer(folder, trust_remote_code)
    return Preview(folder, target, config, tokenizer, context_length(config), memory, free_memory(target), autocast)


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
    )


def _check_sharding(shard: str, world: World, compile: bool) -> None:
    if shard == "full" and world.size > 1 and compile:
        raise BadInputError(
            'model.compile = true with distributed.shard = "full": compiled layers are not gathered; set one of them '
            'to false or "none"'
        )


def _compiled(scorer: ScoringModel, wanted: bool) -> ScoringModel:
    return replace(scorer, compiled=CompiledLayers(scorer.model)) if wanted else scorer


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _load_config(folder: str, trust_remote_code: bool) -> Any:
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        found = "cannot be loaded" if Path(folder).exists() else "is no folder here and cannot be loaded as a hub id"
        raise BadInputError(f"model.path: {folder!r} {found}: {_one_line(error)}") from None
    _switch_dropout_off(config)
    return config


def _switch_dropout_off(config: Any) -> None:
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in list(vars(part).items()):
            noisy = "dropout" in name or name.endswith("pdrop") or name == "router_jitter_noise"
            if noisy and isinstance(value, float):
                setattr(part, name, 0.0)


def _load_tokenizer(folder: str, trust_remote_code: bool) -> Any:
    missing = Path(folder).is_dir() and not any((Path(folder) / name).exists() for name in TOKENIZER_FILES)
    try:
        if missing:
            raise OSError(f"none of {', '.join(TOKENIZER_FILES)} is there")
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"model.path: {folder!r} has no usable tokenizer ({_one_line(error)}); "
            "save it next to the weights with tokenizer.save_pretrained"
        ) from None


def _load_model(folder: str, config: Any, trust_remote_code: bool, *, empty: bool = False) -> Any:
    """The model with its weights; `empty` leaves them on the meta device, to be sent by another process."""
    base, saved_adapters = adapter_chain(folder)
    model = (_shell if empty else _load_weights)(base, config, trust_remote_code)
    for adapter in saved_adapters:
        model = model if empty else adapters.merge_lora(model, adapter)
        model.name_or_path = str(adapter)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    # Sampling comes from our own settings alone; other people's defaults would also make some models unsavable.
    given = model.generation_config
    model.generation_config = GenerationConfig(
        eos_token_id=given.eos_token_id, bos_token_id=given.bos_token_id, pad_token_id=given.pad_token_id
    )
    return model.eval()


def _attention(config: Any) -> dict[str, str]:
    # Soft-capped attention exists in the eager function alone; sdpa would leave the cap out without a word.
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return {"attn_implementation": "eager"} if capped else {}


def _shell(folder: str, config: Any, trust_remote_code: bool) -> Any:
    """The model as `_load_weights` builds it, without weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=trust_remote_code, **_attention(config)
        )
    with suppress(OSError):  # few models have none; theirs is then that of the config, as in `_load_weights`
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.name_or_path = folder
    return model


def _load_weights(folder: str, config: Any, trust_remote_code: bool) -> Any:
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            **_attention(config),
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise BadInputError(f"model.path: {folder!r} cannot be loaded: {_one_line(error)}") from None
    finally:
        if bars:
            hf_logging.enable_progress_bar()
    absent = sorted(info["missing_keys"])
    if absent:
        raise BadInputError(
            f"model.path: {folder!r} lacks weights that its config.json asks for: {', '.join(absent[:3])}"
            f"{' ...' if len(absent) > 3 else ''}; the download or the save is incomplete"
        )
    return model


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


def eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a response: those of the generation config, and the tokenizer's."""
    found = getattr(model.generation_config, "eos_token_id", None)
    ids = list(found) if isinstance(found, list | tuple) else [found]
    return tuple(dict.fromkeys(int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None))


def context_length(config: Any) -> int | None:
    """The longest sequence, in tokens, that the model was made for; None if it does not say."""
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if length is None else int(length)
