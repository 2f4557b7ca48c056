"""Several vLLM servers as one: who may be asked, who must first recover, and which weights each holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.errors import BadInputError, GspoError
from gspo.rollout.http_client import HttpClient, RefusedError, ServerError

GENERATE = "/inference/v1/generate"

# What a server calls its weights while they are being replaced: no response that carries it is accepted.
_LOADING = "gspo-loading"

_CONTROL_SECONDS = 60.0
_RELOAD_SECONDS = 1800.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 10.0
_GLANCE = 1.0


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights on disk and the label under which servers hold them."""

    label: str
    folder: Path


class Server:
    """One server; all but `url` and `lock` change under the pool's condition only."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.ready = False
        self.recovering = False
        self.running = 0
        self.faults = 0
        self.context = 0
        self.problem = "it has not been asked yet"
        # Held while the server is brought up, so that two threads never load weights into it at once.
        self.lock = threading.Lock()


class ServerPool:
    """Lends out servers that hold the current weights, the least busy first.

    A server at fault is lent to nobody until a thread of its own has found it healthy again and, where it has come
    back with other weights, given it the current ones; the pauses between attempts grow from 0.25 to 10 s. When no
    server has been ready for `wait` seconds, `lease` raises GspoError with what each of them last said. With
    `experts`, servers must report those that they used; with `supports`, what truncated sampling kept. With `overlap`,
    responses that are being drawn when weights arrive go on with the new ones; else they are ended.
    """

    def __init__(
        self,
        urls: Sequence[str],
        client: HttpClient,
        *,
        wait: float,
        experts: bool = False,
        supports: bool = False,
        overlap: bool = False,
    ) -> None:
        self.client = client
        self.wait = wait
        self.experts = experts
        self.supports = supports
        self.overlap = overlap
        self.servers = [Server(url.rstrip("/")) for url in urls]
        self._condition = threading.Condition()
        self._weights: Weights | None = None
        self._fatal: BadInputError | None = None
        self._last_ready = time.monotonic()
        self._closed = threading.Event()

    def publish(self, weights: Weights) -> None:
        """Makes `weights` the current ones: from here on only servers that hold them are lent out.

        Returns when every reachable server has them; the others get them when they come back.

        Raises BadInputError if a server cannot serve at all (see `_check_fit`).
        """
        with self._condition:
            self._weights = weights
            self._last_ready = time.monotonic()
            for server in self.servers:
                server.ready = False
            waiting = [server for server in self.servers if not server.recovering]
        if waiting:
            with ThreadPoolExecutor(len(waiting)) as threads:
                list(threads.map(self._first_attempt, waiting))
        if self._fatal:
            raise self._fatal

    def lease(self, abandoned: threading.Event) -> Server:
        """A server that holds the current weights; hand it back with `release`.

        Raises GspoError when none has been ready for `wait` seconds, ServerError once `abandoned` is set.
        """
        with self._condition:
            while True:
                if self._fatal:
                    raise self._fatal
                if abandoned.is_set():
                    raise ServerError("the responses are no longer wanted", sent=False)
                if ready := [server for server in self.servers if server.ready]:
                    server = min(ready, key=lambda s: s.running)
                    server.running += 1
                    return server
                left = self.wait - (time.monotonic() - self._last_ready)
                if left <= 0:
                    raise GspoError(self._unavailable())
                self._condition.wait(min(left, _GLANCE))

    def release(self, server: Server, fault: str | None = None) -> None:
        """Takes a server back; with a `fault` it must recover first."""
        with self._condition:
            server.running -= 1
            if fault is None:
                server.faults = 0
                self._last_ready = time.monotonic()
                return
            server.problem = fault
            self._suspend(server)

    def close(self) -> None:
        """Ends the recovery of servers."""
        self._closed.set()

    def _suspend(self, server: Server) -> None:
        """Many requests may fail with their server; the first starts the recovery."""
        if server.recovering:
            return
        if server.ready:
            self._last_ready = time.monotonic()
        server.ready = False
        server.recovering = True
        server.faults += 1
        threading.Thread(target=self._recover, args=(server,), daemon=True).start()

    def _first_attempt(self, server: Server) -> None:
        problem = self._attempt(server)
        if problem is not None:
            with self._condition:
                server.problem = problem
                self._suspend(server)

    def _recover(self, server: Server) -> None:
        """Runs in a thread of its own until the server is ready again."""
        while not self._closed.wait(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(server.faults - 1, 10))):
            problem = self._attempt(server)
            if problem is None:
                return
            with self._condition:
                server.problem = problem
                server.faults += 1

    def _attempt(self, server: Server) -> str | None:
        """Brings the server up; what stood in the way, or None. A fault of the set-up is kept for `lease`."""
        try:
            self._bring_up(server)
        except (ServerError, RefusedError) as error:
            return str(error)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            return f"{server.url}: an answer is not what vLLM gives ({error!r})"
        except BadInputError as error:
            with self._condition:
                self._fatal = error
                self._condition.notify_all()
        return None

    def _bring_up(self, server: Server) -> None:
        """Sees to it that a healthy server holds the current weights, then lends it out."""
        with server.lock:
            weights = self._weights
            assert weights is not None
            self._get(server, "/health")
            if self._label(server) != weights.label:
                (self._load_meanwhile if self.overlap else self._load)(server, weights)
                context = self._check_fit(server, weights.label)
            else:
                context = server.context
                if self.overlap:
                    # Should the last attempt have ended before the server went on.
                    self._post(server, "/resume", None)
            with self._condition:
                if self._weights is not weights:
                    raise ServerError(f"{server.url}: newer weights have arrived", sent=False)
                server.context = context
                server.recovering = False
                server.ready = True
                self._last_ready = time.monotonic()
                self._condition.notify_all()

    def _label(self, server: Server) -> str:
        return str(self._get(server, "/weight_info")["weight_version"])

    def _load(self, server: Server, weights: Weights) -> None:
        """Replaces the server's weights by vLLM's own reload from disk and empties its prefix cache.

        Pausing ends what is still running for a client that has given up. The label comes last: whatever fails on
        the way, nothing is sampled under it from other weights.
        """
        self._post(server, "/update_weight_version", {"new_version": _LOADING})
        self._post(server, "/pause?mode=abort", None)
        self._replace(server, weights, "/reset_prefix_cache")
        self._post(server, "/resume", None)
        self._post(server, "/update_weight_version", {"new_version": weights.label})

    def _load_meanwhile(self, server: Server, weights: Weights) -> None:
        """The same between two tokens of the responses that are being drawn.

        The server stands still from the first call to the last, so that no token is drawn under a label that is not
        its weights'. Keys and values of what was written so far are computed again: later tokens are then drawn from
        the new policy, given all tokens before.
        """
        self._post(server, "/pause?mode=keep", None)
        self._post(server, "/update_weight_version", {"new_version": _LOADING})
        self._replace(server, weights, "/reset_prefix_cache?reset_running_requests=true")
        self._post(server, "/update_weight_version", {"new_version": weights.label})
        self._post(server, "/resume", None)

    def _replace(self, server: Server, weights: Weights, reset: str) -> None:
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(weights.folder)}}
        self._post(server, "/collective_rpc", reload, _RELOAD_SECONDS)
        if not self._post(server, reset, None)["success"]:
            raise ServerError(f"{server.url}: the prefix cache of the old weights could not be emptied", sent=False)

    def _check_fit(self, server: Server, label: str) -> int:
        """Draws a token to see that log-probs and labels mean what we take them for; the server's context in tokens.

        Drawn among one candidate, a token has log-prob 0 in the distribution that was sampled from, but not in the
        model's own.
        """
        params = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0, "ignore_eos": True}
        choice = self._post(server, GENERATE, {"token_ids": [0], "sampling_params": params})["choices"][0]
        found = choice["logprobs"]["content"][0]["logprob"]
        if abs(found) > 1e-6:
            raise BadInputError(
                f"rollout.servers: {server.url} returns log-probs of another distribution than it samples from "
                f"({found} for the only candidate); start it with --logprobs-mode processed_logprobs"
            )
        if self.experts and choice.get("routed_experts") is None:
            raise BadInputError(
                f'routing.replay = "sampler": {server.url} does not report the experts that it used; start it as '
                '`gspo serve-command` says, or use routing.replay = "old"'
            )
        if self.supports and choice.get("sampling_mask") is None:
            raise BadInputError(
                f"rollout.top_p, rollout.top_k, rollout.min_p: {server.url} does not report the tokens that it kept; "
                "start it as `gspo serve-command` says, or set them to 1, 0 and 0"
            )
        spans = choice.get("weight_versions") or []
        if [span["version"] for span in spans] != [label]:
            raise ServerError(f"{server.url}: weights labelled {spans}, {label} expected", sent=True)
        return int(self._get(server, "/v1/models")["data"][0]["max_model_len"])

    def _get(self, server: Server, path: str) -> Any:
        return self.client.get(server.url, path, _CONTROL_SECONDS)

    def _post(self, server: Server, path: str, body: Any, seconds: float = _CONTROL_SECONDS) -> Any:
        return self.client.post(server.url, path, body, seconds)

    def _unavailable(self) -> str:
        said = "; ".join(f"{server.url}: {server.problem}" for server in self.servers)
        return (
            f"rollout.servers: no server has been ready with the current weights for {self.wait:g} s "
            f"(rollout.server_wait); start them again and resume the run. {said}"
        )
