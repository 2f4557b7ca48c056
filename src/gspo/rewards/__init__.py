"""Verifiers, and the guarded way in which strangers' functions are called.

`runner` scores rollouts. Everything that runs inside a worker process (`worker`, `calls`, the built-in functions)
imports neither torch nor transformers, so that a worker starts in a fraction of a second.
"""
