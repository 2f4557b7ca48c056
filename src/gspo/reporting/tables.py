"""Tables as rows of text, shown on a terminal and in an HTML page. Text may come from a model."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rich.table import Table
from rich.text import Text

from gspo.reporting.console import printable

Rows = list[list[str]]
"""A table: the first row names the columns."""


def terminal_table(rows: Sequence[Sequence[str]]) -> Table:
    """The rows for a terminal; the first column is aligned left, figures right."""
    head, *body = rows
    table = Table()
    for place, name in enumerate(head):
        table.add_column(Text(printable(name)), justify="right" if place else "left")
    for row in body:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """The rows as an HTML table."""
    head, *body = rows
    names = "".join(f"<th>{escape(printable(name))}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(printable(cell))}</td>" for cell in row) + "</tr>" for row in body)
    return f"<table><tr>{names}</tr>{lines}</table>"
