"""Rollout batches on disk: a record to read, and the journal that a resumed run restores them from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from gspo.errors import BadInputError
from gspo.reporting.files import write_atomically
from gspo.types import Prompt, Rollout, VersionSpan

# Every field of a rollout that JSON holds as it is, so that one that is added later is not lost.
_PLAIN = tuple(f.name for f in fields(Rollout) if f.name not in ("prompt", "routes"))

Advantage = float | int | Sequence[float] | None


def write_rollouts(path: Path, rollouts: Sequence[Rollout], advantages: Sequence[Advantage] | None = None) -> None:
    """Writes a rollout batch whole, one JSON line per rollout, compressed; routes go to a file beside it.

    `advantages` has an entry per rollout: a number, one per response token, or None (dropped). Floats are
    written so that they read back to the same bits. The routes are in place before the rollouts are: where
    the file exists, the batch is complete.
    """
    given: Sequence[Advantage] = advantages if advantages is not None else [None] * len(rollouts)
    lines = [
        json.dumps(_to_record(rollout, advantage), default=_as_json)
        for rollout, advantage in zip(rollouts, given, strict=True)
    ]
    routes = _pack_routes(rollouts)
    path.unlink(missing_ok=True)  # an earlier batch must never be read with the routes of this one
    if routes:
        write_atomically(routes_file(path), save_tensors(routes))
    else:
        routes_file(path).unlink(missing_ok=True)
    content = "".join(line + "\n" for line in lines).encode()
    write_atomically(path, zstandard.ZstdCompressor(level=3).compress(content))


def read_rollouts(path: Path) -> list[Rollout]:
    """Restores what `write_rollouts` wrote: ids, log-probs, rewards, routes and prompts, to the bit.

    Only columns of a prompt that JSON has no type for (a date) come back as text; they have done their work
    when the rewards are there. Raises BadInputError if the file is damaged or its routes are missing.
    """
    try:
        content = zstandard.ZstdDecompressor().decompress(path.read_bytes())
        records = [json.loads(line) for line in content.splitlines()]
        stored = load_tensors(routes_file(path).read_bytes()) if routes_file(path).exists() else {}
        return _restore(records, stored)
    except (zstandard.ZstdError, ValueError, KeyError, EOFError) as error:
        raise BadInputError(f"{path}: not a whole rollout file ({error}); remove it to sample the step again") from None


def routes_file(path: Path) -> Path:
    """Where the routes of a rollout file lie: safetensors, one [rows, K] per router, rollout after rollout."""
    return path.with_name(path.name.removesuffix(".jsonl.zst") + ".routes.safetensors")


def _to_record(rollout: Rollout, advantage: Advantage) -> dict[str, Any]:
    values = {name: getattr(rollout, name) for name in _PLAIN}
    routes = rollout.routes
    return {
        "prompt": {f.name: getattr(rollout.prompt, f.name) for f in fields(Prompt)}
        | {"columns": dict(rollout.prompt.columns)},
        **values,
        "rewards": dict(rollout.rewards),
        "advantage": advantage,
        "trainable": [int(flag) for flag in rollout.trainable],
        "policy_version": [asdict(span) for span in rollout.policy_version],
        "route_rows": None if routes is None else {name: len(rows) for name, rows in routes.items()},
    }


def _as_json(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)


def _pack_routes(rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """Joins the rollouts' routes, router by router: a few large arrays instead of thousands of small ones."""
    pieces: dict[str, list[np.ndarray]] = {}
    for rollout in rollouts:
        for name, rows in (rollout.routes or {}).items():
            pieces.setdefault(name, []).append(rows)
    for name, arrays in pieces.items():
        if len({(array.dtype, array.shape[1:]) for array in arrays}) > 1:
            raise ValueError(f"routes of {name} differ in type or width between rollouts")
    return {name: np.ascontiguousarray(np.concatenate(arrays)) for name, arrays in pieces.items()}


def _restore(records: Sequence[Mapping[str, Any]], stored: Mapping[str, np.ndarray]) -> list[Rollout]:
    prompts: dict[str, Prompt] = {}
    taken = dict.fromkeys(stored, 0)
    rollouts = []
    for record in records:
        routes = None
        if record["route_rows"] is not None:
            routes = {}
            for name, rows in record["route_rows"].items():
                routes[name] = stored[name][taken[name] : taken[name] + rows]
                taken[name] += rows
        rollouts.append(_from_record(record, prompts, routes))
    if any(taken[name] != len(array) for name, array in stored.items()):
        raise ValueError("its routes belong to other rollouts")
    return rollouts


def _from_record(
    record: Mapping[str, Any], prompts: dict[str, Prompt], routes: Mapping[str, np.ndarray] | None
) -> Rollout:
    text = json.dumps(record["prompt"])
    if text not in prompts:
        prompts[text] = Prompt(**{**record["prompt"], "ids": tuple(record["prompt"]["ids"])})
    values: dict[str, Any] = {
        name: tuple(record[name]) if isinstance(record[name], list) else record[name] for name in _PLAIN
    }
    values["trainable"] = tuple(bool(flag) for flag in record["trainable"])
    values["policy_version"] = tuple(VersionSpan(**span) for span in record["policy_version"])
    return Rollout(prompt=prompts[text], routes=routes, **values)
