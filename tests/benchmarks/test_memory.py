"""Memory over the length of responses, on a tiny random model."""

from __future__ import annotations

from pathlib import Path

import memory
import pytest

pytestmark = pytest.mark.slow


def test_rows_tell_what_a_thousand_tokens_more_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short, long = memory.measure("tiny", False, [4096, 64], 1, tmp_path)
    assert [short["response"], long["response"]] == [64, 4096]
    assert [short["fed_tokens"], long["fed_tokens"]] == [64 + 63 + 7, 64 + 4095 + 511]
    grown = long["peak_rss_mb"] - short["peak_rss_mb"]
    # Two layers of width 32 hold about 1,600 numbers a token for the backward pass.
    assert 5 < grown < 300
    assert long["mb_per_1000_tokens"] == pytest.approx(grown / 4.536)
    assert "mb_per_1000_tokens" not in short
    assert len(capsys.readouterr().out.splitlines()) == 2
