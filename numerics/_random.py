"""Random bits that depend on a seed and on an element's place alone: the same in numpy, torch and jax."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from ._backend import Array, Backend, Numpy
from ._parts import less

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_WORD = 0xFFFFFFFF
THRESHOLDS = ("floor", "nearest")


@dataclass(frozen=True)
class Stochastic:
    """Stochastic rounding with ``bits`` random bits an element, from a counter-based generator.

    >>> import numpy as np
    >>> from ._cast import cast
    >>> cast(np.full(8, 1.03125, np.float32), "e4m3fn", rounding=Stochastic(seed=1)).tolist()
    [1.0, 1.0, 1.0, 1.125, 1.0, 1.0, 1.0, 1.0]

    Where ``f`` is the dropped fraction of a unit in the last place, the magnitude goes up with probability
    ``T / 2**bits``: ``T = floor(f * 2**bits)`` with ``threshold="floor"``, ``floor(f * 2**bits + 1/2)`` with
    "nearest". So the result is unbiased where the source has at most ``bits`` bits more than the format, and
    else too small by less than ``2**-bits`` units ("floor"), or off by at most half of that, either way
    ("nearest"). Numbers of the format, infinities and NaN do not move.

    The random word of the element at linear index ``i`` (C order) is one of the two that Threefry-2x32 with 20
    rounds makes of the counter ``((i >> 8) << 7) | (i & 127)``, word ``(i >> 7) & 1``, under the key ``seed``;
    its highest ``bits`` bits count. A piece of a larger tensor draws what the whole would: ``start`` is the
    index of its first element, an integer into a flat tensor or one index an axis with the whole's ``shape``.

    seed: an integer below 2**64, or two 32-bit words (which may be traced by `jax.jit`).
    Raises ValueError for bits outside 1 to 24 or an unknown threshold.
    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
    """

    seed: Any = 0
    bits: int = 24
    threshold: str = "floor"
    start: Any = 0
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 24:
            raise ValueError(f"stochastic rounding takes 1 to 24 random bits, got bits={self.bits}")
        if self.threshold not in THRESHOLDS:
            raise ValueError(f"threshold={self.threshold!r}: choose one of {', '.join(THRESHOLDS)}")
        if isinstance(self.seed, int) and not 0 <= self.seed < 2**64:
            raise ValueError(f"seed={self.seed}: an integer from 0 to 2**64 - 1")
        if isinstance(self.start, tuple) != (self.shape is not None):
            raise ValueError("start gives one index an axis together with shape, the whole tensor's; or an integer")
        if self.shape is not None and len(self.shape) != len(self.start):
            raise ValueError(f"start has {len(self.start)} indices for a tensor of shape {self.shape}")

    def __str__(self) -> str:
        return f"stochastic:{self.bits}"

    def fold(self, *data: int | str) -> Stochastic:
        """The same rule with an independent stream of bits for each number or name, such as a step or a tensor.

        >>> Stochastic(3).fold("layer.weight", 7).seed == Stochastic(3).fold("layer.weight", 8).seed
        False
        """
        return replace(self, seed=reduce(_fold, data, self.seed))


def _fold(seed: Any, data: int | str) -> Any:
    if isinstance(data, str):
        data = int.from_bytes(hashlib.sha256(data.encode()).digest()[:8], "little")
    low, high = (_signed(word) for word in (data & _WORD, data >> 32 & _WORD))
    if not isinstance(seed, int):
        xp = _backend_of(seed)
        words = (xp.constant([word], xp.ints[32], seed) for word in (low, high))
        a, b = threefry(xp, _key(xp, seed), *words)
        return xp.stack_last([a[0], b[0]])
    words = (np.array([word], np.int32) for word in (low, high))
    a, b = threefry(Numpy, _key(Numpy, seed), *words)
    return (int(a[0]) & _WORD) | (int(b[0]) & _WORD) << 32


def _backend_of(x: Any) -> Backend:
    from ._backend import backend

    return backend(x)[0]


def _signed(word: int) -> int:
    """The int32 with these 32 bits."""
    return (word & _WORD ^ 1 << 31) - (1 << 31)


def _key(xp: Backend, seed: Any) -> tuple[Any, Any]:
    if isinstance(seed, int):
        return _signed(seed & _WORD), _signed(seed >> 32)
    words = xp.view(seed, xp.ints[32]) if xp.width(seed) == 32 else xp.astype(seed, xp.ints[32])
    return words[0], words[1]


def _rotate(x: Array, by: int) -> Array:
    return (x << by) | ((x >> (32 - by)) & ((1 << by) - 1))


def threefry(xp: Backend, key: tuple[Any, Any], x: Array, y: Array) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds on int32 counters; every addition wraps around."""
    parity = key[0] ^ key[1] ^ _PARITY
    keys = (key[0], key[1], parity)
    x, y = x + keys[0], y + keys[1]
    for i in range(5):
        for by in _ROTATIONS[i % 2]:
            x = x + y
            y = _rotate(y, by) ^ x
        x = x + keys[(i + 1) % 3]
        y = y + keys[(i + 2) % 3]
        y = y + (i + 1)
    return x, y


class Draws(NamedTuple):
    """Random integers below ``2**bits`` for some elements, with what is made of them."""

    value: Array
    bits: int
    threshold: str

    def at(self, where: Any) -> Draws:
        """The same of some of the elements."""
        return self._replace(value=self.value[where])

    def up(self, xp: Backend, kept: Array, significand: Array, drop: Array | int, wide: int) -> Array:
        """Mask of the significands that go up, of which ``kept`` are the bits above the dropped ones."""
        extra = self.bits + (self.threshold == "nearest")
        inside = xp.clip(drop, 0, wide - 1) if not isinstance(drop, int) else min(drop, wide - 1)
        rest = significand - (kept << inside)
        shift = drop - extra
        if isinstance(shift, int):
            threshold = rest >> min(shift, wide - 1) if shift > 0 else rest << -shift
        else:
            threshold = (rest << xp.clip(-shift, 0, extra)) >> xp.clip(shift, 0, wide - 1)
        if self.threshold == "nearest":
            threshold = (threshold + 1) >> 1
        return less((1 << self.bits) - 1 - threshold, xp.astype(self.value, xp.ints[wide]), wide)


def words_at(xp: Backend, seed: Any, low: Array, high: Array) -> Array:
    """The random 32-bit words, as int32, of the elements with these indices (two int32 words each)."""
    counter = (((low >> 8) & 0xFFFFFF) << 7) | (high << 31) | (low & 127)
    a, b = threefry(xp, _key(xp, seed), counter, (high >> 1) & 0x7FFFFFFF)
    second = -((low >> 7) & 1)
    return a ^ ((a ^ b) & second)


def draw(xp: Backend, rule: Stochastic, like: Array, base: Any, stride: int) -> Draws:
    """Draws for [..., n] elements, a row of which starts at linear index ``base`` [...] (int64 numpy, or a
    traced int32 scalar) and goes on in steps of ``stride``."""
    n = like.shape[-1]
    steps = xp.iota(n, like)
    if stride != 1:
        steps = steps * stride
    if isinstance(base, (int, np.ndarray, np.generic)):
        base = np.asarray(base, np.int64)[..., None]
        low, high = (np.asarray(v & _WORD, np.uint32).view(np.int32) for v in (base, base >> 32))
        first, high = (xp.constant(v, xp.ints[32], like) for v in (low, high))
    else:
        first, high = xp.astype(base, xp.ints[32])[..., None], xp.constant([0], xp.ints[32], like)
    low = first + steps
    flip = _signed(1 << 31)
    carry = xp.astype((low ^ flip) < (first ^ flip), xp.ints[32])
    word = words_at(xp, rule.seed, low, high + carry)
    shift = 32 - rule.bits
    return Draws((word >> shift) & ((1 << rule.bits) - 1), rule.bits, rule.threshold)


def places(rule: Stochastic, shape: tuple[int, ...], axis: int | None) -> tuple[Any, int]:
    """Linear indices at which the rows along ``axis`` of an array of that shape start, in the order of the
    rows, and the step along them; with axis None the array is one row."""
    whole = shape if rule.shape is None else rule.shape
    if len(whole) != len(shape):
        raise ValueError(f"Stochastic has a window into {len(whole)} axes, but the array has shape {shape}")
    if axis is None:
        if rule.shape is not None:
            raise ValueError("an array taken as one row has no window: give Stochastic's start as an integer")
        return np.zeros(1, np.int64) + rule.start, 1
    strides = [math.prod(whole[i + 1 :]) for i in range(len(whole))]
    lead = [k for k in range(len(shape)) if k != axis % len(shape)]
    base: Any = np.zeros([shape[k] for k in lead], np.int64)
    for i, k in enumerate(lead):
        steps = np.arange(shape[k], dtype=np.int64) * strides[k]
        base = base + steps.reshape([-1 if j == i else 1 for j in range(len(lead))])
    starts = [rule.start] if rule.shape is None else [at * s for at, s in zip(rule.start, strides)]
    for start in starts:
        base = base + start
    return base.reshape(-1), strides[axis]
