"""JSON over HTTP to inference servers, with the two kinds of failure kept apart."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from gspo.errors import BadInputError

_CONNECT_SECONDS = 5.0

# Codes by which a server says that it lacks an interface or will not let us use it, whatever the request.
_UNFIT = {401, 403, 404, 405}


class ServerError(Exception):
    """The server failed, not the request: another server, or the same one later, may answer it.

    `sent` tells whether the server may have begun to work on it.
    """

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class RefusedError(Exception):
    """The server answers that it will never serve this request."""


class HttpClient:
    """Calls that any thread may make; `abort` ends those that are waiting for an answer.

    Proxies are not consulted: the servers are part of the run. The key in the environment variable `VLLM_API_KEY`,
    which vLLM's server reads too, is sent along.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()
        self._headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            self._headers["Authorization"] = f"Bearer {key}"

    def get(self, url: str, path: str, seconds: float) -> Any:
        """See `post`."""
        return self._call("GET", url, path, None, seconds)

    def post(self, url: str, path: str, body: Any, seconds: float) -> Any:
        """The decoded answer; None if it is empty. `seconds`: longest silence to bear.

        Raises ServerError (unreachable, lost, too slow, status 5xx or 429, not JSON), RefusedError (other 4xx),
        BadInputError (a server that lacks the interface or wants a key).
        """
        return self._call("POST", url, path, json.dumps(body), seconds)

    def abort(self) -> None:
        """Ends the calls that are waiting, each with a ServerError."""
        with self._lock:
            for connection in self._open:
                if connection.sock is not None:
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _call(self, method: str, url: str, path: str, body: str | None, seconds: float) -> Any:
        with self._connection(url) as connection:
            try:
                connection.connect()
            except OSError as error:
                raise ServerError(f"{url} cannot be reached ({error})", sent=False) from None
            try:
                connection.sock.settimeout(seconds)
                connection.request(method, urlsplit(url).path.rstrip("/") + path, body, self._headers)
                response = connection.getresponse()
                status, data = response.status, response.read()
            except TimeoutError:
                raise ServerError(f"{url}{path} has not answered for {seconds:g} s", sent=True) from None
            except (OSError, http.client.HTTPException) as error:
                raise ServerError(f"{url}{path}: the connection was lost ({error!r})", sent=True) from None
        return _decode(f"{url}{path}", status, data)

    @contextmanager
    def _connection(self, url: str) -> Iterator[http.client.HTTPConnection]:
        parts = urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=_CONNECT_SECONDS)
        with self._lock:
            self._open.add(connection)
        try:
            yield connection
        finally:
            with self._lock:
                self._open.discard(connection)
                connection.close()


def _decode(where: str, status: int, data: bytes) -> Any:
    text = data.decode("utf-8", errors="replace")
    said = f"{where} answers {status}: {_excerpt(text)}"
    if status in _UNFIT:
        raise BadInputError(
            f"rollout.servers: {said}; start the server with the command that `gspo serve-command` prints"
        )
    if status >= 500 or status == 429:
        raise ServerError(said, sent=True)
    if status >= 400:
        raise RefusedError(said)
    try:
        return json.loads(text) if text else None
    except json.JSONDecodeError:
        raise ServerError(f"{where} answers something else than JSON: {_excerpt(text)}", sent=True) from None


def _excerpt(text: str) -> str:
    """The first words of an answer, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:300] + "..."
