"""The server engine: one or several vLLM servers over HTTP, that may die and come back."""

from __future__ import annotations

import shutil
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from gspo.errors import GspoError
from gspo.rollout.http_client import HttpClient, RefusedError, ServerError
from gspo.rollout.server_pool import GENERATE, Server, ServerPool, Weights
from gspo.rollout.text import StopStrings
from gspo.rollout.vllm_format import (
    Draw,
    check_sampling,
    draws,
    failed,
    finished,
    problem,
    sampling_params,
    version_spans,
    with_output_head,
)
from gspo.rollout.vllm_routes import decode_routes, layer_numbers, read_routes
from gspo.rollout.vllm_support import askable, read_support
from gspo.rollout.weight_files import write_weights
from gspo.types import Request, Rollout, Sampling, VersionSpan

# How often a request may be lost together with its server before it is taken for the cause.
ATTEMPTS = 5


class ServerEngine:
    """Samples on vLLM servers: token ids go there and come back, one HTTP call a response.

    Each call goes to the ready server with the fewest of them. What a server fails to answer goes to another one, or
    waits for it to come back with the current weights; an answer is kept once, so that no response is lost or enters
    twice. Weights go through `weights_folder`, which must lie on a disk that all servers see under the same path, and
    vLLM's own reload. Every answer carries the label of the weights that sampled each token; one with any other
    label than the current is drawn again. With `overlap`, `generate` may run in another thread while weights are
    updated: a response then goes on with the new ones, and its tokens carry the version of each.

    `max_concurrent`: calls in flight over all servers; `request_timeout`: seconds after which a call is given up;
    `server_wait`: seconds to wait for a server when none is ready; `experts`: the number of experts of each MoE layer
    by its name, for rollouts that carry the experts that were used; `supports`: rollouts can carry what truncated
    sampling kept.
    """

    def __init__(
        self,
        urls: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        weights_folder: Path,
        max_concurrent: int,
        request_timeout: float,
        server_wait: float,
        experts: Mapping[str, int] | None = None,
        supports: bool = False,
        overlap: bool = False,
    ) -> None:
        if experts is not None:
            layer_numbers(experts)
        self.experts = experts
        self.supports = supports
        self.tokenizer = tokenizer
        self.weights_folder = weights_folder.absolute()
        self.max_concurrent = max_concurrent
        self.request_timeout = request_timeout
        self.version = 0
        self.client = HttpClient()
        self.pool = ServerPool(
            urls, self.client, wait=server_wait, experts=experts is not None, supports=supports, overlap=overlap
        )
        # Unique to this engine, so that weights that another run left on a server are never taken for ours.
        self._name = uuid.uuid4().hex[:12]
        self._weights: Weights | None = None
        self._updates = 0
        self._overlap = overlap
        self._versions: dict[str, int] = {}
        self._jobs: set[_Job] = set()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """See `Engine.generate`.

        Raises BadInputError for sampling settings that vLLM would not honour or servers that cannot serve, GspoError
        when no server has been ready for `server_wait` seconds or no weights were given yet.
        """
        check_sampling(sampling)
        if self.supports:
            sampling = askable(sampling)
        if self._weights is None:
            raise GspoError("the server engine has no weights yet: call update_weights before generate")
        wanted = list(draws(requests))
        if not wanted:
            return []
        job = _Job(self, sampling, self._versions if self._overlap else {self._weights.label: self.version})
        self._jobs.add(job)
        with ThreadPoolExecutor(min(self.max_concurrent, len(wanted))) as threads:
            futures = [threads.submit(job.draw, draw) for draw in wanted]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
                rollouts = [future.result() for future in futures if future.done()]
            except BaseException:
                self._abandon(job, futures)
                raise
            finally:
                self._jobs.discard(job)
        return sorted(rollouts, key=lambda rollout: (rollout.slot, rollout.sample))

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Writes the weights to disk and has every reachable server load them; the others do when they come back."""
        self._updates += 1
        label = f"gspo-{self._name}-{self._updates}-version-{version}"
        weights = Weights(label, self.weights_folder / label)
        write_weights(with_output_head(named_tensors), weights.folder)
        self._versions[label] = version
        previous, self._weights, self.version = self._weights, weights, version
        self.pool.publish(weights)
        if previous is not None:
            shutil.rmtree(previous.folder, ignore_errors=True)

    def close(self) -> None:
        """Leaves the servers running, with the last weights; removes the weights from disk.

        A `generate` that runs in another thread ends with an error.
        """
        for job in list(self._jobs):
            job.abandoned.set()
        self.client.abort()
        self.pool.close()
        if self._weights is not None:
            shutil.rmtree(self._weights.folder, ignore_errors=True)

    def _abandon(self, job: _Job, futures: Sequence[Future[Rollout]]) -> None:
        """Ends the calls of a job that has failed, those that are just being made included."""
        job.abandoned.set()
        for future in futures:
            future.cancel()
        while wait(futures, timeout=0.1).not_done:
            self.client.abort()


class _Job:
    """The responses of one call of `generate`, drawn by many threads."""

    def __init__(self, engine: ServerEngine, sampling: Sampling, versions: Mapping[str, int]) -> None:
        self.engine = engine
        self.sampling = sampling
        self.versions = versions
        self.stops = StopStrings(engine.tokenizer, sampling.stop)
        self.abandoned = threading.Event()

    def draw(self, draw: Draw) -> Rollout:
        """Asks servers until one has answered."""
        attempts = 0
        while True:
            server = self.engine.pool.lease(self.abandoned)
            fault = None
            try:
                return self._ask(server, draw)
            except RefusedError as error:
                return self._failed(draw, str(error))
            except ServerError as error:
                fault = str(error)
                attempts += error.sent
                if self.abandoned.is_set():
                    raise
                if attempts == ATTEMPTS:
                    return self._failed(draw, f"given up after {attempts} attempts: {fault}")
            finally:
                self.engine.pool.release(server, None if self.abandoned.is_set() else fault)

    def _ask(self, server: Server, draw: Draw) -> Rollout:
        if why := problem(draw.prompt, server.context):
            return self._failed(draw, why)
        params = sampling_params(draw, self.sampling, server.context)
        body = {"token_ids": list(draw.prompt.ids), "sampling_params": params}
        answer = self.engine.client.post(server.url, GENERATE, body, self.engine.request_timeout)
        try:
            return self._rollout(answer["choices"][0], draw, params["max_tokens"])
        except (KeyError, IndexError, TypeError) as error:
            raise ServerError(f"{server.url}: the answer is not what vLLM gives ({error!r})", sent=True) from None
        except ValueError as error:
            raise ServerError(f"{server.url}: {error}", sent=True) from None

    def _rollout(self, choice: Mapping[str, Any], draw: Draw, max_tokens: int) -> Rollout:
        """Raises ValueError for an answer that cannot be used."""
        ids = [int(token) for token in choice["token_ids"]]
        entries = choice["logprobs"]["content"]
        if [entry["token_id"] for entry in entries] != ids or not 0 < len(ids) <= max_tokens:
            raise ValueError(f"{len(ids)} tokens and {len(entries)} log-probs in an answer of 1 to {max_tokens} tokens")
        if choice["finish_reason"] not in ("stop", "length"):
            raise ValueError(f"the response ended with {choice['finish_reason']!r}")
        versions = version_spans(choice["weight_versions"], len(ids), self.versions)
        if versions is None:
            raise ValueError(f"sampled by weights {choice['weight_versions']}, wanted {list(self.versions)}")
        logprobs = [float(entry["logprob"]) for entry in entries]
        rollout = finished(draw, ids, logprobs, choice["finish_reason"], versions, self.sampling, self.stops)
        if rollout.dropped is not None:
            return rollout
        if self.engine.supports and self.sampling.record_support:
            rollout = replace(rollout, support=read_support(choice.get("sampling_mask"), len(ids)))
        if self.engine.experts is None:
            return rollout
        reported = decode_routes(choice.get("routed_experts"))
        return replace(rollout, routes=read_routes(reported, self.engine.experts, rollout))

    def _failed(self, draw: Draw, why: str) -> Rollout:
        return failed(draw, why, (VersionSpan(0, self.engine.version),))
