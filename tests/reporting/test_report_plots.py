"""Which figures are drawn together, and against which clip range."""

import re
from pathlib import Path

from gspo.objectives import CLIP_RANGES
from gspo.reporting.curves import lines_of
from gspo.reporting.metrics import Ratio
from gspo.reporting.report_plots import _OWN_RANGES, clip_bounds, plots
from gspo.reporting.run_records import read_runs
from tests.reporting.run_folders import make_run, settings


def drawn(*folders: Path) -> dict[str, str]:
    """Each plot by its title."""
    found = [plot for plot in plots(lines_of(read_runs(folders))) if plot]
    return {re.findall("<h3>(.*?)</h3>", plot)[0]: plot for plot in found}


def test_the_ranges_drawn_are_those_of_the_objectives() -> None:
    assert {name: CLIP_RANGES[name] for name in _OWN_RANGES} == _OWN_RANGES
    assert clip_bounds(settings().objective) == (3e-4, 4e-4)
    assert clip_bounds(settings(objective={"clip_high": 0.5}).objective) == (3e-4, 0.5)
    assert clip_bounds(settings(objective={"name": "sapo"}).objective) is None


def test_only_what_was_measured_is_drawn(tmp_path: Path) -> None:
    titles = set(drawn(make_run(tmp_path / "r", [{"policy/kl": Ratio(1.0, 10)}] * 2)))
    assert {"Reward", "KL to the starting policy", "Speed by stage"} <= titles
    assert not {"Held-out accuracy", "Experts", "Extremes of the ratios"} & titles
    assert drawn(make_run(tmp_path / "empty")) == {}


def test_rewards_of_several_functions_have_curves_of_their_own(tmp_path: Path) -> None:
    one = {"reward/function/exact": Ratio(1.0, 10)}
    assert "exact" not in drawn(make_run(tmp_path / "one", [one]))["Reward"]
    two = drawn(make_run(tmp_path / "two", [one | {"reward/function/style": Ratio(1.0, 10)}]))["Reward"]
    assert re.findall("</svg>([^<]+)</span>", two) == ["mean", "share correct, as sampled", "exact", "style"]


def test_one_run_has_a_colour_a_figure_and_several_a_dash(tmp_path: Path) -> None:
    def marks(plot: str) -> list[tuple[str, str]]:
        return re.findall(r'<polyline [^>]*stroke="(#\w+)"[^>]*stroke-dasharray="([^"]*)"', plot)

    a, b = make_run(tmp_path / "a", [{}] * 2), make_run(tmp_path / "b", [{}] * 2)
    first, second = marks(drawn(a)["Response length"])
    assert first[0] != second[0]
    assert first[1] == second[1] == "none"
    mean_a, longest_a, mean_b, longest_b = marks(drawn(a, b)["Response length"])
    assert mean_a[0] == longest_a[0] != mean_b[0] == longest_b[0]
    assert mean_a[1] == mean_b[1] != longest_a[1] == longest_b[1]


def test_the_clip_range_is_drawn_where_all_runs_share_it(tmp_path: Path) -> None:
    wide = settings(objective={"clip_low": 5e-4, "clip_high": 5e-4})
    a, b = make_run(tmp_path / "a", [{}] * 2), make_run(tmp_path / "b", [{}] * 2, config=wide)
    assert "1 + 0.0004" in drawn(a)["Spread of the ratios"]
    assert "1 - 0.0003" in drawn(a)["Spread of the ratios"]
    assert "1 + 0.0005" in drawn(b)["Spread of the ratios"]
    assert "1 + " not in drawn(a, b)["Spread of the ratios"]
    (a / "config.json").unlink()
    assert "1 + " not in drawn(a)["Spread of the ratios"]
