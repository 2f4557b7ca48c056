"""The journal gives back what was written, to the bit."""

import dataclasses
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.errors import BadInputError
from gspo.reporting.journal import read_rollouts, routes_file, supports_file, write_rollouts
from gspo.types import KeptSupport, Rollout
from tests.reporting.rollouts import build_rollouts, make_rollout, rollout_fields


def assert_same(left: Sequence[Rollout], right: Sequence[Rollout]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert replace(a, routes=None, support=None) == replace(b, routes=None, support=None)
        assert (a.support is None) == (b.support is None)
        if a.support is not None and b.support is not None:
            assert np.array_equal(a.support.ids, b.support.ids)
            assert np.array_equal(a.support.offsets, b.support.offsets)
        assert (a.routes is None) == (b.routes is None)
        for name, rows in (a.routes or {}).items():
            assert b.routes is not None
            assert rows.dtype == b.routes[name].dtype
            assert np.array_equal(rows, b.routes[name])


@settings(max_examples=60)
@given(rollout_fields())
def test_a_batch_reads_back_to_the_bit(fields: list[tuple[dict[str, Any], list[dict[str, Any]]]]) -> None:
    assert {"prompt", *fields[0][1][0]} == {f.name for f in dataclasses.fields(Rollout)}, "a field is not tried"
    batch = build_rollouts(fields)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step-000001.jsonl.zst"
        write_rollouts(path, batch)
        restored = read_rollouts(path)
    assert_same(batch, restored)


@given(st.floats(width=32, allow_nan=False))
def test_float32_log_probs_keep_their_bits(value: float) -> None:
    text = json.dumps(value)
    assert np.float32(json.loads(text)).tobytes() == np.float32(value).tobytes()


def test_prompts_are_shared_again_after_reading(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "a.jsonl.zst", [make_rollout(0, 0), make_rollout(0, 1), make_rollout(1, 0)])
    first, second, third = read_rollouts(tmp_path / "a.jsonl.zst")
    assert first.prompt is second.prompt
    assert first.prompt is not third.prompt


def test_each_line_carries_what_a_reader_wants(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    write_rollouts(path, [make_rollout(0, 0), make_rollout(0, 1, reward=None)], [0.5, None])
    lines = zstandard.ZstdDecompressor().decompress(path.read_bytes()).decode().splitlines()
    first, second = map(json.loads, lines)
    assert first["advantage"] == 0.5
    assert first["prompt"]["content"] == "2+2="
    assert first["text"] == "4"
    assert second["advantage"] is None
    assert second["dropped"] == "the reward function raised"


def test_advantages_per_token_and_one_per_rollout_wanted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    write_rollouts(path, [make_rollout()], [[0.1, 0.2, 0.3]])
    line = zstandard.ZstdDecompressor().decompress(path.read_bytes())
    assert json.loads(line)["advantage"] == [0.1, 0.2, 0.3]
    with pytest.raises(ValueError, match="longer"):
        write_rollouts(path, [make_rollout()], [0.1, 0.2])


def test_numbers_of_numpy_stay_numbers_and_dates_become_text(tmp_path: Path) -> None:
    rollout = make_rollout()
    prompt = replace(
        rollout.prompt, columns=MappingProxyType({"n": np.int64(3), "v": np.array([1, 2]), "p": Path("x")})
    )
    write_rollouts(tmp_path / "a.jsonl.zst", [replace(rollout, prompt=prompt)])
    (restored,) = read_rollouts(tmp_path / "a.jsonl.zst")
    assert restored.prompt.columns == {"n": 3, "v": [1, 2], "p": "x"}


def with_routes(rollout: Rollout, value: int, dtype: type = np.int16) -> Rollout:
    return replace(rollout, routes={"gate": np.full((2, 2), value, dtype=dtype)})


def test_a_batch_without_routes_leaves_none_of_an_earlier_one_behind(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    write_rollouts(path, [with_routes(make_rollout(), 1)])
    assert routes_file(path).exists()
    write_rollouts(path, [make_rollout()])
    assert not routes_file(path).exists()
    assert read_rollouts(path)[0].routes is None


def test_routes_of_other_rollouts_or_none_are_an_error(tmp_path: Path) -> None:
    one, two = tmp_path / "a.jsonl.zst", tmp_path / "b.jsonl.zst"
    write_rollouts(one, [with_routes(make_rollout(), 1)])
    write_rollouts(two, [with_routes(make_rollout(), 1), with_routes(make_rollout(), 2)])
    routes_file(one).write_bytes(routes_file(two).read_bytes())
    with pytest.raises(BadInputError, match="other rollouts"):
        read_rollouts(one)
    routes_file(one).unlink()
    with pytest.raises(
        BadInputError, match=r"a\.jsonl\.zst: not a whole rollout file \(its routes of gate are missing"
    ):
        read_rollouts(one)


def with_support(rollout: Rollout, *sizes: int) -> Rollout:
    return replace(rollout, support=KeptSupport.of([np.arange(size, dtype=np.int32) for size in sizes]))


def test_supports_of_other_rollouts_or_none_are_an_error(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl.zst", tmp_path / "two.jsonl.zst"
    write_rollouts(one, [with_support(make_rollout(), 1, 2, 3)])
    write_rollouts(two, [with_support(make_rollout(), 1, 2, 3), with_support(make_rollout(length=2), 1, 2)])
    supports_file(one).write_bytes(supports_file(two).read_bytes())
    with pytest.raises(BadInputError, match=r"one\.jsonl\.zst: not a whole rollout file .*other rollouts"):
        read_rollouts(one)
    supports_file(one).unlink()
    with pytest.raises(BadInputError, match=r"one\.jsonl\.zst: not a whole rollout file .*supports are missing"):
        read_rollouts(one)
    write_rollouts(two, [make_rollout()])
    assert not supports_file(two).exists()


@pytest.mark.parametrize("place", [*range(5, 90, 7), -1])
@pytest.mark.parametrize("file", [supports_file, routes_file])
def test_one_bit_that_turned_over_beside_the_rollouts_is_found(
    tmp_path: Path, file: Callable[[Path], Path], place: int
) -> None:
    path = tmp_path / "a.jsonl.zst"
    routes = np.random.default_rng(0).integers(0, 128, (40, 2), dtype=np.int16)
    write_rollouts(path, [replace(with_support(make_rollout(), 40, 50, 60), routes={"gate": routes})])
    content = bytearray(file(path).read_bytes())
    content[place] ^= 4
    file(path).write_bytes(content)
    with pytest.raises(BadInputError) as error:
        read_rollouts(path)
    assert str(error.value).startswith(f"{file(path)}: not a whole rollout file (")
    assert str(error.value).endswith(f"; remove {path} to sample the step again")


@pytest.mark.parametrize("file", [supports_file, routes_file])
def test_supports_and_routes_that_are_no_tensors_are_an_error(tmp_path: Path, file: Callable[[Path], Path]) -> None:
    path = tmp_path / "a.jsonl.zst"
    for content in (zstandard.compress(b"no tensors" * 9), b"no tensors" * 9):
        write_rollouts(path, [with_support(with_routes(make_rollout(), 3), 1, 2, 3)])
        file(path).write_bytes(content)
        with pytest.raises(BadInputError, match=r"a\..*\.safetensors\.zst: not a whole rollout file"):
            read_rollouts(path)


def test_a_large_support_takes_little_more_than_a_byte_an_id(tmp_path: Path) -> None:
    ids = np.sort(np.random.default_rng(0).choice(49152, 10_000, replace=False)).astype(np.int32)
    rollout = replace(make_rollout(), support=KeptSupport.of([ids, ids[::2], ids[::3]]))
    write_rollouts(tmp_path / "a.jsonl.zst", [rollout])
    assert supports_file(tmp_path / "a.jsonl.zst").stat().st_size < 1.1 * 18_334


def test_routes_of_different_types_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    with pytest.raises(ValueError, match="differ in type"):
        write_rollouts(path, [with_routes(make_rollout(), 1), with_routes(make_rollout(), 1, np.int32)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"not zstd" + b, lambda _: b""])
def test_a_damaged_file_is_named(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "a.jsonl.zst"
    write_rollouts(path, [make_rollout(0, i, length=50) for i in range(20)])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BadInputError, match=r"a\.jsonl\.zst: not a whole rollout file"):
        read_rollouts(path)


def test_a_kill_between_two_files_of_a_batch_leaves_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl.zst"
    write_rollouts(path, [replace(make_rollout(), routes={"layer": np.zeros((2, 2), np.uint8)})])

    def killed(file: Path, _content: bytes) -> None:
        assert file == routes_file(path)
        raise KeyboardInterrupt

    monkeypatch.setattr("gspo.reporting.journal.write_atomically", killed)
    with pytest.raises(KeyboardInterrupt):
        write_rollouts(path, [replace(make_rollout(), routes={"layer": np.ones((2, 2), np.uint8)})])
    assert not path.exists()
