"""The rule "mse": of several scales for a block the one under which it loses least, decided in integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

from ._backend import Array, Backend, concatenate
from ._block import Shared, codes_for, decode_block, encode_elements, share, targets
from ._codec import SATURATE, narrow_codes, wide_codes
from ._format import Block
from ._parts import Parts, less, select, split, split_bits

BITS = 15  # of a block's largest magnitude that count, and of a limb of the sums
_MOST = (1 << BITS) - 1

Limbs = tuple[Array, ...]  # an integer below 2**60 as three of BITS, the last of them longer


def searched(
    xp: Backend,
    bounds: tuple[Array, ...],
    fmt: Block,
    tensor: Array | None,
    pieces: Sequence[Callable[[], Array]],
    parts: list[slice],
    one_block: bool,
) -> Array:
    """Scale codes, [rows, blocks], of blocks with these extents. ``pieces`` make the blocks, a cacheful at a
    time, ``parts`` says which rows a piece has; with ``one_block`` all are pieces of the same block."""
    best: Array = None
    least: Limbs = ()
    for target in reversed(targets(fmt)):  # from the smallest scale up
        code = codes_for(xp, bounds, fmt, tensor, target)
        shared = share(xp, bounds, fmt, tensor, code)
        losses = [loss(xp, make(), shared.at(part), bounds[0][part], fmt, tensor) for make, part in zip(pieces, parts)]
        if one_block:
            total = reduce(lambda a, b: _carried(*(x + y for x, y in zip(a, b))), losses)
        else:
            total = tuple(concatenate(xp, list(limbs)) for limbs in zip(*losses))
        code = wide_codes(xp, code)
        if best is None:
            best, least = code, total
            continue
        better = _fewer(total, least, xp.width(total[0]))
        best = select(xp.astype(better, xp.ints[32]), code, best)
        least = tuple(select(better, a, b) for a, b in zip(total, least))
    return narrow_codes(xp, best, fmt.scale)


def loss(xp: Backend, blocks: Array, shared: Shared, amax: Array, fmt: Block, tensor: Array | None) -> Limbs:
    """The sum of squares of what blocks lose, [rows, blocks]; see `Block`. ``amax``: as `magnitude_bits`."""
    wide = xp.width(blocks)
    codes = encode_elements(xp, blocks, shared, fmt, SATURATE, "nearest_even", tensor)
    values = decode_block(xp, codes, shared.code, None, fmt, tensor, wide)
    exponent = split_bits(xp, amax, wide).exponent[..., None]
    difference = abs(_cut(xp, split(xp, blocks), exponent) - _cut(xp, split(xp, values), exponent))
    square = xp.clip(difference, 0, _MOST)
    square *= square
    return _sum(xp, (square & _MOST, square >> BITS, square & 0))


def _cut(xp: Backend, a: Parts, exponent: Array) -> Array:
    """a in units of ``2**(exponent - BITS + 1)``, toward zero; what is far beyond as something far beyond."""
    drop = xp.clip(exponent - a.exponent + (a.top - BITS + 1), 0, a.top + 1)
    far = less(exponent + 4, a.exponent, a.wide)
    integer = select(far, 1 << (BITS + 4), a.significand >> drop)
    return (integer ^ a.negative) - a.negative


def _sum(xp: Backend, limbs: Limbs) -> Limbs:
    """Along the last axis, so many at a time that no limb overflows."""
    while True:
        n = limbs[0].shape[-1]
        size = min(n, 1 << BITS)
        short, ints = -n % size, xp.ints[xp.width(limbs[0])]
        groups = [xp.pad_last(v, short) if short else v for v in limbs]
        groups = [v.reshape(*v.shape[:-1], (n + short) // size, size) for v in groups]
        limbs = _carried(*(xp.astype(v.sum(-1), ints) for v in groups))
        if limbs[0].shape[-1] == 1:
            return limbs[0][..., 0], limbs[1][..., 0], limbs[2][..., 0]


def _carried(low: Array, middle: Array, high: Array) -> Limbs:
    middle = middle + (low >> BITS)
    return low & _MOST, middle & _MOST, high + (middle >> BITS)


def _fewer(a: Limbs, b: Limbs, wide: int) -> Array:
    """Mask of a < b."""
    low, middle, high = (x - y for x, y in zip(a, b))
    # each limb's difference stands above all that the lower ones can add up to
    return less(4 * _sign(high, wide) + 2 * _sign(middle, wide) + _sign(low, wide), 0, wide)


def _sign(x: Array, wide: int) -> Array:
    """-1, 0 or 1."""
    return less(x, 0, wide) - less(0, x, wide)
