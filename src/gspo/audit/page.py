"""The audit as one HTML page that needs nothing else."""

from __future__ import annotations

from html import escape

from gspo.audit import plots
from gspo.audit.audit import Audit
from gspo.audit.report import Rows, name_of, tables, verdicts

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
"""


def page(audit: Audit) -> str:
    """The whole document."""
    bands = [
        (name_of(o), o.contender.clip_low, o.contender.clip_high)
        for o in audit.outcomes
        if o.contender.unit == "response"
    ]
    found = audit.differences
    parts = [
        "<h1>Inference engine against training engine</h1>",
        f"<p>{escape(audit.source)}</p>",
        "<h2>Verdict</h2><ul>" + "".join(f"<li>{escape(line)}</li>" for line in verdicts(audit)) + "</ul>",
        *(f"<h2>{escape(title)}</h2>{_table(rows)}" for title, rows in tables(audit)),
        "<h2>Differences of tokens</h2>" + plots.histogram(found),
        "<h2>Responses by length</h2><p>A dot is a response; green: 95 % of what the measured noise puts there; "
        "dashed: clip ranges.</p>" + plots.by_length(found, bands),
        "<h2>Autocorrelation</h2><p>Noise that is not independent from token to token averages out more slowly.</p>"
        + plots.autocorrelation(found),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>gspo audit</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _table(rows: Rows) -> str:
    head, *body = rows
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body)
    return f"<table><tr>{names}</tr>{lines}</table>"
