"""A byte-level tokenizer with a chat template, so that every text has ids that can be told by hand."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "<{{ message['role'] }}>{{ message['content'] }}<end>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<assistant>{%- if thinking is defined and not thinking -%}()"
    "{%- endif -%}{%- endif -%}"
)


def make_tokenizer(chat_template: str | None) -> PreTrainedTokenizerFast:
    special = ["<bos>", "<eos>", "<end>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(special + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", additional_special_tokens=["<end>"]
    )
    fast.chat_template = chat_template
    return fast


@pytest.fixture
def chat_tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(CHAT_TEMPLATE)


@pytest.fixture
def plain_tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(None)
