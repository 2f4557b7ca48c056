"""Config, tokenizer and weights as `transformers` reads them from a folder or hub id; a user's mistake is one line."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as hf_logging

from gspo.errors import BadInputError
from gspo.policy import adapters
from gspo.policy.sources import adapter_chain

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")


def load_config(folder: str, trust_remote_code: bool) -> Any:
    """The model's config, with every dropout off. Raises BadInputError where there is none."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        found = "cannot be loaded" if Path(folder).exists() else "is no folder here and cannot be loaded as a hub id"
        raise BadInputError(f"model.path: {folder!r} {found}: {_one_line(error)}") from None
    _switch_dropout_off(config)
    return config


def load_tokenizer(folder: str, trust_remote_code: bool) -> Any:
    """The tokenizer beside the weights. Raises BadInputError where there is none."""
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


def load_model(
    folder: str, config: Any, trust_remote_code: bool, *, base: str | None = None, empty: bool = False
) -> Any:
    """The model with its float32 weights, saved adapters merged in, ready to be scored with.

    `base`: see `adapter_chain`. `empty` leaves its weights on the meta device, to be sent by another process. Raises
    BadInputError for weights that are damaged or incomplete.
    """
    whole, saved_adapters = adapter_chain(folder, base)
    model = (_shell if empty else _load_weights)(whole, config, trust_remote_code)
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


def _attention(config: Any) -> dict[str, str]:
    # Soft-capped attention exists in the eager function alone; sdpa would leave the cap out without a word.
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return {"attn_implementation": "eager"} if capped else {}


def _switch_dropout_off(config: Any) -> None:
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in list(vars(part).items()):
            noisy = "dropout" in name or name.endswith("pdrop") or name == "router_jitter_noise"
            if noisy and isinstance(value, float):
                setattr(part, name, 0.0)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
