"""`gspo report`: a table on the terminal and a page per run, or one page for several runs side by side."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from gspo.errors import BadInputError, GspoError
from gspo.reporting.console import say
from gspo.reporting.curves import lines_of
from gspo.reporting.files import write_atomically
from gspo.reporting.findings import findings
from gspo.reporting.inspector import STYLE, chosen_steps, inspect_step, visible
from gspo.reporting.page import document
from gspo.reporting.report_plots import plots
from gspo.reporting.rollout_records import drop_reasons, evaluated_steps, recorded_steps
from gspo.reporting.run_folder import ROLLOUTS_SHOWN, RunFolder
from gspo.reporting.run_records import RunRecords, read_runs
from gspo.reporting.run_summary import summary
from gspo.reporting.tables import Rows, html_table, terminal_table

_STEPS_OF_ONE, _STEPS_OF_SEVERAL = 5, 2
_EVALUATIONS = 2


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a report says, ready to be shown; each line carries a run's name where there are several.

    `notes` are about what is on disk, `warnings` were given while a run went on, `findings` are what stands out.
    """

    runs: Sequence[RunRecords]
    table: Rows
    notes: Sequence[str]
    warnings: Sequence[str]
    findings: Sequence[str]


def write_report(
    runs: Sequence[RunRecords],
    *,
    html: Path | None,
    rollouts: int,
    steps: Sequence[int],
    evaluations: Sequence[int] = (),
) -> None:
    """Prints the table and writes the page.

    Args:
        runs: from `read_runs`.
        html: where to; default: report.html in the run, of several runs comparison.html in the first.
        rollouts: rollouts to show of a step, at most.
        steps: whose rollouts to show; default: the first, the last and three between (of several runs: two).
        evaluations: the steps after which held-out responses are shown; default: the first and the last.

    Raises BadInputError where no run has recorded a wanted step or evaluation, or the page cannot be written.
    """
    check_steps(runs, steps)
    check_steps(runs, evaluations, held_out=True)
    report = report_of(runs)
    console = Console()
    console.print(terminal_table(report.table))
    for line in report.notes:
        say(console, f"note: {line}")
    for line in report.warnings:
        say(console, f"warning: {line}")
    for line in report.findings:
        say(console, f"look at: {line}")
    first = runs[0].folder
    path = html or (first.report_file if len(runs) == 1 else first.path / "comparison.html")
    try:
        write_atomically(path, page(report, rollouts, steps, evaluations).encode())
    except GspoError as error:
        raise BadInputError(f"--html: {error}") from None
    say(console, f"page: {path}")


def write_page(folder: RunFolder) -> None:
    """Writes the page of one run into its folder, as `gspo report` does, and prints nothing.

    Raises BadInputError where a record is damaged, OSError where the page cannot be written.
    """
    runs = read_runs([folder.path])
    write_atomically(folder.report_file, page(report_of(runs), ROLLOUTS_SHOWN, ()).encode())


def report_of(runs: Sequence[RunRecords]) -> RunReport:
    """The figures of a report and what stands out in them."""
    reasons: list[Counter[str]] = [drop_reasons(run) for run in runs]
    notes, warnings, found = [], [], []
    for run, why in zip(runs, reasons, strict=True):
        name = f"{run.name}: " if len(runs) > 1 else ""
        none_yet = () if run.metrics else ("no step is finished yet",)
        notes += [f"{name}{line}" for line in (*run.notes, *none_yet)]
        warnings += [f"{name}{line}" for line in _warnings(run)]
        found += [f"{name}{line}" for line in findings(run, why)]
    return RunReport(runs, summary(runs, reasons), notes, warnings, found)


def _warnings(run: RunRecords) -> list[str]:
    """What a run was warned of, and what its settings deserve where it kept no warnings."""
    given = [f"{_when(record['step'])}: {record['text']}" for record in run.warnings]
    kept = run.folder.warnings_file.is_file()
    return given if kept or run.config is None else run.config.warnings()


def _when(step: int) -> str:
    return f"step {step}" if step else "at the start"


def check_steps(runs: Sequence[RunRecords], steps: Sequence[int], *, held_out: bool = False) -> None:
    """Raises BadInputError for a wanted step whose rollouts, or held-out responses, no run has."""
    flag, what, recorded = "--step", "rollouts of it", recorded_steps
    if held_out:
        flag, what, recorded = "--evaluation", "held-out responses after it", evaluated_steps
    there = sorted({step for run in runs for step in recorded(run)}) if steps else []
    for step in steps:
        if step not in there:
            known = f"there are steps {there[0]} to {there[-1]}" if there else "there are none at all"
            raise BadInputError(f"{flag}: found {step}, and no {what} are on disk; {known}")


def page(report: RunReport, rollouts: int, steps: Sequence[int], evaluations: Sequence[int] = ()) -> str:
    """The whole document."""
    runs = report.runs
    title = f"Run {runs[0].name}" if len(runs) == 1 else "Runs " + ", ".join(run.name for run in runs)
    nothing = "<p>Nothing stands out; docs/reports.md says what is looked for.</p>"
    parts = [
        f"<h1>{visible(title)}</h1>",
        _list(report.notes),
        html_table(report.table),
        "<h2>Warnings while it ran</h2>" + _list(report.warnings) if report.warnings else "",
        "<h2>What to look at</h2>" + (_list(report.findings) or nothing),
        "<h2>Curves</h2>",
        *plots(lines_of(runs)),
        "<h2>Rollouts</h2><p>Groups with most signal first; in a group the best response first.</p>",
        *_rollouts(runs, rollouts, steps, _STEPS_OF_ONE if len(runs) == 1 else _STEPS_OF_SEVERAL),
        "<h2>Held-out responses</h2>",
        *_rollouts(runs, rollouts, evaluations, _EVALUATIONS, held_out=True),
        "<h2>Settings</h2>",
        *map(_settings, runs),
    ]
    return document(title, parts, STYLE)


def _rollouts(
    runs: Sequence[RunRecords], rollouts: int, steps: Sequence[int], count: int, *, held_out: bool = False
) -> Iterator[str]:
    for run in runs:
        if len(runs) > 1:
            yield f"<h3>{visible(run.name)}</h3>"
        chosen = chosen_steps(run, steps, count, held_out=held_out)
        yield from (inspect_step(run, step, rollouts, held_out=held_out) for step in chosen)
        if not chosen:
            yield "<p>None on disk.</p>"


def _settings(run: RunRecords) -> str:
    if run.config is None:
        return ""
    text = json.dumps(run.config.model_dump(mode="json"), indent=2, ensure_ascii=False)
    return f'<details class="step"><summary>{visible(run.name)}</summary><pre>\n{visible(text, 20_000)}</pre></details>'


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{visible(line)}</li>' for line in lines)}</ul>" if lines else ""
