"""Rounding modes: what makes a kept significand go up by one.

Each takes (last, odd, negative) and gives what is added before the dropped bits are cut off. ``last`` is the
largest value that the dropped bits can have, 2**drop - 1; ``odd`` the lowest kept bit; ``negative`` a mask, 0 or
-1. Numbers of the format never move, as ``last`` never carries out of dropped bits that are zero.
"""

from __future__ import annotations

from collections.abc import Callable

from ._backend import Array


def nearest_even(last: Array, odd: Array, negative: Array) -> Array:
    """The nearest number; a tie goes to the even code, with one-bit significands to the larger magnitude (IEEE
    754-2019 section 4.3.1)."""
    return (last + odd) >> 1


def nearest_away(last: Array, odd: Array, negative: Array) -> Array:
    """The nearest number; a tie goes to the larger magnitude."""
    return (last + 1) >> 1


def nearest_zero(last: Array, odd: Array, negative: Array) -> Array:
    """The nearest number; a tie goes to the smaller magnitude."""
    return last >> 1


def toward_zero(last: Array, odd: Array, negative: Array) -> Array:
    """The next number of smaller magnitude."""
    return last & 0


def up(last: Array, odd: Array, negative: Array) -> Array:
    """The next larger number."""
    return last & ~negative


def down(last: Array, odd: Array, negative: Array) -> Array:
    """The next smaller number."""
    return last & negative


def to_odd(last: Array, odd: Array, negative: Array) -> Array:
    """Of the two neighbours the one with the odd code, so that a second rounding to a shorter format is right."""
    return last & (odd - 1)


ROUNDINGS: dict[str, Callable[[Array, Array, Array], Array]] = {
    f.__name__: f for f in (nearest_even, nearest_away, nearest_zero, toward_zero, up, down, to_odd)
}
"""Rounding modes by name."""
