from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.rollout.families import tiny_model, tiny_tokenizer


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture
def llama() -> Any:
    return tiny_model("llama")
