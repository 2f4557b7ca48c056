"""What is shown is what was said: text of a model commands nothing."""

import io
import re

import pytest
from rich.console import Console

from gspo.reporting.console import Progress, clock_time, print_estimates, printable, say


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=120)


def output(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def terminal() -> Console:
    return Console(file=io.StringIO(), width=120, force_terminal=True, color_system="truecolor")


@pytest.mark.parametrize("hostile", ["[bold red]hi[/]", "[link=http://x]y[/link]", ":smile:", "[/]", "http://a/b 12.5"])
def test_markup_is_text(hostile: str) -> None:
    for console in (plain_console(), terminal()):
        say(console, hostile)
        assert output(console) == hostile + "\n"


def test_control_characters_are_spelled_out() -> None:
    console = terminal()
    say(console, "a\x1b[2Jb\x07c\rd\x9be")
    assert output(console) == "a\\x1b[2Jb\\x07c\\rd\\x9be\n"
    assert printable("tab\tline\nü 漢 \u202e") == "tab\tline\nü 漢 \\u202e"


def test_a_long_line_is_not_wrapped() -> None:
    console = plain_console()
    say(console, "x" * 500)
    assert output(console) == "x" * 500 + "\n"


def test_plain_output_is_a_line_a_step() -> None:
    console = plain_console()
    progress = Progress(console, total=4)
    progress.stage("rollout")
    progress.step(1, [("reward", 0.51234), ("clipped", None)])
    progress.step(2, [("reward", 12345.0)])
    progress.close()
    lines = output(console).splitlines()
    assert re.fullmatch(r"step 1/4  reward 0\.512  clipped -  ETA \d+:\d\d", lines[0])
    assert lines[1].startswith("step 2/4  reward 1.23e+04")
    assert len(lines) == 2


def test_eta_counts_only_the_steps_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("gspo.reporting.console.time.monotonic", lambda: now[0])
    console = plain_console()
    progress = Progress(console, total=20, done=10)
    now[0] = 130.0
    progress.step(12, [])  # 2 steps in 30 s, 8 to go
    assert output(console) == "step 12/20  ETA 2:00\n"


def test_a_terminal_gets_a_live_line_and_keeps_the_last() -> None:
    console = terminal()
    progress = Progress(console, total=4)
    progress.step(1, [("reward", 0.5)])
    progress.stage("[bold]evaluation")
    progress.close()
    progress.close()
    text = output(console)
    assert "[bold]evaluation" in text
    assert text.endswith("step 1/4  reward 0.5  ETA " + text.rpartition("ETA ")[2])
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is given back


def test_clock_time() -> None:
    assert [clock_time(s) for s in (0, 59.4, 59.6, 3599.6, 90061)] == ["0:00", "0:59", "1:00", "1:00:00", "25:01:01"]


def test_the_table_shows_estimates_with_intervals_and_n() -> None:
    console = plain_console()
    known = {"value": 0.1, "low": 0.05, "high": 0.15, "n": 200}
    nothing = {"value": None, "low": None, "high": None, "n": 0}
    print_estimates(console, "held out [x]", [("before", known), ("[b]after", nothing)])
    lines = output(console).splitlines()
    assert lines[0] == "held out [x]"
    assert [cell.strip() for cell in lines[4].split("│")[1:-1]] == ["before", "0.100", "0.050 to 0.150", "200"]
    assert [cell.strip() for cell in lines[5].split("│")[1:-1]] == ["[b]after", "-", "-", "0"]
