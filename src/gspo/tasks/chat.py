"""Messages as text: the tokenizer's chat template, with the task's system prompt and tools, turn after turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gspo.errors import BadInputError
from gspo.imports import describe
from gspo.tasks.sources import TaskSettings
from gspo.tasks.tools import CallFormat, instructions, learn_call_format, spelled_out, tool_schemas

_REPLY = "gspo7reply7stands7here"
_THOUGHT = "gspo7thought7stands7here"


class TemplateError(ValueError):
    """A chat template cannot carry a conversation on; the message says why."""


class Chat:
    """How a task's messages become text. Without a chat template, texts follow each other as they are.

    Raises BadInputError for settings or tools that the tokenizer's template cannot serve.
    """

    def __init__(self, config: TaskSettings, tokenizer: Any, tools: Sequence[Callable[..., Any]] = ()) -> None:
        self.tokenizer = tokenizer
        self._config = config
        self.applied = config.chat_template if config.chat_template is not None else bool(tokenizer.chat_template)
        self._check()
        self.schemas = tool_schemas(tools)
        self._shows_tools = False
        self.call_format: CallFormat | None = None
        if tools:
            if not self.applied:
                raise BadInputError(
                    "task.environment: its tools need a chat template, and none is applied; take a model that has one"
                )
            self._shows_tools = self._template_shows_tools()
            self.call_format = learn_call_format(tokenizer, config.chat_template_kwargs)

    def opening(self, content: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The first messages of a conversation: the task's system prompt, and the tools where the template has no
        place for them, stand in the system message."""
        if isinstance(content, str):
            system = self._config.system_prompt
            messages = [] if system is None else [{"role": "system", "content": system}]
            messages.append({"role": "user", "content": content})
        else:
            messages = [dict(message) for message in content]
        if self.schemas and not self._shows_tools:
            messages = [spelled_out(message) for message in messages]
            text = instructions(self.schemas)
            if messages[0]["role"] == "system":
                messages[0] = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
            else:
                messages.insert(0, {"role": "system", "content": text})
        return messages

    def render(self, messages: Sequence[Mapping[str, Any]], *, reply: bool = True) -> str:
        """The text of messages, up to where the policy is to write if `reply`. What the template raises comes out."""
        extra: dict[str, Any] = dict(self._config.chat_template_kwargs)
        if self._shows_tools:
            extra["tools"] = self.schemas
        text: str = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=reply, **extra
        )
        return text

    def continuation(self, content: str | Sequence[Mapping[str, Any]], added: str | Sequence[Mapping[str, Any]]) -> str:
        """What follows the text of a turn: its end, the messages that the environment adds, the start of the reply.

        `content` is that of the first prompt. The template writes it behind a stand-in for the turn, so that nothing
        of the turn itself is rendered again. Raises TemplateError if the template would change what came before.
        """
        if not self.applied:
            return added if isinstance(added, str) else "".join(str(message["content"]) for message in added)
        return self._after_reply([*self.opening(content), _reply()], as_messages(added))

    def check(self, content: str | Sequence[Mapping[str, Any]]) -> list[str]:
        """Whether conversations that begin like this one can go on, tried on made-up turns before a run.

        Raises BadInputError with the reason if not. Returns what a user may not expect, one line each.
        """
        if not self.applied:
            return []
        roles = ["user", "tool"] if self.schemas else ["user"]
        notes: dict[str, None] = {}
        for role in roles:
            added = [_message(role)]
            try:
                self._check_two_turns(content, added)
                notes.update(dict.fromkeys(self._rewritten_replies(content, added)))
            except Exception as error:  # noqa: BLE001 (templates raise what they like)
                reason = str(error) if isinstance(error, TemplateError) else f"it raised {describe(error)}"
                raise BadInputError(
                    f"task.environment: the model's chat template cannot carry a conversation on with a {role} message:"
                    f" {reason}; leave out what it moves (task.system_prompt, tools), or take another chat template"
                ) from None
        return list(notes)

    def _check_two_turns(self, content: str | Sequence[Mapping[str, Any]], added: Sequence[Mapping[str, Any]]) -> None:
        first = self.continuation(content, added)
        earlier = [*self.opening(content), {"role": "assistant", "content": "an earlier reply"}, *added]
        if self._after_reply([*earlier, _reply()], added) != first:
            raise TemplateError("what it writes after a turn depends on the turns before")

    def _after_reply(self, messages: Sequence[Mapping[str, Any]], added: Sequence[Mapping[str, Any]]) -> str:
        before = self.render(messages[:-1], reply=False)
        after = self.render([*messages, *added])
        if not after.startswith(before):
            raise TemplateError("it changes messages that came before when one follows")
        if after.count(_REPLY) != 1:
            raise TemplateError("it does not show the assistant's message as it is")
        return after.partition(_REPLY)[2]

    def _rewritten_replies(
        self, content: str | Sequence[Mapping[str, Any]], added: Sequence[Mapping[str, Any]]
    ) -> list[str]:
        """Says so where the template shows an earlier turn otherwise than the policy wrote it."""
        opening = self.opening(content)
        thinking = f"<think>\n{_THOUGHT}\n</think>\n\n{_REPLY}"
        shown = self.render([*opening, {"role": "assistant", "content": thinking}, *added])
        sampled = self.render(opening) + thinking + self.continuation(content, added)
        if "".join(shown.split()) == "".join(sampled.split()):
            return []
        return [
            "task: the model's chat template shows earlier turns otherwise than they were sampled (it leaves out their "
            "thinking, for example); the run keeps every turn as it was sampled"
        ]

    def _template_shows_tools(self) -> bool:
        messages = [_message("user")]
        try:
            plain = self.render(messages)
            with_tools = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, tools=self.schemas,
                **self._config.chat_template_kwargs,
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001 (templates raise what they like)
            raise BadInputError(
                f"task.environment: the model's chat template refuses the tools ({describe(error)}); take a model "
                "whose template has tools"
            ) from None
        return bool(plain != with_tools)

    def _check(self) -> None:
        if self.applied and not self.tokenizer.chat_template:
            raise BadInputError(
                "task.chat_template = true: the model's tokenizer has no chat template; "
                "set it to false, or take another model"
            )
        for name in ("system_prompt", "chat_template_kwargs"):
            if not self.applied and getattr(self._config, name):
                raise BadInputError(f"task.{name}: needs a chat template, and none is applied; leave it out")


def as_messages(added: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What an environment adds, as messages: a text is one user message."""
    return [{"role": "user", "content": added}] if isinstance(added, str) else [dict(message) for message in added]


def _message(role: str) -> dict[str, Any]:
    name = {"name": "probe", "tool_call_id": "call00000"} if role == "tool" else {}
    return {"role": role, "content": "a message", **name}


def _reply() -> dict[str, Any]:
    return {"role": "assistant", "content": _REPLY}
