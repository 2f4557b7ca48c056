"""Token ids in a form that compresses: most bytes are 0 or repeat."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32, UInt8


def pack(ids: Int32[np.ndarray, "n"]) -> UInt8[np.ndarray, "4 n"]:
    """Differences between neighbours, byte by byte: all lowest bytes first, then all second ones, and so on.

    >>> pack(np.array([3, 5, 300], np.int32)).tolist()
    [[3, 2, 39], [0, 0, 1], [0, 0, 0], [0, 0, 0]]
    """
    steps = np.diff(ids, prepend=np.int32(0)).astype("<i4")
    return np.ascontiguousarray(steps.view(np.uint8).reshape(-1, 4).T)


def unpack(planes: UInt8[np.ndarray, "4 n"]) -> Int32[np.ndarray, "n"]:
    """The inverse of `pack`, for any ids: sums wrap round as the differences do."""
    steps = np.ascontiguousarray(planes.T).reshape(-1).view("<i4")
    return np.cumsum(steps, dtype=np.int32)
