"""Tools: schemas, the form of calls read off a template, and calls that go wrong."""

from __future__ import annotations

from typing import Any

import pytest

from gspo.errors import BadInputError
from gspo.tasks.multi_turn import ToolCall
from gspo.tasks.tools import CallFormat, learn_call_format, parse_calls, run_tools, tool_schemas
from tests.tasks.chat_templates import QWEN3, family_tokenizer
from tests.tasks.test_chat import add

QWEN_RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {"close": "<|im_end|>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


@pytest.mark.parametrize(
    ("family", "expected", "said"),
    [
        (
            "qwen3",
            CallFormat("<tool_call>"),
            '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
        ),
        ("llama3", CallFormat("", "name", "parameters"), '{"name": "add", "parameters": {"a": 1, "b": 2}}'),
        ("mistral", CallFormat("[TOOL_CALLS]"), '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]</s>'),
        ("smollm2", CallFormat(), 'Well: <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'),
    ],
)
def test_calls_are_read_in_the_form_that_the_template_writes(family: str, expected: CallFormat, said: str) -> None:
    tokenizer = family_tokenizer(family)
    found = learn_call_format(tokenizer, {})
    assert found == expected
    ids = tokenizer(said, add_special_tokens=False)["input_ids"]
    assert parse_calls(found, tokenizer, [], [], ids) == (ToolCall("add", {"a": 1, "b": 2}),)


def test_several_calls_and_what_is_no_call() -> None:
    form = CallFormat()
    call = '<tool_call>{"name": "f", "arguments": {"n": %d}}</tool_call>'
    assert [c.arguments["n"] for c in form.calls("a" + call % 1 + "\n" + call % 2)] == [1, 2]
    assert form.calls('<tool_call>{"name": "f", "arguments": "{\\"n\\": 3}"}') == (ToolCall("f", {"n": 3}),)
    for text in (
        "no call",
        "<tool_call>",
        "<tool_call>{",
        '<tool_call>["f"]',
        '<tool_call>{"name": 1, "arguments": {}}',
        '<tool_call>{"name": "f", "arguments": [1]}',
        '<tool_call>{"name": "f", "arguments": "n=3"}',
        "<tool_call>" + "[" * 100_000,
    ):
        assert form.calls(text) == ()
    assert CallFormat("").calls('Call {"name": "f"}') == ()
    assert CallFormat("").calls(' \n{"name": "f"}') == (ToolCall("f", {}),)


def test_a_response_template_parses_where_the_tokenizer_has_one() -> None:
    tokenizer = family_tokenizer("qwen3")
    tokenizer.response_template = QWEN_RESPONSE_TEMPLATE
    form = learn_call_format(tokenizer, {})
    assert form is None
    encode: Any = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    prompt = encode("<|im_start|>assistant\n")
    said = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    schemas = tool_schemas([add])
    assert parse_calls(form, tokenizer, schemas, prompt, encode(said)) == (ToolCall("add", {"a": 1, "b": 2}),)
    assert parse_calls(form, tokenizer, schemas, prompt, encode("<tool_call>\n{broken\n</tool_call>")) == ()
    assert parse_calls(form, tokenizer, schemas, prompt, encode("just text")) == ()


def test_a_template_whose_calls_are_not_json_is_refused() -> None:
    xml = QWEN3.replace("""'<tool_call>\\n{"name": "'""", "'<tool_call><function='").replace(
        """'", "arguments": '""", "'>'"
    )
    tokenizer = family_tokenizer("qwen3", xml)
    with pytest.raises(BadInputError, match="in a form that is not JSON; give the tokenizer a `response_template`"):
        learn_call_format(tokenizer, {})


def test_functions_become_schemas_or_are_refused() -> None:
    (schema,) = tool_schemas([add])
    assert schema["function"]["parameters"]["properties"]["a"] == {"type": "integer", "description": "One number."}
    with pytest.raises(BadInputError, match="a tool has no schema"):
        tool_schemas([lambda x: x])


def test_what_goes_wrong_in_a_tool_is_told_to_the_policy() -> None:
    def fails() -> None:
        raise RuntimeError("no luck")

    calls = [ToolCall("add", {"a": 1, "b": 2}), ToolCall("add", {"a": 1}), ToolCall("sub", {}), ToolCall("fails", {})]
    found = run_tools(calls, (add, fails))
    assert [m["content"] for m in found] == [
        "3",
        "error: TypeError: missing a required argument: 'b'",
        "error: there is no tool sub; the tools are add, fails",
        "error: RuntimeError: no luck",
    ]
    assert [(m["role"], m["tool_call_id"]) for m in found] == [("tool", f"call0000{n}") for n in range(4)]
