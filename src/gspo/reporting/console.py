"""What a run says on the terminal. Text may come from a model: nothing in it is interpreted."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text


def printable(text: str) -> str:
    """Text with its control characters spelled out, so that it cannot move the cursor or set colours.

    >>> printable("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    return "".join(c if c in "\n\t" or c.isprintable() else ascii(c)[1:-1] for c in text)


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


def print_estimates(console: Console, title: str, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """A table of estimates (`value`, `low`, `high`, `n`), each with its 95 % interval."""
    say(console, title)
    table = Table()
    for name in ("", "accuracy", "95 % interval", "prompts"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for name, estimate in rows:
        table.add_row(Text(printable(name)), *_cells(estimate))
    console.print(table)


def _cells(estimate: Mapping[str, Any]) -> tuple[str, str, str]:
    if estimate["value"] is None:
        return "-", "-", "0"
    return f"{estimate['value']:.3f}", f"{estimate['low']:.3f} to {estimate['high']:.3f}", str(estimate["n"])
