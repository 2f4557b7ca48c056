"""The audit as one HTML page that needs nothing else."""

from __future__ import annotations

from html import escape

from gspo.audit import plots
from gspo.audit.audit import Audit
from gspo.audit.report import name_of, tables, verdicts
from gspo.reporting.page import document
from gspo.reporting.tables import html_table


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
        *(f"<h2>{escape(title)}</h2>{html_table(rows)}" for title, rows in tables(audit)),
        "<h2>Differences of tokens</h2>" + plots.histogram(found),
        "<h2>Responses by length</h2><p>A dot is a response; green: 95 % of what the measured noise puts there; "
        "dashed: clip ranges.</p>" + plots.by_length(found, bands),
        "<h2>Autocorrelation</h2><p>Noise that is not independent from token to token averages out more slowly.</p>"
        + plots.autocorrelation(found),
    ]
    return document("gspo audit", parts)
