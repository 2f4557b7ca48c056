"""The rollouts of a step as a reader wants them: texts and figures, without the long columns of ids and log-probs."""

from __future__ import annotations

import io
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from gspo.errors import BadInputError
from gspo.reporting.run_records import RunRecords, total

_HEADER = 18  # bytes of a zstandard frame's header at most

Advantage = float | int | tuple[float | int, ...] | None
"""One per response, one per turn (or token), or None for a rollout that is not trained on."""


@dataclass(frozen=True, slots=True)
class RolloutText:
    """A rollout as it was written down, its ids counted.

    `messages` are (role, text) of a conversation and `turn_rewards` those of its turns, both empty where `text` is the
    whole response. `logprob` is the mean
    sampler log-prob of the trainable tokens in nats, `versions` the policy versions that wrote it, `ids` its first.
    """

    slot: int
    sample: int
    prompt: tuple[tuple[str, str], ...]
    text: str
    messages: tuple[tuple[str, str], ...]
    reward: float | int | None
    rewards: Mapping[str, float | int | None]
    turn_rewards: tuple[float | int, ...]
    advantage: Advantage
    tokens: int
    trainable: int
    logprob: float | int | None
    finish_reason: str
    dropped: str | None
    versions: tuple[int, ...]
    ids: tuple[int, ...]


def recorded_steps(run: RunRecords) -> list[int]:
    """The steps whose rollouts are on disk."""
    return _steps_in(run.folder.rollouts)


def evaluated_steps(run: RunRecords) -> list[int]:
    """The steps after which held-out responses were drawn that are on disk (0: before the first)."""
    return _steps_in(run.folder.evaluations)


def _steps_in(folder: Path) -> list[int]:
    names = [file.name.removeprefix("step-").partition(".")[0] for file in folder.glob("step-*.jsonl.zst")]
    return sorted(int(name) for name in names if name.isdigit())


def read_texts(path: Path) -> Iterator[RolloutText]:
    """The rollouts of a file, one at a time. Raises BadInputError where it is damaged."""
    try:
        size = zstandard.get_frame_parameters(_first_bytes(path)).content_size
        with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
            lines = io.TextIOWrapper(stream, encoding="utf-8", newline="\n")
            for line in lines:
                yield _text_of(json.loads(line))
            if stream.tell() != size:  # a file that was cut off ends without an error
                raise ValueError(f"{stream.tell()} of {size} bytes are there")
    except (OSError, zstandard.ZstdError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInputError(f"{path}: cannot be read ({type(error).__name__}: {error})") from None


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEADER)


def drop_reasons(run: RunRecords, most_steps: int = 5) -> Counter[str]:
    """Why rollouts were dropped, most frequent first, from the last `most_steps` steps that dropped some."""
    steps = [record["step"] for record in run.metrics if total([record], "reward/dropped")[0] > 0]
    reasons: Counter[str] = Counter()
    for step in steps[-most_steps:]:
        try:
            reasons.update(r.dropped for r in read_texts(run.folder.rollout_file(step)) if r.dropped is not None)
        except BadInputError:
            continue  # the inspector says which file; here its reasons are only missing from the count
    return reasons


def _text_of(record: Mapping[str, Any]) -> RolloutText:
    trained = [p for p, flag in zip(record["sampler_logprobs"], record["trainable"], strict=True) if flag]
    content = record["prompt"]["content"]
    return RolloutText(
        slot=record["slot"],
        sample=record["sample"],
        prompt=(("", content),) if isinstance(content, str) else _messages(content),
        text=record["text"],
        messages=_messages(record.get("messages") or ()),
        reward=record["reward"],
        rewards=record["rewards"],
        turn_rewards=tuple(record.get("turn_rewards") or ()),
        advantage=_advantage(record),
        tokens=len(record["response_ids"]),
        trainable=len(trained),
        logprob=statistics.fmean(trained) if trained else None,
        finish_reason=record["finish_reason"],
        dropped=record["dropped"],
        versions=tuple(dict.fromkeys(span["version"] for span in record["policy_version"])),
        ids=tuple(record["response_ids"][:64]),
    )


def _messages(messages: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    """Role and text of each; what else a message holds (tool calls) as JSON."""
    found = []
    for message in messages:
        content = message.get("content")
        parts = [content] if isinstance(content, str) else [] if content is None else [_json(content)]
        rest = {name: value for name, value in message.items() if name not in ("role", "content") and value}
        found.append((str(message.get("role", "")), "\n".join([*parts, *([_json(rest)] if rest else [])])))
    return tuple(found)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _advantage(record: Mapping[str, Any]) -> Advantage:
    """One number where all trainable tokens share it; else a turn's first, or a token's."""
    value = record["advantage"]
    if not isinstance(value, list):
        return None if value is None else float(value)
    turns = record.get("turns") or range(len(value))
    by_turn: dict[int, float] = {}
    for turn, flag, advantage in zip(turns, record["trainable"], value, strict=True):
        if flag:
            by_turn.setdefault(turn, advantage)
    distinct = tuple(by_turn.values())
    return distinct[0] if len(set(distinct)) == 1 else distinct or None
