"""What a run says on the terminal. Text may come from a model: nothing in it is interpreted."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

Cell = tuple[float, float, float, int]
"""An estimate, the ends of its interval, and how many prompts it is over."""


def printable(text: str) -> str:
    """Text with its control characters spelled out, so that it cannot move the cursor or set colours.

    >>> printable("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    return "".join(c if _harmless(c) else ascii(c)[1:-1] for c in text)


def _harmless(character: str) -> bool:
    return character in "\n\t" or character.isprintable()


def say(console: Console, text: str) -> None:
    """Prints a line as it is: no markup, no wrapping."""
    console.print(Text(printable(text)), soft_wrap=True)


class Progress:
    """A live line on a terminal; elsewhere a plain line per step.

    `total` steps in all, of which `done` were made before this process.
    """

    def __init__(self, console: Console, total: int, done: int = 0) -> None:
        self._console = console
        self._total = total
        self._done = done
        self._first = done
        self._start = time.monotonic()
        self._stage = ""
        self._shown = ""
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        if self._live is not None:
            self._live.start()

    def stage(self, name: str) -> None:
        """Says what the run is at; shown on a terminal only."""
        self._stage = name
        self._refresh()

    def step(self, step: int, figures: Iterable[tuple[str, float | int | None]]) -> None:
        """Shows the figures of a finished step and when the run will end."""
        self._done = step
        parts = [f"step {step}/{self._total}"]
        parts += [f"{name} {_short(value)}" for name, value in figures]
        parts.append(f"ETA {self._eta()}")
        self._shown = "  ".join(parts)
        if self._live is None:
            say(self._console, self._shown)
        self._refresh()

    def close(self) -> None:
        """Gives the terminal back, the last line left standing."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            if self._shown:
                say(self._console, self._shown)

    def _refresh(self) -> None:
        if self._live is not None:
            stage = f"  ({self._stage})" if self._stage else ""
            self._live.update(Text(printable(self._shown + stage), no_wrap=True, overflow="ellipsis"))

    def _eta(self) -> str:
        made = self._done - self._first
        if made <= 0:
            return "?"
        return clock_time((time.monotonic() - self._start) / made * (self._total - self._done))


def clock_time(seconds: float | int) -> str:
    """Hours, minutes and seconds.

    >>> clock_time(59.6), clock_time(3725)
    ('1:00', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _short(value: float | int | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def print_estimates(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Sequence[tuple[str, Sequence[Cell | None]]],
) -> None:
    """A table of estimates, each with its interval and n."""
    table = Table(title=Text(printable(title)), title_justify="left")
    table.add_column("")
    for name in columns:
        table.add_column(Text(printable(name)), justify="right", no_wrap=True)
    for name, cells in rows:
        table.add_row(Text(printable(name)), *(Text(_cell(cell)) for cell in cells))
    console.print(table)


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    value, low, high, n = cell
    return f"{value:.3f} [{low:.3f}, {high:.3f}] n={n}"


def print_run_path(console: Console, path: Path) -> None:
    """Says where the run lies, on a line of its own that can be copied."""
    say(console, f"run: {path}")
