"""Tools: functions as schemas for the chat template, calls read back in the form that the template writes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils import get_json_schema

from gspo.errors import BadInputError
from gspo.imports import describe
from gspo.tasks.multi_turn import ToolCall

_NAME = "gspo7tool"
_ARGUMENTS = {"gspo7argument": "gspo7value"}


def tool_schemas(tools: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """JSON schemas of functions with type hints and a docstring that describes each argument.

    Raises BadInputError for a function that lacks them.
    """
    try:
        return [get_json_schema(tool) for tool in tools]
    except Exception as error:  # noqa: BLE001 (a signature can be wrong in many ways)
        raise BadInputError(
            f"task.environment: a tool has no schema ({describe(error)}); give it type hints and a docstring with an "
            "`Args:` section"
        ) from None


def instructions(schemas: Sequence[Mapping[str, Any]]) -> str:
    """What a model is told of its tools where its chat template has no place for them."""
    functions = "\n".join(json.dumps(schema["function"]) for schema in schemas)
    return (
        f"You can call functions:\n{functions}\n"
        'To call one, write <tool_call>{"name": its name, "arguments": {its arguments}}</tool_call>.'
    )


def spelled_out(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls stand in its text, in the form that `instructions` describes."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [
        f"<tool_call>{json.dumps({'name': f['name'], 'arguments': f['arguments']})}</tool_call>" for f in functions
    ]
    text = "\n".join([*([message["content"]] if message["content"] else []), *calls])
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": text} if calls else message


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How calls stand in a response: JSON, an object or a list of them, behind `marker` (at the start if empty)."""

    marker: str = "<tool_call>"
    name_key: str = "name"
    arguments_key: str = "arguments"

    def calls(self, text: str) -> tuple[ToolCall, ...]:
        """The calls in a response's text, special tokens included; what cannot be read is no call."""
        starts = _after_each(self.marker, text) if self.marker else [len(text) - len(text.lstrip())]
        return tuple(call for start in starts for call in self._read(text, start))

    def _read(self, text: str, start: int) -> Iterator[ToolCall]:
        try:
            value, _ = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, RecursionError):
            return
        for entry in value if isinstance(value, list) else [value]:
            if not isinstance(entry, dict):
                continue
            name, arguments = entry.get(self.name_key), entry.get(self.arguments_key, {})
            if isinstance(arguments, str):
                arguments = _json_object(arguments)
            if isinstance(name, str) and isinstance(arguments, dict):
                yield ToolCall(name, arguments)


def learn_call_format(tokenizer: Any, template_arguments: Mapping[str, Any]) -> CallFormat | None:
    """The form in which the chat template writes a call, read off a made-up one; None where the tokenizer has a
    `response_template`, which then parses.

    A template that knows no calls gets the form that `instructions` describes. Raises BadInputError for a template
    that writes calls in a form that is not JSON.
    """
    if getattr(tokenizer, "response_template", None) is not None:
        return None
    user = {"role": "user", "content": "a question"}
    call = {"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
    answer = {"role": "tool", "name": _NAME, "tool_call_id": "call00000", "content": "a result"}
    try:
        prompt = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True, **template_arguments)
        text = tokenizer.apply_chat_template(
            [user, {"role": "assistant", "content": "", "tool_calls": [call]}, answer], tokenize=False,
            **template_arguments,
        )  # fmt: skip
    except Exception:  # noqa: BLE001 (a template without calls may raise anything)
        return CallFormat()
    if f'"{_NAME}"' not in text:
        return CallFormat() if _NAME not in text.partition("a result")[0] else _refuse_form()
    return _read_format(text, prompt)


def _read_format(text: str, prompt: str) -> CallFormat:
    end = text.index(f'"{_NAME}"')
    for start in (at for at in range(end) if text[at] in "[{"):
        try:
            value, _ = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            continue
        entry = value[0] if isinstance(value, list) and value else value
        keys = {json.dumps(v) if isinstance(v, dict) else v: k for k, v in entry.items() if isinstance(v, str | dict)}
        arguments = keys.get(json.dumps(_ARGUMENTS))
        if _NAME in keys and arguments is not None:
            lead = text[:start].removeprefix(prompt).split()
            return CallFormat(lead[-1] if text.startswith(prompt) and lead else "", keys[_NAME], arguments)
    return _refuse_form()


def _refuse_form() -> CallFormat:
    raise BadInputError(
        "task.environment: the model's chat template writes tool calls in a form that is not JSON; give the tokenizer "
        "a `response_template` (transformers' chat response parsing) that reads them"
    )


def parse_calls(
    call_format: CallFormat | None,
    tokenizer: Any,
    schemas: Sequence[dict[str, Any]],
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
) -> tuple[ToolCall, ...]:
    """The calls in a response, by `call_format` or, where it is None, by the tokenizer's `response_template`."""
    if call_format is not None:
        return call_format.calls(tokenizer.decode(list(response_ids), skip_special_tokens=False))
    try:
        message = tokenizer.parse_response(list(response_ids), prefix=list(prompt_ids), tools=list(schemas))
    except Exception:  # noqa: BLE001 (what a model writes need not be parsable)
        return ()
    functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return tuple(ToolCall(f["name"], f["arguments"]) for f in functions if isinstance(f.get("arguments"), dict))


def run_tools(calls: Sequence[ToolCall], tools: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """Calls the tools; one tool message each. What goes wrong stands in the message, for the policy to read."""
    by_name = {tool.__name__: tool for tool in tools}
    return [
        {"role": "tool", "name": call.name, "tool_call_id": f"call{n:05d}", "content": _result(call, by_name)}
        for n, call in enumerate(calls)
    ]


def _result(call: ToolCall, by_name: Mapping[str, Callable[..., Any]]) -> str:
    tool = by_name.get(call.name)
    if tool is None:
        return f"error: there is no tool {call.name}; the tools are {', '.join(by_name)}"
    try:
        inspect.signature(tool).bind(**call.arguments)
        return str(tool(**call.arguments))
    except Exception as error:  # noqa: BLE001 (a tool's failure is an answer to the policy, not the run's end)
        return f"error: {type(error).__name__}: {error}"


def _after_each(marker: str, text: str) -> list[int]:
    """Where something other than white space follows each marker."""
    starts, at = [], text.find(marker)
    while at >= 0:
        start = at + len(marker)
        rest = text[start:]
        starts.append(start + len(rest) - len(rest.lstrip()))
        at = text.find(marker, start)
    return starts


def _json_object(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
