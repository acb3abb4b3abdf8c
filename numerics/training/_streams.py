"""Independent streams of random bits: for each name and step, also where the step is traced."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from .._backend import backend
from .._random import Stochastic, _key, threefry


@lru_cache(maxsize=4096)
def _named(rule: Stochastic, name: str) -> Stochastic:
    return rule.fold(name)


def fold(rule: Any, name: str, *steps: Any) -> Stochastic:
    """A stream for a name and whole numbers below 2**31; numbers that jax traces give the same bits.

    >>> fold(Stochastic(1), "weight", 3) == fold(Stochastic(1), "weight", 3)
    True
    """
    rule = _named(rule, name)
    for step in steps:
        rule = rule.fold(step) if isinstance(step, int) else _fold_traced(rule, step)
    return rule


def _fold_traced(rule: Stochastic, step: Any) -> Stochastic:
    xp, step = backend(step)
    step = xp.astype(step, xp.ints[32]).reshape(1)
    low, high = (xp.constant([word], xp.ints[32], step) for word in (0, 0))
    key = _key(xp, rule.seed)
    a, b = threefry(xp, (low + key[0], high + key[1]), step, high)
    return replace(rule, seed=xp.stack_last([a[0], b[0]]))
