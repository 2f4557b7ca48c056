"""Responses in the making, and the prompts that wait to be continued."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gspo.rollout.decoding import Decoder, Prefix
from gspo.rollout.engine import NOT_FINITE
from gspo.rollout.route_recording import RouteRecorder
from gspo.rollout.text import Ending
from gspo.types import FinishReason, Prompt


@dataclass(slots=True)
class Row:
    """One response in the making."""

    prompt: Prompt
    slot: int
    sample: int
    noise: NDArray[np.float64]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routes: list[NDArray[np.int16]] = field(default_factory=list)
    support: list[NDArray[np.int32]] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None
    dropped: str | None = None

    def extend(self, token: int, logprob: float, ending: Ending) -> None:
        """Appends a drawn token and decides whether it is the last."""
        if not math.isfinite(logprob):
            self.finish, self.dropped = "error", f"{NOT_FINITE} at response token {len(self.ids)}"
            return
        self.ids.append(token)
        self.logprobs.append(logprob)
        if (end := ending.judge(self.ids, len(self.noise))) is not None:
            self.finish, self.text = end


class Queue:
    """Prompts that wait, and those that are prefilled and wait for room."""

    def __init__(
        self, decoder: Decoder, jobs: list[list[Row]], max_concurrent: int, recorder: RouteRecorder | None
    ) -> None:
        self.decoder = decoder
        self.recorder = recorder
        self.max_concurrent = max_concurrent
        self.waiting = deque(sorted((job for job in jobs if job), key=lambda job: -len(job[0].prompt.ids)))
        self.ready: deque[tuple[Prefix, deque[Row]]] = deque()

    def __len__(self) -> int:
        return len(self.waiting) + len(self.ready)

    def admit(self, running: int) -> tuple[list[Row], list[Tensor]]:
        """Rows that enter now, and for each prompt the logits [rows, V] of their first tokens."""
        rows: list[Row] = []
        logits: list[Tensor] = []
        while len(self) and (room := self.max_concurrent - running - len(rows)) > 0:
            if not self.ready:
                self._prefill(room)
            prefix, samples = self.ready[0]
            if not self.decoder.admits(prefix):
                break
            count = min(room, len(samples))
            self.decoder.admit(prefix, count)
            rows += [samples.popleft() for _ in range(count)]
            logits.append(prefix.logits.expand(count, -1))
            if not samples:
                self.ready.popleft()
        return rows, logits

    def _prefill(self, room: int) -> None:
        """The prompts whose samples fill the room."""
        wanted, samples = 0, 0
        while wanted < len(self.waiting) and samples < room:
            samples += len(self.waiting[wanted])
            wanted += 1
        lengths = [len(self.waiting[i][0].prompt.ids) for i in range(wanted)]
        wave = [self.waiting.popleft() for _ in range(self.decoder.wave(lengths))]
        prefixes = self.decoder.prefill([job[0].prompt.ids for job in wave])
        if self.recorder is not None:
            for job, routes in zip(wave, self.recorder.prompts([len(job[0].prompt.ids) for job in wave]), strict=True):
                for row in job:
                    row.routes.append(routes)
        self.ready.extend((prefix, deque(job)) for prefix, job in zip(prefixes, wave, strict=True))
