"""Rounding modes: which kept significands go up by one."""

from __future__ import annotations

from collections.abc import Callable

from ._backend import Array

# (kept: integer significand, rest: what is dropped, unit: one step of kept, negative) -> step away from zero?
# rest and unit are in the same integer units; twice a rest never overflows (see `_codec.significand`).
ROUNDINGS: dict[str, Callable[[Array, Array, Array, Array], Array]] = {
    "nearest_even": lambda kept, rest, unit, negative: (
        (2 * rest > unit) | ((2 * rest == unit) & ((kept & 1) == 1))
    ),
    "nearest_away": lambda kept, rest, unit, negative: 2 * rest >= unit,
    "nearest_zero": lambda kept, rest, unit, negative: 2 * rest > unit,
    "toward_zero": lambda kept, rest, unit, negative: rest < 0 * rest,
    "up": lambda kept, rest, unit, negative: (rest > 0) & ~negative,
    "down": lambda kept, rest, unit, negative: (rest > 0) & negative,
    "to_odd": lambda kept, rest, unit, negative: (rest > 0) & ((kept & 1) == 0),
}
"""Rounding modes by name. A tie in ``nearest_even`` where a significand has one bit goes to the larger
magnitude, as IEEE 754-2019 section 4.3.1 has it."""


def rounding(mode: str) -> Callable[[Array, Array, Array, Array], Array]:
    """The mode's rule; ValueError with the choices for an unknown one."""
    if mode not in ROUNDINGS:
        raise ValueError(f"unknown rounding {mode!r}: choose one of {', '.join(ROUNDINGS)}")
    return ROUNDINGS[mode]
