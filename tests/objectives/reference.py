"""The objectives once more, in float64 NumPy with loops and gradients derived by hand.

Nothing here is shared with the library: ratios are products of probabilities' ratios, the clip is written with
`min`, and each gradient is the paper's closed form (eq. 10, 12, 17) and not an automatic derivative.
"""

from __future__ import annotations

import math

import numpy as np

LIMIT = 20.0


def gspo(lp, old, adv, mask, low, high, *, sequences=None):
    """Loss and gradient [B, T] of eq. 5, given one advantage a row."""
    B, T = lp.shape
    sequences = sequences or max(sum(1 for i in range(B) if mask[i].any()), 1)
    loss, grad = 0.0, np.zeros((B, T))
    for i in range(B):
        tokens = [t for t in range(T) if mask[i, t]]
        if not tokens:
            continue
        mean = sum(lp[i, t] - old[i, t] for t in tokens) / len(tokens)
        s = math.exp(min(max(mean, -LIMIT), LIMIT))
        clipped = min(max(s, 1 - low), 1 + high)
        loss -= min(s * adv[i], clipped * adv[i]) / sequences
        if s * adv[i] <= clipped * adv[i]:
            for t in tokens:
                grad[i, t] = -s * adv[i] / len(tokens) / sequences
    return loss, grad


def gspo_token(lp, old, adv, mask, low, high, *, spans=None, sequences=None):
    """Loss and gradient of eq. 13, given one advantage a token; the ratio is that of the token's span."""
    B, T = lp.shape
    sequences = sequences or max(sum(1 for i in range(B) if mask[i].any()), 1)
    loss, grad = 0.0, np.zeros((B, T))
    for i in range(B):
        tokens = [t for t in range(T) if mask[i, t]]
        for t in tokens:
            mates = [u for u in tokens if spans is None or spans[i, u] == spans[i, t]]
            mean = sum(lp[i, u] - old[i, u] for u in mates) / len(mates)
            s = math.exp(min(max(mean, -LIMIT), LIMIT))
            clipped = min(max(s, 1 - low), 1 + high)
            weight = 1 / len(tokens) / sequences
            loss -= min(s * adv[i, t], clipped * adv[i, t]) * weight
            if s * adv[i, t] <= clipped * adv[i, t]:
                grad[i, t] = -s * adv[i, t] * weight
    return loss, grad


def ppo_tokens(lp, old, adv, mask, low, high, weight, *, dual=None):
    """Loss and gradient of a sum over tokens of weight * min(w A, clip(w) A), with a dual clip if given."""
    B, T = lp.shape
    loss, grad = 0.0, np.zeros((B, T))
    for i in range(B):
        for t in range(T):
            if not mask[i, t]:
                continue
            w = math.exp(min(max(lp[i, t] - old[i, t], -LIMIT), LIMIT))
            a = adv[i, t]
            value = min(w * a, min(max(w, 1 - low), 1 + high) * a)
            live = value == w * a
            if dual is not None and a < 0 and dual * a > value:
                value, live = dual * a, False
            loss -= value * weight[i]
            if live:
                grad[i, t] = -w * a * weight[i]
    return loss, grad


def grpo(lp, old, adv, mask, low, high, *, sequences=None, dual=None):
    """Mean over a response's tokens, then over responses."""
    lengths = mask.sum(1)
    sequences = sequences or max(int((lengths > 0).sum()), 1)
    weight = 1 / np.maximum(lengths, 1) / sequences
    return ppo_tokens(lp, old, adv, mask, low, high, weight, dual=dual)
