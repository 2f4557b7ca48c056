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


def dr_grpo(lp, old, adv, mask, low, high, *, sequences=None, length=1.0):
    """Sum over tokens / length, mean over responses."""
    sequences = sequences or max(int(mask.any(1).sum()), 1)
    return ppo_tokens(lp, old, adv, mask, low, high, np.full(len(mask), 1 / length / sequences))


def dapo(lp, old, adv, mask, low, high, *, tokens=None):
    """Mean over all tokens."""
    return ppo_tokens(lp, old, adv, mask, low, high, np.full(len(mask), 1 / (tokens or max(int(mask.sum()), 1))))


def cispo(lp, old, adv, mask, low, high):
    """Clipped weight times log pi, mean over all tokens."""
    loss, grad = 0.0, np.zeros(lp.shape)
    for i, t in np.argwhere(mask):
        w = min(max(math.exp(lp[i, t] - old[i, t]), 1 - low), 1 + high)
        grad[i, t] = -w * adv[i, t] / mask.sum()
        loss += grad[i, t] * lp[i, t]
    return loss, grad


def gmpo(lp, old, adv, mask, low, high):
    """(prod of pessimistically clipped ratios)^(1/|y|) times A, given one advantage a row."""
    loss, grad = 0.0, np.zeros(lp.shape)
    sequences = max(int(mask.any(1).sum()), 1)
    for i in range(len(lp)):
        tokens = np.flatnonzero(mask[i])
        if not len(tokens):
            continue
        product, live = 1.0, []
        for t in tokens:
            w = math.exp(lp[i, t] - old[i, t])
            kept = min(w, 1 + high) if adv[i] > 0 else max(w, 1 - low)
            product *= kept
            live.append(kept == w)
        value = product ** (1 / len(tokens)) * adv[i] / sequences
        loss -= value
        for t, alive in zip(tokens, live, strict=True):
            grad[i, t] = -value / len(tokens) if alive else 0.0
    return loss, grad


def sapo(lp, old, adv, mask, positive, negative):
    """Gate 4/tau sigmoid(tau (w - 1)), mean over tokens, then responses."""
    loss, grad = 0.0, np.zeros(lp.shape)
    sequences = max(int(mask.any(1).sum()), 1)
    for i, t in np.argwhere(mask):
        w, a = math.exp(lp[i, t] - old[i, t]), adv[i, t]
        tau = positive if a > 0 else negative
        p = 1 / (1 + math.exp(-tau * (w - 1)))
        weight = 1 / mask[i].sum() / sequences
        loss -= 4 / tau * p * a * weight
        grad[i, t] = -4 * p * (1 - p) * w * a * weight
    return loss, grad
