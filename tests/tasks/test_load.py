from __future__ import annotations

from typing import Any

import pytest

from gspo.config import JsonlTask
from gspo.errors import BadInputError
from gspo.tasks.load import load_task, tokenize
from gspo.tasks.rows import Row, Rows


def row(content: Any, key: str = "k", **columns: Any) -> Row:
    return Row(where="data.jsonl:7", key=key, question=str(content), content=content, columns=columns)


def task(**settings: Any) -> JsonlTask:
    return JsonlTask(kind="jsonl", path="data.jsonl", **settings)


def test_chat_template_is_applied_once(chat_tokenizer: Any) -> None:
    (prompt,) = tokenize([row("2+2=", answer="4")], task(system_prompt="Be brief."), chat_tokenizer, 100)
    assert chat_tokenizer.decode(prompt.ids) == "<system>Be brief.<end><user>2+2=<end><assistant>"
    # No second beginning-of-sequence token beside the template's own tokens.
    assert chat_tokenizer.bos_token_id not in prompt.ids
    assert prompt.ids.count(chat_tokenizer.convert_tokens_to_ids("<end>")) == 2
    assert prompt.content == "2+2="
    assert prompt.columns == {"answer": "4"}


def test_chat_template_arguments_are_passed(chat_tokenizer: Any) -> None:
    config = task(chat_template_kwargs={"thinking": False})
    (prompt,) = tokenize([row("hi")], config, chat_tokenizer, 100)
    assert chat_tokenizer.decode(prompt.ids) == "<user>hi<end><assistant>()"


def test_messages_keep_their_content(chat_tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "+1="},
    ]
    (prompt,) = tokenize([row(messages)], task(), chat_tokenizer, 100)
    assert chat_tokenizer.decode(prompt.ids) == "<user>1+1=<end><assistant>2<end><user>+1=<end><assistant>"
    assert prompt.content == messages


def test_plain_text_gets_the_tokenizers_own_special_tokens(plain_tokenizer: Any, chat_tokenizer: Any) -> None:
    for tokenizer, config in [(plain_tokenizer, task()), (chat_tokenizer, task(chat_template=False))]:
        (prompt,) = tokenize([row("2+2=")], config, tokenizer, 100)
        assert prompt.ids == (tokenizer.bos_token_id, *tokenizer("2+2=", add_special_tokens=False)["input_ids"])


def test_too_long_a_prompt_is_named(plain_tokenizer: Any) -> None:
    assert len(tokenize([row("1234")], task(), plain_tokenizer, 5)[0].ids) == 5
    with pytest.raises(BadInputError, match=r"data\.jsonl:7: the prompt has 6 tokens, but only 5 fit"):
        tokenize([row("12345")], task(), plain_tokenizer, 5)


def test_what_needs_a_chat_template(plain_tokenizer: Any) -> None:
    for config, content, message in [
        (task(chat_template=True), "x", r"task\.chat_template = true: .* no chat template"),
        (task(system_prompt="s"), "x", r"task\.system_prompt: needs a chat template"),
        (task(chat_template_kwargs={"a": 1}), "x", r"task\.chat_template_kwargs: needs a chat template"),
        (task(), [{"role": "user", "content": "x"}], r"data\.jsonl:7: the prompt is chat messages"),
    ]:
        with pytest.raises(BadInputError, match=message):
            tokenize([row("text first"), row(content)], config, plain_tokenizer, 100)


def test_a_template_that_refuses_is_reported(chat_tokenizer: Any) -> None:
    chat_tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(BadInputError, match=r"data\.jsonl:7: .*System role not supported") as caught:
        tokenize([row("x")], task(), chat_tokenizer, 100)
    assert "\n" not in str(caught.value)


def test_load_task_takes_rows_that_were_read_before(chat_tokenizer: Any) -> None:
    rows = Rows(train=(row("a", "1"), row("b", "2")), held_out=(row("c", "3"),))
    found = load_task(task(), chat_tokenizer, seed=0, max_prompt_tokens=50, rows=rows)
    assert [prompt.key for prompt in found.train] == ["1", "2"]
    assert [prompt.key for prompt in found.held_out] == ["3"]
    assert found.default_reward is None
