"""Settings of the policy that is trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gspo.config.section import Name, Positive, Section


class LoraConfig(Section):
    """Low-rank adapters (extra `peft`). With LoRA the reference policy is the model with its adapter off."""

    rank: Positive = Field(16, description="Rank of the update of each adapted matrix.")
    alpha: float = Field(32.0, gt=0, description="Scale: the update is multiplied by alpha / rank.")
    targets: Name | Annotated[list[Name], Field(min_length=1)] = Field(
        "all-linear", description='Names of the modules to adapt, or "all-linear" (every one but the head).'
    )


class ModelConfig(Section):
    """The policy to train."""

    path: Name = Field(
        description="Hub id, `from_pretrained` folder, or the folder of another run (its last checkpoint)."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Arithmetic of the forward and backward pass; master weights are always float32. `auto`: bfloat16 "
        "autocast where the device has matrix instructions for it, else float32.",
    )
    device: str = Field(
        "auto", description='`auto` (CUDA if there is one, else CPU), or a torch device such as "cuda:1".'
    )
    layout: Literal["auto", "shared", "packed", "padded"] = Field(
        "auto",
        description="How rollouts are laid out in a forward pass: `shared` computes a group's prompt once, `packed` "
        "puts sequences end to end, `padded` pads them. `auto` takes the first that is exact for the model.",
    )
    activation_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: less memory, about a third more time."
    )
    compile: bool = Field(
        False,
        description="Run the layers through `torch.compile` when scoring and updating (dense models; needs a C++ "
        "compiler). Numbers are the same to rounding, not bit for bit; the first step takes a minute more. Meant for "
        "GPUs: on a CPU no gain was measured.",
    )
    trust_remote_code: bool = Field(False, description="Run Python code that a model repository ships.")
    lora: LoraConfig | None = Field(None, description="Train low-rank adapters instead of all weights.")
