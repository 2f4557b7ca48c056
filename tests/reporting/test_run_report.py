"""`gspo report` from folder to page: whatever state a run is in, and however long it was."""

import dataclasses
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gspo
from gspo.cli import main
from gspo.reporting.metrics import Ratio
from tests.reporting.rollouts import make_rollout
from tests.reporting.run_folders import CALM, make_run, settings
from tests.reporting.test_inspector import HOSTILE, KNOWN_TAGS, Reader


def cells(text: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    return {row[0]: row[1:] for row in rows}


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_the_table_has_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten calm steps: 100 tokens in 2 and 6 seconds each; 20 of 160 sequences clipped, 240 of 1600 tokens."""
    last = {"reward/mean": Ratio(12.0, 16), "policy/entropy": Ratio(32.0, 160)}
    folder = make_run(tmp_path / "r", [{}] * 9 + [last], accuracy={0: (0.1, 0.05, 0.2), 10: (0.5, 0.4, 0.6)})
    assert main(["report", str(folder)]) == 0
    shown = capsys.readouterr().out
    table = cells(shown)
    assert table["steps"] == ["10"]
    assert table["held-out accuracy before"] == ["0.100 [0.050, 0.200], n = 50"]
    assert table["held-out accuracy, latest"] == ["0.500 [0.400, 0.600], n = 50 after step 10"]
    assert table["reward (last 10 steps)"] == ["0.525"]  # (9 * 8 + 12) / 160
    assert table["reward, last step"] == ["0.75"]
    assert table["clipped sequences (last 10 steps)"] == ["12.5%"]
    assert table["clipped tokens (last 10 steps)"] == ["15.0%"]
    assert table["entropy, first to last step (nats)"] == ["0.5 to 0.2"]
    assert table["tokens a second"] == ["rollout 50, update 16.7"]
    assert table["time in steps"] == ["1:20: update 75%, rollout 25%"]
    assert table["rollouts dropped"] == ["0 of 160"]
    assert "look at" not in shown
    assert shown.splitlines()[-1] == f"page: {folder / 'report.html'}"
    assert "Nothing stands out" in (folder / "report.html").read_text()


def test_the_page_is_one_file_that_runs_and_loads_nothing(tmp_path: Path) -> None:
    rollout = make_rollout()
    hostile = {f"reward/function/{HOSTILE.replace('/', '')}": Ratio(1.0, 2), "reward/function/b": Ratio(1.0, 2)}
    folder = make_run(
        tmp_path / "<script>r",
        [hostile] * 3,
        config=settings(9, task={"system_prompt": HOSTILE}),
        accuracy={0: (0.1, 0.0, 0.2), 3: (0.2, 0.1, 0.3)},
        rollouts={1: [rollout], 3: [rollout]},
    )
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    reader = Reader(page)
    tags = {tag for tag, _ in reader.tags}
    assert not tags & {"script", "img", "link", "iframe", "object", "a", "form", "base"}
    names = {name for _, attributes in reader.tags for name, _ in attributes}
    assert not [name for name in names if name.startswith("on") or name in ("src", "href", "style")]
    assert "default-src 'none'" in page
    assert "\x1b" not in page
    titles = re.findall("<h3>(.*?)</h3>", page)
    assert titles[:3] == ["Held-out accuracy", "Reward", "Response length"]
    assert {"Clipped", "Spread of the ratios", "Entropy of the policy", "Gradient norm", "Time by stage"} <= set(titles)
    assert "KL to the starting policy" not in titles  # there is none
    assert "1 - 0.0003" in page


@pytest.mark.parametrize("missing", ["config.json", "metrics.jsonl", "timings.jsonl", "evaluations.jsonl", "rollouts"])
def test_any_part_may_be_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str) -> None:
    folder = make_run(tmp_path / "r", [{}] * 2, rollouts={1: [make_rollout()]})
    if missing == "rollouts":
        (folder / "rollouts" / "step-000001.jsonl.zst").unlink()
        (folder / "rollouts").rmdir()
    else:
        (folder / missing).unlink()
    assert main(["report", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert ("note: " + missing in shown) == (missing != "rollouts")
    assert (folder / "report.html").exists()


def test_warnings_are_shown_and_are_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that the run kept; of a run that kept none, those that its settings deserve."""
    config = settings(2, task={"held_out": 0})
    told = make_run(tmp_path / "told", [{}] * 2, config=config, warnings={0: f"f: {HOSTILE}", 2: "no signal"})
    assert main(["report", str(told)]) == 0
    shown = capsys.readouterr().out
    assert cells(shown)["warnings"] == ["2"]
    assert "warning: step 2: no signal" in shown
    assert "nothing is held out" not in shown
    page = (told / "report.html").read_text()
    assert "<h2>Warnings while it ran</h2><ul><li>at the start: f: &lt;" in page
    assert HOSTILE not in page
    old = make_run(tmp_path / "old", [{}] * 2, config=config)
    assert main(["report", str(old)]) == 0
    shown = capsys.readouterr().out
    assert cells(shown)["warnings"] == ["0"]
    assert "warning: task.held_out = 0: nothing is held out" in shown


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_has_hardly_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int) -> None:
    folder = make_run(tmp_path / "r", [{}] * steps, config=settings(60), rollouts={1: [make_rollout()]})
    assert main(["report", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert cells(shown)["steps"][0].startswith(f"{steps} of 60, last written 20")
    assert ("no step is finished yet" in shown) == (steps == 0)


def test_figures_that_are_not_finite_are_gaps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = {name: Ratio(float("nan"), 4) for name, value in CALM.items() if isinstance(value, Ratio)}
    broken |= {"ratio/log_p50": float("inf"), "response/length_max": float("nan")}
    folder = make_run(tmp_path / "r", [{}, broken, {}])
    assert main(["report", str(folder)]) == 0
    assert "nan" not in capsys.readouterr().out
    page = (folder / "report.html").read_text()
    assert not re.search(r'="[^"]*\b(nan|inf)\b', page)
    nothing = make_run(tmp_path / "n", [broken])
    assert main(["report", str(nothing)]) == 0


def test_several_runs_share_a_page_with_a_legend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        make_run(
            tmp_path / f"s{seed}", [{}] * 3, config=settings(3, run={"seed": seed}), rollouts={1: [make_rollout()]}
        )
        for seed in (0, 1, 2)
    ]
    other = make_run(tmp_path / "other", [{}] * 2, config=settings(3, optimizer={"learning_rate": 1.0}))
    assert main(["report", *map(str, runs), str(other)]) == 0
    shown = capsys.readouterr().out
    assert cells(shown)["steps"][:2] == ["3", "3"]
    page = (runs[0] / "comparison.html").read_text()
    assert "s0 and 2 more seeds: mean</span>" in page
    assert "other: mean</span>" in page
    assert not (runs[0] / "report.html").exists()


def test_steps_and_file_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = [make_rollout(sample=i) for i in range(4)]
    folder = make_run(tmp_path / "r", [{}] * 9, rollouts=dict.fromkeys(range(1, 10), batch))
    html = tmp_path / "deep" / "a.html"
    assert main(["report", str(folder), "--html", str(html), "--step", "4", "--step", "2", "--rollouts", "2"]) == 0
    assert re.findall(r"Step (\d+):", html.read_text()) == ["2", "4"]
    assert "2 of 4 responses shown" in html.read_text()
    assert main(["report", str(folder)]) == 0
    assert re.findall(r"Step (\d+):", (folder / "report.html").read_text()) == ["1", "3", "5", "7", "9"]
    capsys.readouterr()


def test_held_out_responses_are_shown_and_chosen(tmp_path: Path) -> None:
    """A response to each of two prompts, 1 right; of the evaluations the first and the last, or the wanted ones."""
    answers = [make_rollout(0, reward=0.0), dataclasses.replace(make_rollout(1), text=HOSTILE)]
    folder = make_run(tmp_path / "r", [{}] * 4, held_out=dict.fromkeys((0, 2, 4), answers))
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert re.findall(r"Held out [^:]*", page) == ["Held out before step 1", "Held out after step 4"]
    section = Reader(page.partition("<h2>Held-out responses</h2>")[2].partition("<h2>")[0])
    assert {tag for tag, _ in section.tags} <= KNOWN_TAGS
    assert "2 groups, 2 rollouts (stop 2)" in section.text
    assert section.text.count(HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")) == 2
    assert section.text.index("prompt 1; rewards 1 to 1") < section.text.index("prompt 0; rewards 0 to 0")
    assert main(["report", str(folder), "--evaluation", "2"]) == 0
    assert re.findall(r"Held out [^:]*", (folder / "report.html").read_text()) == ["Held out after step 2"]


def test_a_thousand_steps_are_a_page_of_bounded_size(tmp_path: Path) -> None:
    """1,000 steps of 64 groups of 8 long responses: what a browser opens at once, in seconds."""
    text = "<0123456789>" * 700
    batch = [make_rollout(slot, sample, reward=float(sample)) for slot in range(64) for sample in range(8)]
    long = [dataclasses.replace(rollout, text=text) for rollout in batch]
    folder = make_run(
        tmp_path / "r",
        [{"reward/mean": Ratio(float(step % 7), 16)} for step in range(1000)],
        accuracy=dict.fromkeys(range(0, 1001, 10), (0.5, 0.4, 0.6)),
        rollouts={1: long, 1000: long},
    )
    start = time.perf_counter()
    assert main(["report", str(folder)]) == 0
    assert time.perf_counter() - start < 60
    assert (folder / "report.html").stat().st_size < 2_000_000


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["no-such-folder"], "not the folder of a run"),
        (["r", "no-such-folder"], "no-such-folder: not the folder of a run"),
        (["r", "--step", "7"], "--step: found 7, and no rollouts of it are on disk; there are steps 1 to 1"),
        (
            ["r", "--evaluation", "3"],
            "--evaluation: found 3, and no held-out responses after it are on disk; there are none",
        ),
        (["r", "--rollouts", "0"], "--rollouts: found 0, should be 1 or more"),
        (["r", "--training.steps", "3"], "--training.steps: gspo report takes no settings"),
        (["r", "--html", "r/config.json/x.html"], "--html: r/config.json/x.html: cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "r", [{}], rollouts={1: [make_rollout()]})
    assert main(["report", *argv]) == 2
    (complaint,) = capsys.readouterr().err.splitlines()
    assert line in complaint


def test_a_report_needs_neither_torch_nor_the_model(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", [{}] * 3, rollouts={1: [make_rollout()]})
    source = Path(gspo.__file__).parents[1]
    program = (
        f"import sys; sys.path.insert(0, {str(source)!r}); from gspo.cli import main; status = main(sys.argv[1:]); "
        "print(status, sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "report", str(folder)], capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "0 []"
