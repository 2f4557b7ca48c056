"""The paper index names functions and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import gspo.objectives

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "paper_index.md").read_text(encoding="utf-8")


def test_every_named_test_exists() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE)
    assert len(named) > 5
    for file, test in named:
        assert f"def {test}(" in (ROOT / "tests" / "objectives" / file).read_text(encoding="utf-8"), test
    controls = (ROOT / "tests" / "objectives" / "test_controls.py").read_text(encoding="utf-8")
    for test in re.findall(r"`(test_\w+)`", PAGE):
        assert f"def {test}(" in controls, test


def test_every_named_function_is_exported() -> None:
    names = set(re.findall(r"`(\w+(?:_loss|_ratio|_advantages|_k3))\b", PAGE))
    assert {"gspo_loss", "gspo_token_loss", "kl_k3", "sapo_loss"} <= names
    for name in names:
        assert callable(getattr(gspo.objectives, name)), name
    assert set(re.findall(r"^\| `(\w+)` \| arXiv", PAGE, re.MULTILINE)) <= set(gspo.objectives.LOSSES)
