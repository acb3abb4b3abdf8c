"""Rounding modes: what makes a kept significand go up by one."""

from __future__ import annotations

from collections.abc import Callable

from ._backend import Array

# (last, odd, negative) -> what is added before the dropped bits are cut off. ``last`` is the largest value
# that the dropped bits can have, 2**drop - 1; ``odd`` the lowest kept bit; ``negative`` a mask, 0 or -1.
ROUNDINGS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "nearest_even": lambda last, odd, negative: (last + odd) >> 1,
    "nearest_away": lambda last, odd, negative: (last + 1) >> 1,
    "nearest_zero": lambda last, odd, negative: last >> 1,
    "toward_zero": lambda last, odd, negative: last & 0,
    "up": lambda last, odd, negative: last & ~negative,
    "down": lambda last, odd, negative: last & negative,
    "to_odd": lambda last, odd, negative: last & (odd - 1),
}
"""Rounding modes by name. A tie in ``nearest_even`` where a significand has one bit goes to the larger
magnitude, as IEEE 754-2019 section 4.3.1 has it."""
