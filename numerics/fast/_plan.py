"""What the compiled loops can do: a format and a policy as their parameters, or None."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np

from .. import _oracle
from .._backend import Array, Numpy
from .._codec import code_bits, decode_scalar
from .._format import Fixed, Float, Int, Scalar
from .._policy import Policy
from .._random import Stochastic

# what is known of a format here; a field that is not makes it unknown
_KNOWN = {
    Float: {
        "exponent",
        "mantissa",
        "bias",
        "signed",
        "subnormal",
        "inf",
        "nan",
        "negative_zero",
        "zero",
        "even",
    },
    Fixed: {"bits", "fraction", "signed", "narrow", "sign_magnitude", "offset"},
}
_SIGN = 1 << 31
_INFINITY = 0xFF << 23


@dataclass(frozen=True, eq=False)
class Plan:
    """Rounding by `_round`: which of its loops, with which parameters, for numbers and for codes.

    ``bits``: of the unsigned integers that hold codes. ``random``: the mode's numbers, but for the seed.
    """

    way: str
    level: bool
    values: Array
    codes: Array
    bits: int
    mantissa: int


def power(exponent: int) -> int:
    """The exponent field of 2**exponent in float32, in its place."""
    return (exponent + 127) << 23


def known(fmt: Any) -> type | None:
    """`Float` or `Fixed` where everything about the format is known here."""
    kind = Fixed if type(fmt) in (Fixed, Int) else Float if type(fmt) is Float else None
    if kind is None or not {f.name for f in fields(fmt)} <= _KNOWN[kind]:
        return None
    return kind


def numbers_of(fmt: Scalar, codes: list[int]) -> list[int]:
    """The bits of the float32 numbers that these codes stand for."""
    if fmt.bits <= 16:  # as in the text's table, which is not made for these few
        values = np.array([float(_oracle.decode(fmt, code)) for code in codes])
        with np.errstate(over="ignore"):
            return [int(b) for b in values.astype(np.float32).view(np.uint32)]
    table = np.array(codes, np.uint64).astype({8: np.uint8, 16: np.uint16, 32: np.uint32}[code_bits(fmt)])
    return [int(b) for b in decode_scalar(Numpy, table, fmt, 32).view(np.uint32)]


def _steps(fmt: Any, kind: type) -> Any:
    from ._round import Steps

    if kind is Fixed:
        top = max(fmt.high, -fmt.low).bit_length()
        m, emin, emax = top, top - fmt.fraction, top - fmt.fraction - 1
        subnormal, zero = True, True
    else:
        m, emin, emax = fmt.mantissa, fmt.emin, fmt.emax
        subnormal, zero = fmt.subnormal, fmt.zero
    limit = power(emax + 1) if emax < 127 else _INFINITY
    spread = m if subnormal else 0
    return Steps(
        emin=power(emin),
        limit=limit,
        mantissa=m,
        lift=(23 - m) << 23,
        low=power(emin - spread),
        low_drop=23 - spread,
        flush=m - spread,
        first=0 if zero else 1 << m,
    )


def _ways(fmt: Any, kind: type) -> tuple[bool, bool, bool]:
    """Whether the format has float32's exponent range, and whether the loops "nearest" and the others serve it."""
    if kind is Fixed:
        top = max(fmt.high, -fmt.low).bit_length()
        within = -104 <= fmt.fraction <= 126 and top - fmt.fraction < 127
        return False, within, within
    m = fmt.mantissa
    if m > 23 or fmt.emax > 127 or fmt.even != "significand" or fmt.emin < -126:
        return False, False, False
    level = fmt.emin == -126 and fmt.subnormal and fmt.zero and m >= 1
    # what is added to a number is a float32 itself; a format's numbers are normal float32s
    nearest = fmt.emax + 1 + 23 - m <= 127
    spread = m if fmt.subnormal else 0
    low = fmt.emin - m >= -126
    return level, nearest and low, low and fmt.emax + 24 - spread < 230


def _ends(fmt: Any, kind: type, policy: Policy) -> tuple[Any, Any] | None:
    """`_round.Ends` for numbers and for codes."""
    from ._round import Ends

    ends = policy.ends(fmt)
    if ends.wrap:
        return None
    if kind is Fixed:
        integers = not fmt.sign_magnitude
        most = (fmt.high, -fmt.low)
        over = infinite = (fmt.code(fmt.high), fmt.code(fmt.low))
        signed = True
        least, offset, zero = 0, fmt.offset, -1 if integers or ends.negative_zero else 0
        sign, negate = (0, -1) if integers else (1 << (fmt.bits - 1), 0)
        value_zero = -1 if ends.negative_zero else 0
        mosts = [_bits(n * 2.0**-fmt.fraction) for n in most]
    else:
        if not fmt.zero and not fmt.signed and ends.under:
            return None  # tells a negative number from -0 although both have the code 0
        sign = 1 << (fmt.bits - 1) if fmt.signed else 0
        signed = fmt.signed
        over = (ends.over[0], ends.over[1] | sign if signed else ends.under)
        infinite = (ends.infinite, ends.infinite | sign if signed else ends.under)
        most = (fmt.max_code, fmt.max_code if signed else 0)
        least, offset, negate = 0, 0, 0
        zero = value_zero = -1 if ends.negative_zero else 0
        mosts = [_bits(fmt.max), _bits(fmt.max) if signed else 0]
    if any(code >> fmt.bits for code in (*over, *infinite, *ends.nan)):
        return None
    value = numbers_of(fmt, [*over, *infinite, *ends.nan])
    floor = 0 if kind is Fixed or fmt.zero else _bits(2.0**fmt.emin)
    return (
        Ends(
            (mosts[0], mosts[1]),
            (value[0], value[1]),
            (value[2], value[3]),
            (value[4], value[5]),
            floor,
            _SIGN if signed else 0,
            0,
            -1,
            value_zero,
            0,
        ),
        Ends(most, over, infinite, ends.nan, least, sign, negate, (1 << fmt.bits) - 1, zero, offset),
    )


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def plan(fmt: Scalar, policy: Policy) -> Plan | None:
    """How the loops of `_round` round to the format, or None where they cannot."""
    rule = policy.rounding
    key = (f"random:{rule.bits}:{rule.threshold}") if isinstance(rule, Stochastic) else rule
    return _plan(fmt, key, policy.overflow, policy.nan, policy.zero)


@lru_cache(maxsize=512)
def _plan(fmt: Any, rounding: str, overflow: Any, nan: Any, zero: str) -> Plan | None:
    from ._round import MODES, words_of

    kind = known(fmt)
    if kind is None:
        return None
    level, nearest, others = _ways(fmt, kind)
    way = "nearest" if rounding == "nearest_even" and not level else "mode"
    draw = rounding.startswith("random:")
    if not (level or (nearest if way == "nearest" else others)):
        return None
    mode = "nearest_even" if draw else rounding  # which random rounding overflows as
    ends = _ends(fmt, kind, Policy(mode, overflow, nan, zero))
    if ends is None:
        return None
    steps = _steps(fmt, kind)
    if draw:
        _, bits, threshold = rounding.split(":")
        way = "random"
        values, codes = (
            words_of(steps, end, _draw(steps, int(bits), threshold == "nearest", for_codes))
            for end, for_codes in zip(ends, (False, True))
        )
    else:
        values, codes = (words_of(steps, end, MODES[rounding]) for end in ends)
    return Plan(way, level, values, codes, code_bits(fmt), steps.mantissa)


def _draw(steps: Any, bits: int, rounded: bool, codes: bool) -> Any:
    from ._round import Draw

    drop = 23 - steps.mantissa
    quantum = steps.low >> 23
    return Draw(
        mask=-1 << (32 - bits) & 0xFFFFFFFF,
        shift=31 - drop,
        half=1 << (drop - bits - 1) if rounded and drop > bits else 0,
        per=(254 - quantum) << 23,
        low_half=1 << (23 - bits) if rounded and bits < 24 else 0,
        rest=(steps.emin - (1 << 23)) >> drop if codes else -1 << drop & 0xFFFFFFFF,
    )
