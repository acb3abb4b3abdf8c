"""Compatibility profiles: whose cast to reproduce, bit for bit, with what it does where standards leave room."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from .._backend import Array, Backend
from .._format import Block, Format
from .._names import format as read_format
from .._parts import less, select
from .._policy import Policy
from .._random import Stochastic
from ._microxcaling import microxcaling


@dataclass(frozen=True)
class CastRule:
    """How one library casts to one format.

    >>> from halfulp.numerics import PROFILES
    >>> PROFILES["torch-2.13"].casts["e8m0"].before
    ('magnitude', 'tiny_up')

    ``policy``: how it rounds and what it does where numbers do not fit. ``before``: steps (names of `STEPS`)
    that it takes before that. ``wide``: the steps in their place for sources that are wider than float32, which
    are float64 and integers of 32 bits and more; None: "float32", then those of ``before``. ``format``: the
    name of the format that the library really has under this name. ``emulation``: a function (a name of
    `EMULATIONS`) in place of all this.
    """

    policy: Policy = field(default_factory=Policy)
    before: tuple[str, ...] = ()
    wide: tuple[str, ...] | None = None
    format: str | None = None
    emulation: str | None = None


@dataclass(frozen=True)
class CastProfile:
    """What a library, a runtime or an instruction set makes of numbers, one `CastRule` for each of its formats.

    >>> import numpy as np
    >>> from halfulp.numerics import PROFILES, cast
    >>> PROFILES["ml_dtypes"].verified, list(PROFILES["ptx-satfinite"].casts)[:3]
    (True, ['e4m3fn', 'e5m2', 'fp16'])
    >>> [cast(np.float32([464.1, np.inf]), "e4m3fn", profile=name).tolist() for name in ("torch-2.13", "jax")]
    [[448.0, 448.0], [nan, nan]]

    ``casts``: by format name. ``version``: of what it describes; ``source``: where that is known from, ``date``:
    when; ``verified``: whether tests compare it with the real thing, bit for bit. ``notes``: what is not
    reproduced, or only where.
    """

    casts: Mapping[str, CastRule]
    version: str
    source: str
    date: str
    verified: bool
    notes: tuple[str, ...] = ()


def _float32(xp: Backend, x: Array) -> Array:
    from .._cast import encode  # which reads profiles in its turn

    return xp.view(encode(x, "fp32"), xp.floats[32])


Change = Callable[[Array, Callable[[float], int], int], Array]


def _on_bits(change: Change) -> Callable[[Backend, Array], Array]:
    """A step from a function of a float's bits, of the bits of positive numbers and of the bits' width."""

    def step(xp: Backend, x: Array) -> Array:
        wide = xp.width(x)
        real: Any = {32: np.float32, 64: np.float64}[wide]
        integer: Any = {32: np.int32, 64: np.int64}[wide]
        bits = change(xp.view(x, xp.ints[wide]), lambda number: int(real(number).view(integer)), wide)
        return xp.view(bits, xp.floats[wide])

    return step


def _magnitude(bits: Array, wide: int) -> Array:
    return bits & (2 ** (wide - 1) - 1)


def _below(bits: Array, limit: int, wide: int) -> Array:
    return less(_magnitude(bits, wide), limit, wide)


def _tiny_up(bits: Array, of: Callable[[float], int], wide: int) -> Array:
    between = ~_below(bits, of(2.0**-127) + 1, wide) & _below(bits, of(2.0**-126), wide)
    return select(between, bits & -(2 ** (wide - 1)) | of(2.0**-126), bits)


STEPS: dict[str, Callable[[Backend, Array], Array]] = {
    # rounded to nearest even first, so that the cast rounds a second time
    "float32": _float32,
    # numbers below the smallest normal float32 become zeros
    "flush": _on_bits(
        lambda bits, of, wide: select(_below(bits, of(2.0**-126), wide), bits & -(2 ** (wide - 1)), bits)
    ),
    "magnitude": _on_bits(lambda bits, of, wide: _magnitude(bits, wide)),
    # both zeros are NaN
    "no_zero": _on_bits(lambda bits, of, wide: select(_below(bits, 1, wide), of(math.nan) + 0 * bits, bits)),
    # so is all below 2**-127
    "no_tiny": _on_bits(
        lambda bits, of, wide: select(_below(bits, of(2.0**-127), wide), of(math.nan) + 0 * bits, bits)
    ),
    # -0 is 0, but what rounds to zero keeps its sign
    "plain_zero": _on_bits(lambda bits, of, wide: select(_below(bits, 1, wide), 0, bits)),
    # between 2**-127 and 2**-126 all go up
    "tiny_up": _on_bits(_tiny_up),
}
"""What libraries do to a number before they round it."""

EMULATIONS: dict[str, Callable[..., Array]] = {"microxcaling": microxcaling}
"""Casts that are no rounding of an exact value, as functions of numbers, format and policies."""


def named_profile(name: str) -> CastProfile:
    """A profile of `PROFILES` by its name.

    Raises ValueError that names the profiles there are.
    """
    from ._peers import PROFILES

    if name not in PROFILES:
        near = [known for known in PROFILES if known.startswith(f"{name}-")]
        near = near or difflib.get_close_matches(str(name), PROFILES, n=1)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"unknown profile {name!r}: {hint}choose one of {', '.join(PROFILES)}")
    return PROFILES[name]


@cache
def cast_of(profile: str, fmt: Format) -> tuple[CastRule, Format]:
    """How a profile casts to a format, and which format that really is.

    A block is found under its own name, or under that of the same block along the last axis, of the usual size.
    Raises ValueError that names the formats which the profile has.
    """
    casts = named_profile(profile).casts
    known = {read_format(key): cast for key, cast in casts.items()}
    found = known.get(fmt)
    if found is None and isinstance(fmt, Block) and isinstance(fmt.axis, int):
        sizes = [block.size for block in known if isinstance(block, Block)]
        usual = (known.get(replace(fmt, axis=-1, size=size)) for size in [fmt.size, *sizes])
        found = next((cast for cast in usual if cast is not None), None)
    if found is None:
        raise ValueError(f"profile {profile!r} does not say how {fmt} is cast; it has {', '.join(casts)}")
    if found.format is None:
        return found, fmt
    real = read_format(found.format)
    if isinstance(real, Block) and isinstance(fmt, Block):
        real = replace(real, size=fmt.size, axis=fmt.axis)
    return found, real


@dataclass(frozen=True)
class Resolved:
    """A cast with everything settled: the format, the policy, and what comes before."""

    format: Format
    policy: Policy
    cast: CastRule | None

    def prepare(self, xp: Backend, x: Array) -> Array:
        """x after the steps that the profile's library takes before it rounds."""
        if self.cast is None:
            return x
        small = xp.width(x) <= 32 if xp.is_float(x) else xp.width(x) <= 16
        wide = ("float32", *self.cast.before) if self.cast.wide is None else self.cast.wide
        for step in self.cast.before if small else wide:
            x = STEPS[step](xp, x if step == "float32" else xp.source(x))
        return x

    def emulate(self) -> Callable[[Array], Array] | None:
        """The function that stands in for the cast, where there is one."""
        if self.cast is None or self.cast.emulation is None:
            return None
        policy, emulation = self.policy, EMULATIONS[self.cast.emulation]
        if policy.nan is not None or policy.zero != "signed":
            raise ValueError(f"{self.cast.emulation} has no nan or zero policies: NaN stays, and so do its zeros")
        chosen = {} if policy.overflow is None else {"overflow": policy.overflow}
        return lambda x: emulation(x, self.format, rounding=policy.rounding, **chosen)


def resolve(
    fmt: Format | str,
    profile: str | None,
    rounding: str | Stochastic | None,
    overflow: str | None,
    nan: str | int | tuple[int, int] | None,
    zero: str | None,
) -> Resolved:
    """A format and policies in which what was given outright goes before what the profile says."""
    fmt = read_format(fmt)
    every: dict[str, Any] = {"rounding": rounding, "overflow": overflow, "nan": nan, "zero": zero}
    given = {key: value for key, value in every.items() if value is not None}
    if profile is None:
        return Resolved(fmt, Policy(**given), None)
    cast, real = cast_of(profile, fmt)
    return Resolved(real, replace(cast.policy, **given), cast)
