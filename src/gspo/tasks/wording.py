"""From a row's columns to the text or messages of a prompt, and to the question that names it."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gspo.errors import BadInputError

# A doubled brace is a literal one; `{name}` is a column; any other brace stands for itself, as in `\boxed{}`.
_FIELD = re.compile(r"\{\{|\}\}|\{(\w+)\}")


def template_columns(template: str) -> list[str]:
    """The columns that stand in a template, each once, in order."""
    return list(dict.fromkeys(match[1] for match in _FIELD.finditer(template) if match[1]))


def fill(template: str, columns: Mapping[str, str]) -> str:
    """The template with columns in place of `{name}`, `{{` and `}}` as literal braces; values are never parsed.

    >>> fill("{prompt} Answer as \\\\boxed{} or {{set}}.", {"prompt": "1{2}="})
    '1{2}= Answer as \\\\boxed{} or {set}.'
    """
    return _FIELD.sub(lambda match: columns[match[1]] if match[1] else match[0][0], template)


def normalise(text: str) -> str:
    """The form in which questions are compared: NFKC, case folded, runs of white space as one space.

    >>> normalise(" What\\n is  ２+2? ") == normalise("what is 2+2?")
    True
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(folded.split())


def question_key(question: str) -> str:
    """A name for a normalised question that stays the same over runs and machines: 16 hexadecimal digits."""
    return hashlib.blake2b(question.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def held_out_rank(question: str, seed: int) -> bytes:
    """Where a question stands in the order from which the first ones are held out: its text and the seed decide."""
    return hashlib.blake2b(f"{seed}\n{question}".encode("utf-8", "surrogatepass"), digest_size=16).digest()


def check_messages(value: object, where: str) -> list[dict[str, Any]]:
    """Chat messages as chat templates take them, the last of them not the assistant's; BadInputError otherwise."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise BadInputError(
            f"{where}: the prompt is of type {type(value).__name__}; give text or a list of chat messages"
        )
    messages = []
    for index, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise BadInputError(
                f'{where}: message {index} of the prompt is {_short(message)}; give objects with "role" and "content"'
            )
        messages.append(dict(message))
    if messages[-1]["role"] == "assistant":
        raise BadInputError(
            f"{where}: the prompt ends with an assistant message; end it where the policy is to answer, "
            "and put the expected answer in a column of its own"
        )
    return messages


def messages_text(messages: Iterable[Mapping[str, Any]]) -> str:
    """What a conversation asks: all its messages but the system's, one a line."""
    asked = [message for message in messages if message["role"] != "system"]
    return "\n".join(f"{message['role']}: {_content_text(message['content'])}" for message in asked)


def _content_text(content: object) -> str:
    return content if isinstance(content, str) else json.dumps(content, sort_keys=True, default=str)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
