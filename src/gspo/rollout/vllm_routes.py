"""The experts that vLLM reports (`enable_return_routed_experts`), checked and put under the names of our layers."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping

import numpy as np

from gspo.errors import BadInputError
from gspo.types import Rollout


def check_reports_experts(*, on_cpu: bool) -> None:
    """Raises BadInputError where vLLM cannot report the experts that it used."""
    if on_cpu:
        raise BadInputError(
            'routing.replay = "sampler": vLLM on a CPU does not report experts (that needs a Triton with a backend for '
            'the CPU, which its wheels lack); use rollout.engine = "transformers", or routing.replay = "old"'
        )


def layer_numbers(names: Mapping[str, int]) -> dict[str, int]:
    """Where vLLM keeps each of our MoE layers: at the one whole number in its name, dense layers counted too.

    Raises BadInputError for a name that vLLM would not find a number in.

    >>> layer_numbers({"model.layers.0.mlp": 8, "model.layers.2.mlp": 8})
    {'model.layers.0.mlp': 0, 'model.layers.2.mlp': 2}
    """
    numbers = {}
    for name in names:
        found = [int(part) for part in name.split(".") if re.fullmatch(r"[0-9]+", part)]
        if len(found) != 1:
            raise BadInputError(
                f'routing.replay = "sampler": vLLM names a layer by one number, found {found} in {name}; '
                'use routing.replay = "old"'
            )
        numbers[name] = found[0]
    return numbers


def read_routes(reported: np.ndarray | None, experts: Mapping[str, int], rollout: Rollout) -> dict[str, np.ndarray]:
    """`Rollout.routes` of a response: by layer, the experts [n, K] of its n fed tokens.

    `reported` is vLLM's [n, all layers, K]; `experts` maps the name of each MoE layer to its number of experts.

    Raises ValueError unless every fed token has distinct experts of every MoE layer. vLLM leaves what no router wrote
    at expert 0, which in a layer of two or more experts a token is seen by this.
    """
    tokens = len(rollout.prompt.ids) + len(rollout.response_ids) - 1
    if reported is None:
        raise ValueError("no experts in the answer")
    if reported.ndim != 3 or len(reported) != tokens or not np.issubdtype(reported.dtype, np.integer):
        raise ValueError(f"experts {reported.dtype} {list(reported.shape)} for {tokens} fed tokens")
    routes = {}
    for name, number in layer_numbers(experts).items():
        if number >= reported.shape[1]:
            raise ValueError(f"experts of {reported.shape[1]} layers, none of {name}")
        chosen = np.sort(reported[:, number], axis=1)
        if (chosen[:, -1] >= experts[name]).any() or (chosen[:, 1:] == chosen[:, :-1]).any():
            raise ValueError(f"experts of {name} that are not distinct or not among its {experts[name]}")
        dtype = np.uint8 if experts[name] <= 256 else np.int16
        routes[name] = np.ascontiguousarray(reported[:, number], dtype=dtype)
    return routes


def decode_routes(text: str | None) -> np.ndarray | None:
    """The experts as an answer over HTTP holds them: a NumPy file in base64. Raises ValueError for anything else."""
    if text is None:
        return None
    try:
        decoded: np.ndarray = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (EOFError, OSError) as error:
        raise ValueError(f"experts that are no NumPy array ({error})") from None
    return decoded
