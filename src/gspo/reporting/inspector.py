"""The rollout inspector of a run report: groups and their responses as collapsible HTML.

What a model wrote is untrusted: it is escaped, and characters that do not print are spelled out and marked.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import TypeVar

from gspo.errors import BadInputError
from gspo.reporting.console import printable
from gspo.reporting.rollout_records import RolloutText, evaluated_steps, read_texts, recorded_steps
from gspo.reporting.run_records import RunRecords

LONGEST = 4000
"""Characters of a text that are shown; of a longer one the beginning and the end."""

EMPTY = '<span class="cut">(empty)</span>'

STYLE = """
details { margin: .3rem 0 .3rem 1rem; } details.step { margin-left: 0; } summary { cursor: pointer; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0 .6rem 1rem; padding: .4rem .7rem;
  border-left: 3px solid #8885; }
.unprintable, .role { color: #b5482a; } .cut { color: #7a7a7a; font-style: italic; } .small { font-size: 13px; }
"""

Group = list[RolloutText]

T = TypeVar("T")


def chosen_steps(run: RunRecords, wanted: Sequence[int], count: int, *, held_out: bool = False) -> list[int]:
    """The wanted steps that the run has recorded; without a wish the first, the last and evenly many between.

    `held_out`: those after which it was evaluated.
    """
    there = evaluated_steps(run) if held_out else recorded_steps(run)
    return [step for step in sorted(set(wanted)) if step in there] if wanted else spread(there, count)


def spread(items: Sequence[T], count: int) -> list[T]:
    """At most `count` of the items, evenly spaced, the first and the last among them.

    >>> spread(range(10), 4)
    [0, 3, 6, 9]
    """
    if len(items) <= count:
        return list(items)
    if count == 1:
        return [items[0]]
    return [items[round(k * (len(items) - 1) / (count - 1))] for k in range(count)]


def inspect_step(run: RunRecords, step: int, most: int, *, held_out: bool = False) -> str:
    """The groups of a step, those with most signal first; of many, some from all along that order.

    No more than `most` rollouts are shown. `held_out`: the responses of the evaluation after the step instead.
    """
    folder = run.folder
    try:
        rollouts = list(read_texts(folder.evaluation_file(step) if held_out else folder.rollout_file(step)))
    except BadInputError as error:
        return f"<p>{visible(str(error))}</p>"
    by_slot: dict[int, Group] = {}
    for rollout in rollouts:
        by_slot.setdefault(rollout.slot, []).append(rollout)
    groups = sorted(by_slot.values(), key=_signal, reverse=True)
    size = max(map(len, groups), default=1)
    shown = spread(groups, max(1, most // size))
    parts = [_group(group, most) for group in shown]
    ends = ", ".join(f"{name} {n}" for name, n in Counter(r.finish_reason for r in rollouts).most_common())
    title = f"Step {step}" if not held_out else f"Held out after step {step}" if step else "Held out before step 1"
    head = f"{title}: {len(groups)} groups, {len(rollouts)} rollouts ({ends})"
    if len(shown) < len(groups):
        head += f"; {len(shown)} groups shown"
    return f'<details class="step"><summary>{escape(head)}</summary>{"".join(parts)}</details>'


def visible(text: str, longest: int = LONGEST) -> str:
    """Text as HTML: markup escaped, characters that do not print spelled out and marked, a long middle left out."""
    if len(text) > longest:
        half = longest // 2
        cut = f'<span class="cut"> [{len(text) - 2 * half} characters left out] </span>'
        return visible(text[:half], longest) + cut + visible(text[-half:], longest)
    if printable(text) == text:
        return escape(text)
    runs = itertools.groupby(text, key=lambda c: printable(c) == c)
    return "".join(
        escape("".join(part)) if plain else f'<span class="unprintable">{escape(printable("".join(part)))}</span>'
        for plain, part in runs
    )


def _signal(group: Group) -> tuple[float | int, float | int]:
    rewards = [r.reward for r in group if r.reward is not None]
    return (statistics.pstdev(rewards), statistics.fmean(rewards)) if rewards else (-1.0, 0.0)


def _group(group: Group, most: int) -> str:
    """Best responses first, dropped ones last; the summary says how the rewards lie."""
    ordered = sorted(group, key=lambda r: (r.reward is None, -(r.reward or 0.0), r.sample))
    shown = spread(ordered, most)
    rewards = [r.reward for r in ordered if r.reward is not None]
    figures = (
        f"rewards {min(rewards):.3g} to {max(rewards):.3g}, mean {statistics.fmean(rewards):.3g}" if rewards else ""
    )
    dropped = f"{len(group) - len(rewards)} dropped" if len(rewards) < len(group) else ""
    part = f"{len(shown)} of {len(group)} responses shown" if len(shown) < len(group) else f"{len(group)} responses"
    head = "; ".join(filter(None, (f"prompt {group[0].slot}", figures, part, dropped)))
    first = " ".join(group[0].prompt[-1][1].split()) if group[0].prompt else ""
    body = _texts(group[0].prompt) + "".join(map(_response, shown))
    return f"<details><summary>{escape(head)}: {visible(first[:100])}</summary>{body}</details>"


def _response(rollout: RolloutText) -> str:
    head = [
        "dropped" if rollout.reward is None else f"reward {rollout.reward:.4g}",
        f"advantage {_advantage(rollout)}",
        _tokens(rollout),
        rollout.finish_reason,
        f"policy version {', '.join(map(str, rollout.versions))}",
    ]
    if rollout.logprob is not None:
        head.append(f"sampler log-prob {rollout.logprob:.3g} a token")
    each = ", ".join(f"{name} {_number(value)}" for name, value in rollout.rewards.items())
    if rollout.turn_rewards:
        each += f"; by turn: {', '.join(map(_number, rollout.turn_rewards))}"
    why = f'<p class="small">dropped: {visible(rollout.dropped)}</p>' if rollout.dropped is not None else ""
    rewards = f'<p class="small">by function: {visible(each)}</p>' if each else ""
    more = " ..." if rollout.tokens > len(rollout.ids) else ""
    ids = f'<p class="small">ids: {" ".join(map(str, rollout.ids))}{more}</p>'
    text = _texts(rollout.messages or (("", rollout.text),))
    return f"<details open><summary>{escape('; '.join(head))}</summary>{why}{rewards}{text}{ids}</details>"


def _texts(messages: Iterable[tuple[str, str]]) -> str:
    found = []
    for role, text in messages:
        name = f'<span class="role">{visible(role)}: </span>' if role else ""
        # A browser drops the first line break in <pre>: this one, and not the text's own.
        found.append(f"<pre>\n{name}{visible(text) or EMPTY}</pre>")
    return "".join(found)


def _tokens(rollout: RolloutText) -> str:
    count = f"{rollout.tokens} token{'' if rollout.tokens == 1 else 's'}"
    return count if rollout.trainable == rollout.tokens else f"{count}, {rollout.trainable} trainable"


def _advantage(rollout: RolloutText) -> str:
    advantage = rollout.advantage
    if advantage is None:
        return "none"
    if isinstance(advantage, float | int):
        return f"{advantage:+.3g}"
    if rollout.turn_rewards:
        return ", ".join(f"{value:+.3g}" for value in advantage) + " by turn"
    return f"{min(advantage):+.3g} to {max(advantage):+.3g} by token"


def _number(value: float | int | None) -> str:
    return "does not apply" if value is None else f"{value:.4g}"
