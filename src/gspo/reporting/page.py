"""One HTML document that needs nothing else: no script, no other file, no network."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #8885; text-align: right; }
th:first-child, td:first-child { text-align: left; }
svg { width: 100%; max-width: 44rem; display: block; margin: .5rem 0 1.5rem; }
svg text { font-size: 11px; fill: currentColor; }
.bar, .dot { fill: #3b78c2; } .dot { fill-opacity: .6; }
.axis { fill: none; stroke: currentColor; } .band { stroke: #c2453b; stroke-dasharray: 5 4; }
.model { fill: none; stroke: #4a9a5b; }
.legend { margin: -1rem 0 1.5rem; font-size: 13px; } .legend span { margin-right: 1.2rem; display: inline-block; }
.legend svg { width: 1.6rem; display: inline; margin: 0 .4rem 0 0; vertical-align: middle; }
"""
# What the escaping should already make impossible, the browser is told to refuse too.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def document(title: str, parts: Iterable[str], style: str = "") -> str:
    """The whole document; `parts` are HTML, `title` is text, `style` comes after the common style sheet."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_STYLE}{style}</style></head><body>{''.join(parts)}</body></html>\n"
    )
