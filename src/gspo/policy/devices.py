"""Where the policy computes, and in which dtype."""

from __future__ import annotations

import torch

from gspo.errors import BadInputError


def choose_device(device: str) -> torch.device:
    """`auto` is the first CUDA device if there is one, else the CPU.

    Raises:
        BadInputError: a device that torch does not have here.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise BadInputError(f"model.device: {device!r} cannot be used here ({reason}); try auto or cpu") from None
    return chosen


def choose_autocast(dtype: str, device: torch.device) -> torch.dtype | None:
    """The dtype of the passes' matrix products; None is float32 throughout.

    `auto` takes bfloat16 where the device multiplies it in hardware: CUDA from compute capability 8 on, a CPU with
    AVX-512-BF16 or AMX. Without such instructions a CPU is about 100 times slower in bfloat16 than in float32.
    """
    if dtype == "float32":
        return None
    if dtype == "bfloat16":
        return torch.bfloat16
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else None
    return torch.bfloat16 if device.type == "cpu" and cpu_multiplies_bfloat16() else None


def slow_autocast(autocast: torch.dtype | None, device: torch.device) -> tuple[str, ...]:
    """A note where bfloat16 was asked for and the device has no instructions for it."""
    if autocast is torch.bfloat16 and device.type == "cpu" and not cpu_multiplies_bfloat16():
        return (
            'model.dtype = "bfloat16": this CPU has no matrix instructions for it and is about 100 times slower than '
            'in float32; use "auto" or "float32"',
        )
    return ()


def cpu_multiplies_bfloat16() -> bool:
    """Whether the CPU has matrix instructions for bfloat16."""
    capabilities = torch.cpu.get_capabilities()
    return any(bool(capabilities.get(name)) for name in ("amx_bf16", "avx512_bf16", "bf16"))
