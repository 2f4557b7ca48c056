"""Metrics: sums add exactly, nothing is NaN, every name has a definition."""

import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.reporting.metrics import METRICS, Ratio, as_record, documented, expand, from_record, value_of

ROOT = Path(__file__).parents[2]


def test_adding_two_ratios_is_the_ratio_of_the_union() -> None:
    assert (Ratio(3.0, 4) + Ratio(1.0, 12)).value == 0.25  # the mean of the two means would be 0.41667
    assert (Ratio(0.0, 0) + Ratio(1.0, 2)).value == 0.5


def test_nothing_counted_has_no_value() -> None:
    assert Ratio(0.0, 0).value is None
    assert as_record({"reward/mean": Ratio(0.0, 0)}) == {"reward/mean": None, "sums": {"reward/mean": [0.0, 0]}}


@given(st.lists(st.tuples(st.floats(allow_nan=False, allow_infinity=False, width=32), st.integers(0, 9)), min_size=2))
def test_records_of_parts_add_up_to_the_record_of_the_whole(parts: list[tuple[float, int]]) -> None:
    lines = [json.dumps(as_record({"reward/mean": Ratio(total, count)}), allow_nan=False) for total, count in parts]
    ratios = [from_record(json.loads(line))["reward/mean"] for line in lines]
    total = Ratio(0.0, 0)
    for ratio in ratios:
        assert isinstance(ratio, Ratio)
        total = total + ratio
    assert total.count == sum(count for _, count in parts)
    largest = max(abs(part) for part, _ in parts)
    assert total.sum == pytest.approx(math.fsum(part for part, _ in parts), rel=1e-12, abs=1e-9 * largest)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null_and_its_sum_says_why(bad: float) -> None:
    record = json.loads(
        json.dumps(as_record({"optimizer/gradient_norm": Ratio(bad, 4), "ratio/log_max": bad}), allow_nan=False)
    )
    assert record["optimizer/gradient_norm"] is None
    assert record["ratio/log_max"] is None
    restored = from_record(record)["optimizer/gradient_norm"]
    assert isinstance(restored, Ratio)
    assert str(restored.sum) == str(bad)
    assert "ratio/log_max" not in from_record(record)


def test_a_metric_without_a_definition_is_refused() -> None:
    with pytest.raises(ValueError, match="reward/maen"):
        as_record({"reward/maen": 1.0})


def test_patterns_cover_what_they_say_and_no_more() -> None:
    assert documented("reward/function/pkg.mod:fn")
    assert documented("clip/token_removed_high_positive")
    assert documented("evaluation/pass_at_8")
    for name in ("clip/token", "reward/function/", "reward/function/a/b", "clip/token_removed_up", "reward/<name>"):
        assert not documented(name)
    assert len({name for pattern in METRICS for name in expand(pattern)}) == sum(len(expand(p)) for p in METRICS)


def test_value_of() -> None:
    assert value_of(Ratio(1.0, 2)) == 0.5
    assert value_of(0.25) == 0.25


def test_every_metric_is_on_the_page_and_every_name_on_the_page_is_a_metric() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", page, flags=re.MULTILINE)
    assert dict(rows) == {name: text.replace("|", "\\|") for name, text in METRICS.items()}
