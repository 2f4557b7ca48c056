"""A cell is text, on a terminal and in a page."""

import io

from rich.console import Console

from gspo.reporting.tables import html_table, terminal_table

ROWS = [["", "run"], ["name", "<script>alert(1)</script> [bold]x[/] \x1b[2J"]]


def test_html_is_escaped_and_control_characters_are_spelled_out() -> None:
    assert html_table(ROWS) == (
        "<table><tr><th></th><th>run</th></tr><tr><td>name</td>"
        "<td>&lt;script&gt;alert(1)&lt;/script&gt; [bold]x[/] \\x1b[2J</td></tr></table>"
    )


def test_the_terminal_interprets_nothing() -> None:
    file = io.StringIO()
    Console(file=file, width=120, force_terminal=True).print(terminal_table(ROWS))
    assert "[bold]x[/] \\x1b[2J" in file.getvalue()
    assert "\x1b[2J" not in file.getvalue()
