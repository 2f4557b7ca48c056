"""Conversations over any engine: all that are alive take a turn together, then their environments answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from gspo.config import MultiTurnTask
from gspo.errors import BadInputError
from gspo.imports import describe
from gspo.rollout.engine import Engine
from gspo.tasks.chat import Chat, as_messages
from gspo.tasks.environment_thread import EnvironmentFailure, EnvironmentThread
from gspo.tasks.multi_turn import Observation, Response, ToolCall, as_observation, as_opening, load_environment
from gspo.tasks.tools import parse_calls
from gspo.types import FinishReason, KeptSupport, Message, Prompt, Request, Rollout, Sampling, VersionSpan

ENVIRONMENT = -1
"""The turn of tokens that the environment wrote."""


@dataclass(slots=True)
class _Conversation:
    """One rollout in the making. `ids` are all that follows the prompt, exactly as sampled or added."""

    prompt: Prompt
    slot: int
    sample: int
    thread: EnvironmentThread
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    routes: dict[str, np.ndarray] | None = None
    supports: list[KeptSupport | None] = field(default_factory=list)
    text: str = ""
    cut: bool = False
    finish: FinishReason | None = None
    dropped: str | None = None

    def drop(self, reason: str) -> None:
        self.finish, self.dropped = "error", reason


class ConversationEngine:
    """Plays a multi-turn task with an engine; to the rest of the run it is an engine itself.

    The next prompt of a conversation is its exact ids so far and the ids of what the environment adds: nothing
    sampled is decoded and encoded again. A turn cut at `max_tokens`, or a context that is full, ends the conversation
    with finish reason `length`; `done`, and the last of `max_turns`, with `stop`. An environment that raises, hangs or
    answers nonsense drops its own rollout alone.
    """

    def __init__(
        self,
        engine: Engine,
        config: MultiTurnTask,
        tokenizer: Any,
        *,
        eos_ids: Sequence[int],
        context_length: int | None,
    ) -> None:
        self.engine = engine
        self.version = 0
        environment = load_environment(config)
        self._make = environment.make
        self._config = config
        self._tokenizer = tokenizer
        self._chat = Chat(config, tokenizer, environment.tools)
        self._eos_ids = frozenset(eos_ids)
        self._context = context_length

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """See `Engine.generate`; one rollout per conversation, whose response holds all of its turns."""
        conversations = [
            _Conversation(request.prompt, request.slot, sample, EnvironmentThread(self._make))
            for request in requests
            for sample in range(request.first_sample, request.first_sample + request.samples)
        ]
        step = requests[0].step if requests else 0
        try:
            self._reset(conversations)
            for turn in range(self._config.max_turns):
                self._end_full(conversations)
                alive = [c for c in conversations if c.finish is None]
                if not alive:
                    break
                asked = self._take_turns(alive, turn, step, sampling)
                self._answer(asked, turn)
        finally:
            for conversation in conversations:
                conversation.thread.close()
        return sorted((self._rollout(c) for c in conversations), key=lambda rollout: (rollout.slot, rollout.sample))

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `Engine.update_weights`."""
        self.engine.update_weights(named_tensors, version)
        self.version = version

    def close(self) -> None:
        """See `Engine.close`."""
        self.engine.close()

    def _reset(self, conversations: Sequence[_Conversation]) -> None:
        def same(conversation: _Conversation, value: object) -> None:
            prompt = conversation.prompt
            try:
                first = as_opening(value, "reset")
            except BadInputError as error:
                raise EnvironmentFailure(str(error)) from None
            expected = prompt.content
            if isinstance(first, list) and isinstance(expected, list) and len(expected) > len(first):
                expected = expected[1:]  # the task's system prompt
            if first != expected:
                raise EnvironmentFailure(
                    "reset gave other messages than before for the same row; what is random must come from the row"
                )

        self._each(conversations, "reset", [c.prompt.columns for c in conversations], same, "reset")

    def _end_full(self, conversations: Sequence[_Conversation]) -> None:
        for c in conversations:
            if self._context is not None and c.turns and len(c.prompt.ids) + len(c.ids) >= self._context:
                c.finish = c.finish or "length"

    def _take_turns(
        self, alive: Sequence[_Conversation], turn: int, step: int, sampling: Sampling
    ) -> list[tuple[_Conversation, Response]]:
        """Samples a turn of every conversation; those that the engine gave up are dropped."""
        replies = {(r.slot, r.sample): r for r in self.engine.generate(_requests(alive, turn, step), sampling)}
        asked = []
        for c in alive:
            reply = replies[c.slot, c.sample]
            if reply.dropped is not None or reply.finish_reason == "error":
                c.drop(f"turn {turn}: {reply.dropped or 'the engine gave it up'}")
                continue
            asked.append((c, self._response(c, reply)))
            _append(c, reply, turn)
        return asked

    def _response(self, conversation: _Conversation, reply: Rollout) -> Response:
        calls: tuple[ToolCall, ...] = ()
        if self._chat.schemas:
            ids = reply.response_ids
            if ids and ids[-1] in self._eos_ids:
                ids = ids[:-1]
            before = [*conversation.prompt.ids, *conversation.ids]
            calls = parse_calls(self._chat.call_format, self._tokenizer, self._chat.schemas, before, ids)
        return Response(reply.text, calls, reply.truncated)

    def _answer(self, asked: Sequence[tuple[_Conversation, Response]], turn: int) -> None:
        """Lets the environments take their step, side by side, and puts their answers behind the turns."""

        def add(conversation: _Conversation, value: object) -> None:
            observation = as_observation(value)
            conversation.rewards.append(float(observation.reward))
            if conversation.cut:
                conversation.finish = "length"
            elif observation.done or turn == self._config.max_turns - 1:
                conversation.finish = "stop"
            else:
                self._add(conversation, observation)

        conversations = [c for c, _ in asked]
        self._each(conversations, "step", [response for _, response in asked], add, f"turn {turn}: step")

    def _each(
        self,
        conversations: Sequence[_Conversation],
        method: str,
        arguments: Sequence[object],
        use: Callable[[_Conversation, object], None],
        where: str,
    ) -> None:
        deadline = time.monotonic() + self._config.time_limit
        for conversation, argument in zip(conversations, arguments, strict=True):
            conversation.thread.ask(method, argument)
        for conversation in conversations:
            try:
                use(conversation, conversation.thread.answer(max(deadline - time.monotonic(), 0.0)))
            except EnvironmentFailure as error:
                conversation.drop(f"environment: {where.removesuffix(method)}{error}")

    def _add(self, conversation: _Conversation, observation: Observation) -> None:
        """The environment's messages, as tokens that are not trained on."""
        if self._chat.applied and not observation.messages:
            raise EnvironmentFailure("step gave no message although the conversation is not done")
        try:
            text = self._chat.continuation(conversation.prompt.content, observation.messages)
        except Exception as error:  # noqa: BLE001 (templates raise what they like)
            raise EnvironmentFailure(f"the chat template refuses its messages ({describe(error)})") from None
        ids = list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        # The turn was ended by the policy itself where it sampled an end; the template's is then one too many.
        if self._chat.applied and ids and ids[0] in self._eos_ids and conversation.ids[-1] in self._eos_ids:
            ids = ids[1:]
        conversation.ids += ids
        conversation.logprobs += [0.0] * len(ids)
        conversation.turns += [ENVIRONMENT] * len(ids)
        conversation.supports.append(KeptSupport.none(len(ids)))
        conversation.messages += as_messages(observation.messages)

    def _rollout(self, c: _Conversation) -> Rollout:
        assert c.finish is not None
        return Rollout(
            prompt=c.prompt,
            slot=c.slot,
            sample=c.sample,
            response_ids=tuple(c.ids),
            sampler_logprobs=tuple(c.logprobs),
            trainable=tuple(turn != ENVIRONMENT for turn in c.turns),
            finish_reason=c.finish,
            policy_version=tuple(c.versions) or (VersionSpan(0, self.version),),
            text=c.text,
            dropped=c.dropped,
            routes=c.routes,
            support=KeptSupport.join(c.supports),
            messages=tuple(c.messages),
            turns=tuple(c.turns),
            turn_rewards=tuple(c.rewards),
        )


def _requests(alive: Sequence[_Conversation], turn: int, step: int) -> list[Request]:
    """One request a conversation; before the first turn one a prompt where its samples follow each other."""
    requests: list[Request] = []
    for c in alive:
        last = requests[-1] if requests else None
        if turn == 0 and last is not None and (last.slot, last.first_sample + last.samples) == (c.slot, c.sample):
            requests[-1] = replace(last, samples=last.samples + 1)
            continue
        prompt = replace(c.prompt, ids=(*c.prompt.ids, *c.ids))
        requests.append(Request(prompt, samples=1, step=step, slot=c.slot, first_sample=c.sample, turn=turn))
    return requests


def _append(c: _Conversation, reply: Rollout, turn: int) -> None:
    """Puts a sampled turn behind the conversation."""
    start = len(c.ids)
    for span in reply.policy_version:
        if not c.versions or c.versions[-1].version != span.version:
            c.versions.append(VersionSpan(start + span.start, span.version))
    if reply.routes is not None:
        # A turn's forward feeds the conversation so far once more: what is new are the rows behind those known.
        known = c.routes or {name: rows[:0] for name, rows in reply.routes.items()}
        c.routes = {
            name: np.concatenate([known[name], rows[len(known[name]) :]]) for name, rows in reply.routes.items()
        }
    c.supports.append(reply.support)
    c.ids += reply.response_ids
    c.logprobs += reply.sampler_logprobs
    c.turns += [turn] * len(reply.response_ids)
    c.messages.append({"role": "assistant", "content": reply.text})
    c.text, c.cut = reply.text, reply.truncated
