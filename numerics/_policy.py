"""Policies: what rounding leaves open. Each is a parameter with a stated default, never what a backend does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ._format import Block, Codebook, Fixed, Float, Format, Log, Posit
from ._random import Stochastic
from ._rounding import ROUNDINGS

OVERFLOWS = ("ieee", "saturate", "saturate_finite", "inf", "nan", "wrap")
NANS = ("zero", "max")
ZEROS = ("signed", "positive")


@dataclass(frozen=True)
class Policy:
    """How numbers become those of a format.

    >>> Policy(overflow="nan").ends(Float(4, 3, inf=False)).over
    (127, 127)
    >>> [Policy(mode).ends(Float(5, 10)).over == (0x7C00, 0x7BFF) for mode in ("nearest_even", "up", "toward_zero")]
    [False, True, False]

    ``rounding``: one of `ROUNDINGS` or a `Stochastic`. A value is rounded first and tested for overflow then.
    ``overflow``: what becomes of a number that rounds beyond the largest:

    - "ieee": infinity to nearest and in stochastic rounding; under a directed rounding infinity on the side it leads
      to, the largest number on the other: "toward_zero" and "to_odd" always the largest, "up" that of negative
      numbers, "down" that of positive ones. Infinities stay. (IEEE 754-2019 section 7.4; rounding to odd, which is
      not in it, as by Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", IEEE Trans. Comput. 2008.)
    - "inf": infinity, whatever the rounding;
    - "saturate": the largest number, also of infinities; "saturate_finite": infinities stay;
    - "nan": NaN, also of infinities; "wrap": integers modulo 2**bits, of infinities 0.

    Default: the first that `overflow_choices` has: "ieee" where the format has infinities, else "saturate";
    "saturate_finite" for posits, where infinity becomes NaR. Below the range of an unsigned format counts as
    overflow, where saturating, "ieee" and "inf" give the lowest number.
    ``nan``: None (NaN and its sign stay where the format has them, else 0), "zero" or "max" for formats
    without NaN; or the code itself, or a pair of codes, for NaN without and with the sign bit set.
    ``zero``: "signed" (-0 and what rounds to it stay -0 where the format has it) or "positive".
    """

    rounding: Any = "nearest_even"
    overflow: str | None = None
    nan: str | int | tuple[int, int] | None = None
    zero: str = "signed"

    def __post_init__(self) -> None:
        rounding = self.rounding
        if not isinstance(rounding, Stochastic) and (not isinstance(rounding, str) or rounding not in ROUNDINGS):
            raise ValueError(
                f"unknown rounding {rounding!r}: choose one of {', '.join(ROUNDINGS)}, or Stochastic(seed)"
            )
        if self.overflow is not None and self.overflow not in OVERFLOWS:
            raise ValueError(f"overflow={self.overflow!r}: choose one of {', '.join(OVERFLOWS)}")
        if isinstance(self.nan, str) and self.nan not in NANS:
            raise ValueError(f"nan={self.nan!r}: choose one of {', '.join(NANS)}, a code, or two")
        if self.zero not in ZEROS:
            raise ValueError(f"zero={self.zero!r}: choose one of {', '.join(ZEROS)}")

    def ends(self, fmt: Format) -> Ends:
        """The codes that the policy comes to for a scalar format; ValueError for what it cannot express."""
        return _ends(fmt, self)


class Ends(NamedTuple):
    """Codes for what is no ordinary number.

    ``over``: magnitude, without sign, of what is too large, for numbers without and with the sign bit;
    ``infinite``: of infinity. ``under``: code of what is below the range of an unsigned format. ``nan``: codes of
    NaN without and with the sign bit.
    ``negative_zero``: whether zero keeps its sign. ``wrap``: integers go around instead.
    """

    over: tuple[int, int]
    infinite: int
    under: int
    nan: tuple[int, int]
    negative_zero: bool
    wrap: bool


def overflow_choices(fmt: Format) -> tuple[str, ...]:
    """The overflow policies that the format can express, the default first."""
    if isinstance(fmt, Posit):
        return ("saturate_finite", "saturate")
    if not isinstance(fmt, Float):
        return ("saturate", "wrap") if isinstance(fmt, Fixed) and not fmt.sign_magnitude else ("saturate",)
    nan = ("nan",) if fmt.nan_code is not None else ()
    return ("saturate", *nan) if fmt.inf_code is None else ("ieee", "saturate", "saturate_finite", "inf", *nan)


# the directed roundings whose overflow is infinity above and below the range
_TO_INFINITY = {"toward_zero": (False, False), "to_odd": (False, False), "up": (True, False), "down": (False, True)}


def _ends(fmt: Format, policy: Policy) -> Ends:
    assert not isinstance(fmt, Block)
    choices = overflow_choices(fmt)
    overflow, zero = policy.overflow or choices[0], policy.zero
    if overflow not in choices:
        raise ValueError(f"overflow={overflow!r} is not possible for {fmt}: choose {', '.join(map(repr, choices))}")
    nans = _nan_codes(fmt, policy.nan)
    if isinstance(fmt, Float):
        negative_zero = zero == "signed" and bool(fmt.negative_zero)
        if overflow == "ieee":
            assert fmt.inf_code is not None
            far = _TO_INFINITY.get(policy.rounding) if isinstance(policy.rounding, str) else None
            above, below = (fmt.inf_code if to else fmt.max_code for to in far or (True, True))
            return Ends((above, below), fmt.inf_code, 0, nans, negative_zero, False)
        over = {"inf": fmt.inf_code, "nan": fmt.nan_code}.get(overflow, fmt.max_code)
        infinite = fmt.inf_code if overflow == "saturate_finite" else over
        assert over is not None
        assert infinite is not None
        return Ends((over, over), infinite, over if overflow == "nan" else 0, nans, negative_zero, False)
    if isinstance(fmt, Fixed):
        negative_zero = fmt.sign_magnitude and zero == "signed"
        wrap = overflow == "wrap"
        return Ends((fmt.high, -fmt.low), 0 if wrap else fmt.high, 0, nans, negative_zero, wrap)
    top = len(fmt.values) - 1 if isinstance(fmt, Codebook) else fmt.max_code
    infinite = fmt.nan_code if isinstance(fmt, Posit) and overflow == "saturate_finite" else top
    return Ends((top, top), infinite, 0, nans, zero == "signed" and isinstance(fmt, Log) and fmt.signed, False)


def _nan_codes(fmt: Any, nan: Any) -> tuple[int, int]:
    if isinstance(nan, (int, tuple)):
        codes = (nan, nan) if isinstance(nan, int) else nan
        if len(codes) != 2 or not all(0 <= code < 2**fmt.bits for code in codes):
            raise ValueError(f"nan={nan!r}: a code of {fmt} is from 0 to {2**fmt.bits - 1}; give one or two")
        return codes
    code = getattr(fmt, "nan_code", None)
    if code is not None:
        signed = isinstance(fmt, Float) and fmt.signed and fmt.nan in ("ieee", "top")
        return code, code | 1 << (fmt.bits - 1) if signed else code
    if isinstance(fmt, Codebook):
        least = min(range(len(fmt.values)), key=lambda i: abs(fmt.values[i]))
        code = len(fmt.values) - 1 if nan == "max" else least
        return code, code
    if isinstance(fmt, Fixed):
        code = fmt.code(fmt.high if nan == "max" else 0)
        return code, code
    code = fmt.max_code if nan == "max" else 0
    return code, code
