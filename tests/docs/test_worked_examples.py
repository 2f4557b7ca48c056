"""The pages with code are run as they stand: what they print is what they show."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", ["worked_examples.md", "clip_range.md", "multi_turn.md"])
def test_code_blocks_print_what_the_page_shows(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    printed, shown = "", 0
    for kind, body in BLOCK.findall((DOCS / page).read_text(encoding="utf-8")):
        if kind == "text":
            assert printed == body
            printed, shown = "", shown + 1
            continue
        assert not printed, f"a block prints what the page does not show:\n{printed}"
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(body, page, "exec"), namespace)
        printed = out.getvalue()
    assert not printed
    assert shown > 0
    for image in tmp_path.iterdir():
        assert (DOCS / image.name).exists(), f"{image.name} is drawn by the page and not in docs"
