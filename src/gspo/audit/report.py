"""The audit as tables: on a terminal, and as rows that the HTML page shows too."""

from __future__ import annotations

from rich.console import Console

from gspo.audit.audit import Audit, Outcome
from gspo.audit.measure import Spread
from gspo.reporting.console import say
from gspo.reporting.tables import Rows, terminal_table


def print_audit(console: Console, audit: Audit) -> None:
    """Everything but the plots."""
    say(console, audit.source)
    for title, rows in tables(audit):
        say(console, "")
        say(console, title)
        console.print(terminal_table(rows))
    say(console, "")
    for line in verdicts(audit):
        say(console, line)


def tables(audit: Audit) -> list[tuple[str, Rows]]:
    """Title and rows of each table."""
    return [
        ("Difference of log-probs, training engine - inference engine, at equal weights (nats)", _differences(audit)),
        (
            "Its structure: deviations, bitwise agreement, autocorrelation between tokens of a response",
            _structure(audit),
        ),
        ("Per response after length normalisation, by response length", _lengths(audit)),
        ("Clip decisions, with old log-probs of either engine", _decisions(audit)),
        ("Gradient of the next update, engine against training engine", _gradients(audit)),
        ("Seconds a step", _costs(audit)),
    ]


def verdicts(audit: Audit) -> list[str]:
    """One line per objective and range."""
    return [f"{name_of(outcome)}: {outcome.verdict.text}" for outcome in audit.outcomes]


def name_of(outcome: Outcome) -> str:
    """An objective and its range."""
    contender = outcome.contender
    by_turn = " by turn" if contender.by_turn else ""
    return f"{contender.objective}{by_turn} {contender.clip_low:g} / {contender.clip_high:g}"


def _differences(audit: Audit) -> Rows:
    found = audit.differences
    head = ["", "count", "mean |d|", "p99 |d|", "max |d|", "bias"]
    return [head, ["per token", *_spread(found.tokens)], ["per response", *_spread(found.responses)]]


def _structure(audit: Audit) -> Rows:
    found = audit.differences
    identical = f"{found.identical:.1%} / {found.identical_responses:.1%}"
    lagged = ["-" if r is None else f"{r:+.2f}" for r in found.autocorrelation[:4]]
    return [
        [
            "token std",
            "std shared by a response",
            "identical tokens / responses",
            *(f"lag {lag}" for lag in range(1, 5)),
        ],
        [f"{found.noise.token_std:.2g}", f"{found.noise.response_std:.2g}", identical, *lagged],
    ]


def _spread(spread: Spread) -> list[str]:
    return [
        str(spread.count),
        *(f"{value:.2g}" for value in (spread.mean, spread.p99, spread.max)),
        f"{spread.bias:+.2g}",
    ]


def _lengths(audit: Audit) -> Rows:
    head = ["tokens", "responses", "mean |d|", "std", "std if independent"]
    return [
        head,
        *(
            [
                f"{b.shortest}-{b.longest}",
                str(b.responses),
                f"{b.mean:.2g}",
                f"{b.std:.2g}",
                f"{b.expected_std:.2g}",
            ]
            for b in audit.differences.by_length
        ),
    ]


def _decisions(audit: Audit) -> Rows:
    head = ["objective, range", "outside at first", "clipped: training", "engine", "flipped"]
    return [
        head,
        *(
            [
                name_of(o),
                _share(o.outside, o.units),
                _share(o.decisions.removed_training, o.decisions.units),
                _share(o.decisions.removed_engine, o.decisions.units),
                _share(o.decisions.flipped, o.decisions.units),
            ]
            for o in audit.outcomes
        ),
    ]


def _gradients(audit: Audit) -> Rows:
    rows = [["objective, range", "norm ratio", "cosine", "|change| / norm"]]
    for outcome in audit.outcomes:
        found = outcome.gradient
        values = (None, None, None) if found is None else (found.norm_ratio, found.cosine, found.relative)
        rows.append([name_of(outcome), *map(_number, values)])
    return rows


def _costs(audit: Audit) -> Rows:
    costs = audit.costs
    known = [value for value in (costs.rollout, costs.update) if value is not None]
    share = f" (+{costs.recompute / sum(known):.0%})" if len(known) == 2 else ""
    return [
        ["rollout", "recompute", "updates"],
        [_seconds(costs.rollout), f"{_seconds(costs.recompute)}{share}", _seconds(costs.update)],
    ]


def _share(part: int, whole: int) -> str:
    return f"{part}/{whole} {part / whole:.0%}" if whole else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
