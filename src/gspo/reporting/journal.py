"""Rollout batches on disk: a record to read, and the journal that a resumed run restores them from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from gspo.errors import BadInputError
from gspo.reporting.files import write_atomically
from gspo.reporting.packed_ids import pack, unpack
from gspo.types import KeptSupport, Prompt, Rollout, VersionSpan

# Every field of a rollout that JSON holds as it is, so that one that is added later is not lost.
_PLAIN = tuple(f.name for f in fields(Rollout) if f.name not in ("prompt", "routes", "support"))

Advantage = float | int | Sequence[float] | None


def write_rollouts(path: Path, rollouts: Sequence[Rollout], advantages: Sequence[Advantage] | None = None) -> None:
    """Writes a rollout batch whole, one JSON line per rollout, compressed; routes and supports go to files beside it.

    `advantages` has an entry per rollout: a number, one per response token, or None (dropped). Floats are
    written so that they read back to the same bits. Routes and supports are in place before the rollouts are:
    where the file exists, the batch is complete.
    """
    given: Sequence[Advantage] = advantages if advantages is not None else [None] * len(rollouts)
    lines = [
        json.dumps(_to_record(rollout, advantage), default=_as_json)
        for rollout, advantage in zip(rollouts, given, strict=True)
    ]
    routes, supports = _pack_routes(rollouts), _pack_supports(rollouts)
    path.unlink(missing_ok=True)  # an earlier batch must never be read with the routes or supports of this one
    _write_or_remove(routes_file(path), routes)
    _write_or_remove(supports_file(path), supports)
    content = "".join(line + "\n" for line in lines).encode()
    write_atomically(path, _compressed(content))


def read_rollouts(path: Path) -> list[Rollout]:
    """Restores what `write_rollouts` wrote: ids, log-probs, rewards, routes, supports and prompts, to the bit.

    Only columns of a prompt that JSON has no type for (a date) come back as text; they have done their work
    when the rewards are there. Raises BadInputError, with the file's name, if one of the three is damaged or missing.
    """
    with _damage_named(path, path):
        records = [json.loads(line) for line in _decompressed(path).splitlines()]
    routes, supports = _tensors_of(routes_file(path), path), _tensors_of(supports_file(path), path)
    with _damage_named(path, path):
        return _restore(records, routes, _unpack_supports(records, supports))


def _tensors_of(file: Path, rollouts: Path) -> dict[str, np.ndarray]:
    with _damage_named(file, rollouts):
        return load_tensors(_decompressed(file)) if file.exists() else {}


@contextmanager
def _damage_named(file: Path, rollouts: Path) -> Iterator[None]:
    """An error about `file`, which belongs to the file of rollouts, is the user's to read."""
    try:
        yield
    except (zstandard.ZstdError, SafetensorError, ValueError, KeyError, EOFError) as error:
        which = "it" if file == rollouts else rollouts
        raise BadInputError(
            f"{file}: not a whole rollout file ({error}); remove {which} to sample the step again"
        ) from None


def routes_file(path: Path) -> Path:
    """Where the routes of a rollout file lie: compressed safetensors, a [rows, K] per router, rollout after rollout."""
    return path.with_name(path.name.removesuffix(".jsonl.zst") + ".routes.safetensors.zst")


def supports_file(path: Path) -> Path:
    """Where the supports of a rollout file lie: compressed safetensors, rollout after rollout.

    `counts` has one entry per response token; `planes` are the kept ids (see `packed_ids`).
    """
    return path.with_name(path.name.removesuffix(".jsonl.zst") + ".supports.safetensors.zst")


def _write_or_remove(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    if tensors:
        write_atomically(path, _compressed(save_tensors(dict(tensors))))
    else:
        path.unlink(missing_ok=True)


def _compressed(content: bytes) -> bytes:
    # Without the checksum, a byte that turns over on disk reads back as other ids, log-probs or experts.
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(content)


def _decompressed(path: Path) -> bytes:
    return zstandard.ZstdDecompressor().decompress(path.read_bytes())


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
        "supported_tokens": None if rollout.support is None else len(rollout.support.counts),
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


def _pack_supports(rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    given = [rollout.support for rollout in rollouts if rollout.support is not None]
    joined = KeptSupport.join(given)
    if joined is None:
        return {}
    return {"counts": joined.counts.astype(np.int32), "planes": pack(joined.ids)}


def _unpack_supports(
    records: Sequence[Mapping[str, Any]], stored: Mapping[str, np.ndarray]
) -> list[KeptSupport | None]:
    """The support of each record. Raises ValueError or KeyError where they are another batch's."""
    tokens = [record.get("supported_tokens") for record in records]
    known = [count for count in tokens if count is not None]
    if not known and not stored:
        return [None] * len(records)
    if known and not stored:
        raise ValueError("its supports are missing")
    counts = stored["counts"].astype(np.int64)
    ids = unpack(stored["planes"])
    if sum(known) != len(counts) or counts.sum() != len(ids):
        raise ValueError("its supports belong to other rollouts")
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    supports: list[KeptSupport | None] = []
    start = 0
    for count in tokens:
        if count is None:
            supports.append(None)
            continue
        bounds = ends[start : start + count + 1]
        supports.append(KeptSupport(ids[bounds[0] : bounds[-1]], bounds - bounds[0]))
        start += count
    return supports


def _restore(
    records: Sequence[Mapping[str, Any]],
    stored: Mapping[str, np.ndarray],
    supports: Sequence[KeptSupport | None],
) -> list[Rollout]:
    prompts: dict[str, Prompt] = {}
    taken = dict.fromkeys(stored, 0)
    rollouts = []
    for record, support in zip(records, supports, strict=True):
        routes = None
        if record["route_rows"] is not None:
            routes = {}
            for name, rows in record["route_rows"].items():
                if name not in stored:
                    raise ValueError(f"its routes of {name} are missing")
                routes[name] = stored[name][taken[name] : taken[name] + rows]
                taken[name] += rows
        rollouts.append(_from_record(record, prompts, routes, support))
    if any(taken[name] != len(array) for name, array in stored.items()):
        raise ValueError("its routes belong to other rollouts")
    return rollouts


def _from_record(
    record: Mapping[str, Any],
    prompts: dict[str, Prompt],
    routes: Mapping[str, np.ndarray] | None,
    support: KeptSupport | None,
) -> Rollout:
    text = json.dumps(record["prompt"])
    if text not in prompts:
        prompts[text] = Prompt(**{**record["prompt"], "ids": tuple(record["prompt"]["ids"])})
    values: dict[str, Any] = {
        name: tuple(record[name]) if isinstance(record[name], list) else record[name]
        for name in _PLAIN
        if name != "updates_behind" or name in record  # runs that were begun without it go on
    }
    values["trainable"] = tuple(bool(flag) for flag in record["trainable"])
    values["policy_version"] = tuple(VersionSpan(**span) for span in record["policy_version"])
    return Rollout(prompt=prompts[text], routes=routes, support=support, **values)
