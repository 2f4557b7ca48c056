"""A server that speaks the part of vLLM's HTTP interface that the server engine uses, and fails on demand."""

from __future__ import annotations

import base64
import io
import json
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

VOCABULARY = 101
UNTRAINED = 0.0
"""The weight that a server has when it starts."""


def respond(
    prompt: Sequence[int], params: dict[str, Any], weight: float, vocabulary: int = VOCABULARY
) -> tuple[list[int], list[float], str]:
    """Tokens, log-probs and finish reason: a function of prompt, seed and weight alone."""
    seed = params.get("seed") or 0
    noise = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, round(weight * 1000), *prompt])))
    ids: list[int] = []
    while len(ids) < params["max_tokens"]:
        ids.append(int(noise.integers(1, vocabulary)))
        if ids[-1] in params.get("stop_token_ids", ()):
            return ids, [-float(x) for x in noise.random(len(ids))], "stop"
    return ids, [-float(x) for x in noise.random(len(ids))], "length"


def experts_of(prompt: Sequence[int], ids: Sequence[int], *, misaligned: bool = False) -> np.ndarray:
    """Experts [fed tokens, 2 layers, 2] of a model of 101 experts whose first layer is dense."""
    fed = np.array([*prompt, *ids][: None if misaligned else -1])
    rows = np.zeros((len(fed), 2, 2), np.uint8)
    rows[:, 1] = np.stack([fed, (fed + 1) % VOCABULARY], axis=1)
    return rows


def support_of(ids: Sequence[int]) -> list[list[int]]:
    """For each token itself and its two neighbours, in no order."""
    return [[i + 1, i, i - 1] for i in ids]


def _encoded(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


class FakeVllm:
    """One server on 127.0.0.1.

    `faults`: names, one consumed by each request to generate: `500`, `429`, `400`, `403`, `reset`, `slow`, `text`,
    `short`, `abort`, `infinite`, `unlabelled`, `misaligned` (experts or supports). `cursed`: prompts whose every
    request loses its connection. `hold()` keeps requests waiting until `release()`, all but the first `free` of them;
    one whose weights are replaced meanwhile, by a pause that keeps it, draws its first half from the old ones. The
    prefix cache is real: a prompt that was seen answers with the weights that it was seen with.
    """

    def __init__(
        self,
        *,
        context: int = 64,
        processed: bool = True,
        missing: Sequence[str] = (),
        vocabulary: int = VOCABULARY,
        reports_experts: bool = False,
        reports_supports: bool = False,
    ) -> None:
        self.reports_supports = reports_supports
        self.reports_experts = reports_experts
        self.vocabulary = vocabulary
        self.context = context
        self.processed = processed
        self.missing = missing
        self.faults: deque[str] = deque()
        self.cursed: set[tuple[int, ...]] = set()
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.drawn: Counter[int] = Counter()
        self.waiting = threading.Semaphore(0)
        self.free = 0
        self.counting = threading.Lock()
        self.gate = threading.Event()
        self.gate.set()
        self.reload_problem: str | None = None
        self.port = 0
        self.life = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts, or starts again on the same port, with fresh weights."""
        self.label, self.weight, self.paused, self.kept = "default", UNTRAINED, False, False
        self.cache: dict[tuple[int, ...], float] = {}
        self.loaded: dict[str, Tensor] = {}
        self.sockets: set[socket.socket] = set()
        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), _handler(self))
        self.server.daemon_threads = True
        self.server.block_on_close = False
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def die(self) -> None:
        """Ends at once: open connections are reset, new ones refused."""
        self.life += 1
        self.server.shutdown()
        self.server.server_close()
        for connection in list(self.sockets):
            _reset(connection)
        self.gate.set()

    def hold(self) -> None:
        self.gate.clear()

    def release(self) -> None:
        self.gate.set()

    def answer(self, path: str, query: str, body: Any) -> tuple[int, Any]:
        """Status and JSON of every call but generate."""
        if path in self.missing:
            return 404, {"error": "no such route"}
        if path == "/health":
            return 200, None
        if path == "/v1/models":
            return 200, {"data": [{"id": "m", "max_model_len": self.context}]}
        if path == "/weight_info":
            return 200, {"weight_version": self.label}
        if path == "/update_weight_version":
            self.label = body["new_version"]
            return 200, {"success": True}
        if path == "/pause":
            assert query in ("mode=abort", "mode=keep")
            self.paused, self.kept = True, query == "mode=keep"
            return 200, {"status": "paused"}
        if path == "/resume":
            self.paused = False
            return 200, {"status": "resumed"}
        if path == "/reset_prefix_cache":
            assert query == ("reset_running_requests=true" if self.kept else "")
            self.cache.clear()
            return 200, {"success": True}
        assert path == "/collective_rpc"
        assert body["method"] == "reload_weights"
        if self.reload_problem:
            return 500, {"error": self.reload_problem}
        files = sorted(Path(body["kwargs"]["weights_path"]).glob("*.safetensors"))
        self.loaded = {name: tensor for file in files for name, tensor in load_file(file).items()}
        self.weight = float(self.loaded.get("w", UNTRAINED))
        return 200, {"results": [None]}

    def generate(self, body: dict[str, Any], fault: str, begun: tuple[str, float] | None = None) -> tuple[int, Any]:
        prompt, params = tuple(body["token_ids"]), body["sampling_params"]
        while self.kept and self.paused:
            time.sleep(0.001)
        assert not self.paused
        weight = self.cache.setdefault(prompt, self.weight)
        ids, logprobs, reason = respond(prompt, params, weight, self.vocabulary)
        spans = [{"version": self.label, "start": 0, "end": len(ids)}]
        if self.kept and begun is not None and begun[0] != self.label and len(ids) > 1:
            half = len(ids) // 2
            before, old, _ = respond(prompt, params, begun[1], self.vocabulary)
            ids[:half], logprobs[:half] = before[:half], old[:half]
            spans = [{"version": begun[0], "start": 0, "end": half}, {**spans[0], "start": half}]
        if params.get("top_k") == 1:
            logprobs = [0.0 if self.processed else -0.5] * len(ids)
        self.drawn[params.get("seed", 0)] += 1
        entries = [{"token_id": i, "logprob": x, "rank": 1} for i, x in zip(ids, logprobs, strict=True)]
        choice = {
            "index": 0,
            "token_ids": ids,
            "logprobs": {"content": entries},
            "finish_reason": "abort" if fault == "abort" else reason,
            "weight_versions": spans,
        }
        if self.reports_experts:
            choice["routed_experts"] = _encoded(experts_of(prompt, ids, misaligned=fault == "misaligned"))
        if self.reports_supports:
            assert params["temperature"] > 0
            assert params["top_k"] > 0
            choice["sampling_mask"] = support_of(ids)[fault == "misaligned" :]
        if fault == "short":
            entries.pop()
        if fault == "infinite":
            entries[-1]["logprob"] = -9999.0
        if fault == "unlabelled":
            choice["weight_versions"] = None
        return 200, {"choices": [choice]}


def _handler(fake: FakeVllm) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def setup(self) -> None:
            super().setup()
            fake.sockets.add(self.connection)

        def finish(self) -> None:
            fake.sockets.discard(self.connection)
            super().finish()

        def do_GET(self) -> None:
            self._serve(None)

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            self._serve(json.loads(data))

        def _serve(self, body: Any) -> None:
            parts = urlsplit(self.path)
            fake.calls.append(parts.path)
            fake.headers.append(dict(self.headers))
            try:
                if parts.path != "/inference/v1/generate":
                    self._send(*fake.answer(parts.path, parts.query, body))
                elif parts.path in fake.missing:
                    self._send(403, {"error": "Scale-out endpoints are disabled."})
                else:
                    self._generate(body)
            except (BrokenPipeError, ConnectionResetError, ValueError, OSError):
                self.close_connection = True

        def _generate(self, body: dict[str, Any]) -> None:
            probe = body["sampling_params"]["max_tokens"] == 1 and "seed" not in body["sampling_params"]
            if probe:
                return self._send(*fake.generate(body, ""))
            with fake.counting:
                fake.bodies.append(body)
                number = len(fake.bodies)
            life, begun = fake.life, (fake.label, fake.weight)
            fake.waiting.release()
            if number > fake.free:
                fake.gate.wait()
            if fake.life != life:
                return None
            try:
                fault = fake.faults.popleft()
            except IndexError:
                fault = ""
            if fault == "reset" or tuple(body["token_ids"]) in fake.cursed:
                return _reset(self.connection)
            if fault == "slow":
                time.sleep(1.0)
            if fault in ("500", "429", "400", "403"):
                return self._send(int(fault), {"error": f"injected {fault}"})
            if fault == "text":
                return self._send(200, None, raw=b"<html>a proxy's page</html>")
            return self._send(*fake.generate(body, fault, begun))

        def _send(self, status: int, content: Any, raw: bytes | None = None) -> None:
            data = raw if raw is not None else b"" if content is None else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Tests read `calls` instead."""

    return Handler


def _reset(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
