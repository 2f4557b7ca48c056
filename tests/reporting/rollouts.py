"""Rollouts to write down, with everything that is awkward to write down."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from gspo.types import KeptSupport, Prompt, Rollout, VersionSpan


def make_rollout(slot: int = 0, sample: int = 0, *, length: int = 3, reward: float | None = 1.0) -> Rollout:
    return Rollout(
        prompt=Prompt(f"key{slot}", "2+2=", (17, 28), {"answer": "4"}),
        slot=slot,
        sample=sample,
        response_ids=tuple(range(length)),
        sampler_logprobs=tuple(float(np.float32(-0.1 * (i + 1))) for i in range(length)),
        trainable=(True,) * length,
        finish_reason="stop",
        policy_version=(VersionSpan(0, 3),),
        text="4",
        reward=reward,
        rewards={"exact": reward},
        dropped=None if reward is not None else "the reward function raised",
    )


_TEXT = st.text(st.characters(codec=None), max_size=8)  # lone surrogates too: decoders make them
_JSON = st.recursive(st.none() | st.booleans() | st.integers() | _TEXT, lambda x: st.lists(x, max_size=2), max_leaves=3)
_MESSAGE = st.fixed_dictionaries({"role": st.just("user"), "content": _TEXT})


def _sequence(element: st.SearchStrategy[Any], length: int) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(element, min_size=length, max_size=length).map(tuple)


@st.composite
def _routes(draw: st.DrawFn, routers: tuple[str, ...], rows: int) -> dict[str, np.ndarray] | None:
    if not routers:
        return None
    experts = _sequence(st.integers(0, 127), 2 * rows)
    return {name: np.array(draw(experts), dtype=np.int16).reshape(-1, 2) for name in routers}


@st.composite
def _rollout(draw: st.DrawFn, slot: int, sample: int, routers: tuple[str, ...]) -> dict[str, Any]:
    length = draw(st.integers(0, 5))
    dropped = draw(st.none() | _TEXT)
    versions = draw(st.lists(st.integers(0, 99), max_size=2))
    return {
        "slot": slot,
        "sample": sample,
        "response_ids": draw(_sequence(st.integers(0, 2**17), length)),
        "sampler_logprobs": draw(_sequence(st.floats(max_value=0, width=32), length)),
        "trainable": draw(_sequence(st.booleans(), length)),
        "finish_reason": draw(st.sampled_from(["stop", "length", "error"])),
        "policy_version": tuple(VersionSpan(start, version) for start, version in enumerate(versions)),
        "text": draw(_TEXT),
        "reward": None if dropped is not None else draw(st.floats(allow_nan=False)),
        "rewards": draw(st.dictionaries(_TEXT, st.none() | st.floats(allow_nan=False), max_size=2)),
        "dropped": dropped,
        "routes": draw(_routes(routers, max(length - 1, 0))),
        "support": draw(st.none() | _sequence(st.lists(st.integers(0, 2**31 - 1), max_size=4), length)),
        "messages": draw(st.lists(_MESSAGE, max_size=2).map(tuple)),
        "turns": draw(st.none() | _sequence(st.integers(-1, 3), length)),
        "turn_rewards": draw(st.none() | st.lists(st.floats(allow_nan=False), max_size=3).map(tuple)),
        "token_rewards": draw(st.none() | _sequence(st.floats(allow_nan=False), length)),
        "updates_behind": draw(st.integers(0, 99)),
    }


@st.composite
def rollout_fields(draw: st.DrawFn) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Fields of one to three prompts and of their rollouts, with routes or without; `build_rollouts` joins them.

    (Type checks at construction draw random numbers, which a strategy must not.)
    """
    routers = draw(st.sampled_from([(), ("layers.0.mlp.gate", "layers.2.mlp.gate")]))
    found = []
    for slot in range(draw(st.integers(1, 3))):
        prompt = {
            "key": draw(_TEXT),
            "content": draw(_TEXT | st.lists(_MESSAGE, min_size=1, max_size=2)),
            "ids": draw(st.lists(st.integers(0, 2**17), max_size=4).map(tuple)),
            "columns": draw(st.dictionaries(_TEXT, _JSON, max_size=2)),
        }
        found.append((prompt, [draw(_rollout(slot, sample, routers)) for sample in range(draw(st.integers(1, 3)))]))
    return found


def build_rollouts(fields: list[tuple[dict[str, Any], list[dict[str, Any]]]]) -> list[Rollout]:
    """The rollouts that `rollout_fields` describes."""
    found = []
    for given, rows in fields:
        prompt = Prompt(**given)
        for row in rows:
            parts = row["support"]
            support = None if parts is None else KeptSupport.of([np.array(part, np.int32) for part in parts])
            found.append(Rollout(prompt=prompt, **{**row, "support": support}))
    return found
