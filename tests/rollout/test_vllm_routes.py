"""The experts that vLLM reports: under our names where they fit, an error where they do not."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.errors import BadInputError
from gspo.rollout.vllm_routes import decode_routes, layer_numbers, read_routes
from gspo.types import Prompt, Rollout, VersionSpan

LAYERS = ("model.layers.1.mlp", "model.layers.3.mlp")


def make_rollout(prompt: int, response: int) -> Rollout:
    return Rollout(
        prompt=Prompt("p", "", (5,) * prompt),
        slot=0,
        sample=0,
        response_ids=(7,) * response,
        sampler_logprobs=(-1.0,) * response,
        trainable=(True,) * response,
        finish_reason="length",
        policy_version=(VersionSpan(0, 0),),
        text="",
    )


def report(tokens: int, experts: int, seed: int = 0) -> np.ndarray:
    """[tokens, 4, 3] as vLLM makes it: layers 0 and 2 are dense, and zero."""
    noise = np.random.default_rng(seed)
    rows = np.zeros((tokens, 4, 3), np.uint8 if experts <= 256 else np.uint16)
    for token in range(tokens):
        for layer in (1, 3):
            rows[token, layer] = noise.permutation(experts)[:3]
    return rows


@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from([3, 8, 256, 257, 1000]), st.integers(0, 99))
def test_each_layer_gets_its_own_for_every_fed_token(prompt: int, response: int, experts: int, seed: int) -> None:
    reported = report(prompt + response - 1, experts, seed)
    routes = read_routes(reported, dict.fromkeys(LAYERS, experts), make_rollout(prompt, response))
    assert list(routes) == list(LAYERS)
    for number, rows in zip((1, 3), routes.values(), strict=True):
        assert rows.dtype == (np.uint8 if experts <= 256 else np.int16)
        assert rows.tolist() == reported[:, number].tolist()
        assert rows.flags.c_contiguous


@pytest.mark.parametrize("tokens", [3, 5])
def test_a_row_too_few_or_too_many_is_an_error(tokens: int) -> None:
    with pytest.raises(ValueError, match="for 4 fed tokens"):
        read_routes(report(tokens, 8), dict.fromkeys(LAYERS, 8), make_rollout(3, 2))


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ({"model.layers.2.mlp": 8}, "layers.2.mlp that are not distinct"),
        ({"model.layers.1.mlp": 3}, "not among its 3"),
        ({"model.layers.4.mlp": 8}, "experts of 4 layers, none of model.layers.4.mlp"),
    ],
)
def test_experts_of_another_layer_or_model_are_an_error(experts: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_routes(report(4, 8), experts, make_rollout(3, 2))


@pytest.mark.parametrize("reported", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3), np.float32), None])
def test_what_is_no_report_is_an_error(reported: np.ndarray | None) -> None:
    with pytest.raises(ValueError, match="experts"):
        read_routes(reported, dict.fromkeys(LAYERS, 8), make_rollout(3, 2))


@pytest.mark.parametrize("name", ["model.mlp", "model.layers.0.experts.1"])
def test_a_layer_without_one_number_is_refused(name: str) -> None:
    with pytest.raises(BadInputError, match="vLLM names a layer by one number"):
        layer_numbers({name: 8})


def test_over_http_they_come_as_a_numpy_file() -> None:
    file = io.BytesIO()
    np.save(file, report(4, 300))
    decoded = decode_routes(base64.b64encode(file.getvalue()).decode())
    assert decoded is not None
    assert decoded.dtype == np.uint16
    assert np.array_equal(decoded, report(4, 300))
    assert decode_routes(None) is None
    pickled = io.BytesIO()
    np.save(pickled, np.array([{}], dtype=object), allow_pickle=True)
    for content in (b"", file.getvalue()[:90], b"no array", pickled.getvalue()):
        with pytest.raises(ValueError, match=r".+"):
            decode_routes(base64.b64encode(content).decode())
    with pytest.raises(ValueError, match=r".+"):
        decode_routes("%")
