"""What follows a turn, for templates of the structure of well-known families: nothing sampled is rendered again."""

from __future__ import annotations

from typing import Any

import pytest

from gspo.config import MultiTurnTask
from gspo.errors import BadInputError
from gspo.tasks.calculator import Calculator
from gspo.tasks.chat import Chat, TemplateError
from gspo.tasks.multi_turn import ToolCall
from tests.tasks.chat_templates import FAMILIES, QWEN3, SMOLLM2, family_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": " 2+2? "}


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One number.
        b: Another number.
    """
    return a + b


def make_chat(family: str, tools: tuple[Any, ...] = (), template: str | None = None, **settings: Any) -> Chat:
    task = MultiTurnTask(kind="multi_turn", environment="a:b", **settings)
    return Chat(task, family_tokenizer(family, template), tools)


def played(chat: Chat, opening: Any, turns: list[tuple[str, Any]], end: str) -> str:
    """A conversation as the run builds it: the prompt, each reply with its end, and what the environment adds."""
    text = chat.render(chat.opening(opening))
    for reply, added in turns:
        follows = chat.continuation(opening, added)
        assert follows.startswith(end)
        text += reply + follows
    return text


@pytest.mark.parametrize("family", FAMILIES)
def test_played_turn_by_turn_it_is_the_text_that_the_template_renders_at_once(family: str) -> None:
    chat = make_chat(family)
    assert len(chat.check("hi")) == (family == "qwen3")
    # Mistral's template writes a space before a reply, which belongs to the reply where a policy samples it.
    space = " " if family == "mistral" else ""
    turns = [("four", "And 3+3?"), ("six", [{"role": "user", "content": "Sure?"}])]
    found = played(chat, [USER], [(space + reply, added) for reply, added in turns], FAMILIES[family][2])
    messages = [USER]
    for reply, added in turns:
        messages += [{"role": "assistant", "content": reply}]
        messages += [{"role": "user", "content": added}] if isinstance(added, str) else added
    whole = chat.render(messages)
    assert found == whole
    tokenizer = chat.tokenizer
    pieces = [chat.render([USER]), *(s for r, a in turns for s in (space + r, chat.continuation([USER], a)))]
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    assert [i for piece in pieces for i in encode(piece)] == encode(whole)


@pytest.mark.parametrize("family", ["qwen3", "llama3", "smollm2"])
def test_tool_results_follow_a_turn(family: str) -> None:
    chat = make_chat(family, (add,), system_prompt="Be brief.")
    chat.check("hi")
    result = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "4"}
    follows = chat.continuation("hi", [result])
    expected = {
        "qwen3": "<|im_end|>\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n",
        "llama3": '<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"4"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "smollm2": "<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n",
    }
    assert follows == expected[family]
    prompt = chat.render(chat.opening("hi"))
    assert "Be brief." in prompt
    assert '"name": "add"' in prompt


def test_thinking_of_earlier_turns_is_kept_and_the_user_told() -> None:
    chat = make_chat("qwen3")
    assert ["leaves out their thinking" in note for note in chat.check("hi")] == [True]
    thought = "<think>\nhm\n</think>\n\nfour"
    follows = chat.continuation("hi", "Sure?")
    assert follows == "<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    rendered = chat.render([USER, {"role": "assistant", "content": thought}, USER])
    assert "hm" not in rendered
    assert "hm" in played(chat, [USER], [(thought, "Sure?")], "<|im_end|>")


def test_a_start_that_the_template_gives_every_reply_is_given_in_later_turns_too() -> None:
    chat = make_chat("qwen3", chat_template_kwargs={"enable_thinking": False})
    assert chat.continuation("hi", "Sure?").endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("what", ["system", "tools"])
def test_a_template_that_moves_system_prompt_or_tools_is_refused(what: str) -> None:
    chat = make_chat("mistral", (add,) if what == "tools" else ())
    opening: Any = [SYSTEM, USER] if what == "system" else [USER]
    with pytest.raises(BadInputError, match=r"cannot carry .* user message: it changes messages that came before"):
        chat.check(opening)
    with pytest.raises(TemplateError):
        chat.continuation(opening, "more")
    if what == "tools":
        result = {"role": "tool", "tool_call_id": "call00000", "content": "4"}
        assert chat.continuation(opening, [result]).startswith('</s>[TOOL_RESULTS]{"content": "4"')


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (SMOLLM2.replace("+ m.content +", "+ (m.content if m.role != 'assistant' else '') +"), "does not show"),
        (SMOLLM2.replace("'<|im_start|>' + m.role", "(messages | length) ~ m.role"), "it changes messages"),
        (
            SMOLLM2.replace("'<|im_start|>assistant\\n' }}{% endif", "(messages | length) ~ ':' }}{% endif"),
            "depends on the turns before",
        ),
        (SMOLLM2 + "{% if messages | length > 2 %}{{ raise_exception('one turn') }}{% endif %}", "raised .*one turn"),
    ],
)
def test_other_templates_that_cannot_go_on_are_refused_with_the_reason(template: str, reason: str) -> None:
    with pytest.raises(BadInputError, match=reason):
        make_chat("smollm2", template=template).check("hi")


def test_without_a_template_texts_follow_each_other() -> None:
    chat = make_chat("smollm2", chat_template=False)
    assert chat.check("hi") == []
    assert chat.continuation("hi", "Lower.\n") == "Lower.\n"
    assert chat.continuation("hi", [USER, SYSTEM]) == " 2+2? Be brief."
    with pytest.raises(BadInputError, match="its tools need a chat template"):
        make_chat("smollm2", (add,), chat_template=False)


def test_tools_without_a_place_in_the_template_stand_in_the_system_message() -> None:
    first, *rest = make_chat("smollm2", (add,)).opening([SYSTEM, USER])
    assert first["content"].startswith("Be brief.\n\nYou can call functions:")
    assert rest == [USER]
    assert make_chat("smollm2", (add,)).opening("hi")[0]["role"] == "system"
    assert make_chat("smollm2", (add,), QWEN3).opening("hi") == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("family", ["qwen3", "llama3", "smollm2"])
def test_an_example_of_a_call_stands_in_the_prompt_in_the_form_that_calls_are_read_in(family: str) -> None:
    environment = Calculator()
    opening: Any = environment.reset({"question": "What is 1 plus 1?", "answer": "2"})
    chat = make_chat(family, environment.tools)
    chat.check(opening)
    assert chat.call_format is not None
    prompt = chat.render(chat.opening(opening))
    start = prompt.index("30 plus 4")
    before = prompt[start : prompt.index("1 plus 1")]
    said = before.split("assistant<|end_header_id|>\n\n" if family == "llama3" else "<|im_start|>assistant\n")[1]
    assert chat.call_format.calls(said) == (ToolCall("calculate", {"expression": "30 + 4"}),)
    assert "34" in before
