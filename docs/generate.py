"""Writes the pages that come from the code: `python docs/generate.py`. A test says when it is due."""

from __future__ import annotations

from pathlib import Path

from gspo.reporting.metrics import METRICS

_HEAD = "<!-- Made by `python docs/generate.py`; change the source, not this page. -->\n\n"

_METRICS_INTRO = """# Metrics

Every line of a run's `metrics.jsonl` is one step: `step`, each metric under its name, and `sums`, which holds the sum
and the denominator of each metric that is a quotient. To join steps, add sums and denominators, then divide:
`gspo.reporting.metrics.from_record` reads a line back into `Ratio`s that add exactly. A metric without anything to
count is `null`, never NaN; where a sum itself is not finite, `sums` spells it (`"nan"`, `"inf"`).

"Kept" rollouts are those that could be sampled and scored. `{a,b}` stands for one metric each, `<name>` for any
value. The same names go to the trackers. Evaluations have a file of their own, `evaluations.jsonl`, with intervals
and counts per prompt; the trackers get the figures under `evaluation/`. What differs between machines (seconds per
stage, tokens per second, peak memory) is in `timings.jsonl`.

| metric | meaning |
| --- | --- |
"""


def metrics_page() -> str:
    """`docs/metrics.md`, from the list that the recorder accepts."""
    rows = "".join(f"| `{name}` | {_cell(text)} |\n" for name, text in METRICS.items())
    return _HEAD + _METRICS_INTRO + rows


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PAGES = {"metrics.md": metrics_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (Path(__file__).parent / name).write_text(page(), encoding="utf-8")
