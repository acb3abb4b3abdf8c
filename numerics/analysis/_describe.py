"""What there is to know about a number format, read off the values of its codes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np

from .._block import targets
from .._cast import cast, decode
from .._codec import code_bits
from .._format import Block, Codebook, Fixed, Float, Format
from .._names import format as read_format
from .._scales import scale_rule

EXHAUSTIVE = 16  # bits up to which every code is decoded; wider formats are searched
WIDEST = 256

Span = tuple[int, int]  # first and last code


@dataclass(frozen=True)
class Facts:
    """A scalar format in figures: what `describe` returns. Codes are given as spans, first and last.

    ``lowest``, ``max``: the finite range. ``min_positive``: smallest number above zero; ``min_normal``: where
    full precision begins, None for formats without such a place. ``subnormals``: codes below it, zeros not
    counted, both signs. ``step``: the distance of neighbours where it is the same everywhere, else None.
    ``ulp_of_one``: from 1 to the next number above, None where 1 is no number of the format or its last.
    ``worst_error``: the largest relative error of rounding to nearest between ``min_normal`` (else
    ``min_positive``) and ``max``. ``symmetric``: whether the negative numbers mirror the positive ones.
    ``finite``: codes of finite numbers, zeros and doubles included; ``unused``: those of them that nothing is
    rounded to.
    """

    format: Format
    bits: int
    finite: int
    distinct: int
    zeros: tuple[Span, ...]
    negative_zeros: tuple[Span, ...]
    infinities: tuple[Span, ...]
    nans: tuple[Span, ...]
    unused: tuple[Span, ...]
    lowest: float
    max: float
    min_positive: float
    min_normal: float | None
    subnormals: int
    step: float | None
    ulp_of_one: float | None
    worst_error: float
    symmetric: bool

    @property
    def binades(self) -> float:
        """log2 of the largest number over the smallest above zero: the dynamic range in factors of two; 0 where
        no number is above zero."""
        if not self.max > 0:
            return 0.0
        return math.log2(self.max) - math.log2(self.min_positive)

    @property
    def decibels(self) -> float:
        """The dynamic range in decibels, 20 log10 of the same ratio."""
        return 20 * math.log10(2) * self.binades


@lru_cache(maxsize=64)
def describe(fmt: Format | str) -> Facts:
    """Range, precision and special codes of a scalar format.

    >>> facts = describe("e3m2")
    >>> facts.max, facts.min_normal, facts.min_positive, facts.subnormals, facts.ulp_of_one
    (28.0, 0.25, 0.0625, 6, 0.25)
    >>> describe("e4m3fn").nans, round(describe("e4m3fn").decibels, 1)
    (((127, 127), (255, 255)), 107.2)

    Everything is read off the decoded values: of all codes for formats of at most 16 bits, of those that a
    search among the codes finds for wider ones, whose positive codes ascend with their values.
    Raises ValueError for a block format: describe its element and its scale.
    """
    fmt = read_format(fmt)
    if isinstance(fmt, Block):
        raise ValueError(f"{fmt} is a block format: describe its element {fmt.element} and its scale {fmt.scale}")
    return _from_all_codes(fmt) if fmt.bits <= EXHAUSTIVE else _from_search(fmt)


def values_of(fmt: Format | str) -> np.ndarray:
    """The value of every code of a format of at most 16 bits, as float64; NaN where a code has none.

    >>> values_of("e2m1")[:8]
    array([0. , 0.5, 1. , 1.5, 2. , 3. , 4. , 6. ])
    """
    scalar: Any = read_format(fmt)
    if isinstance(scalar, Block) or scalar.bits > EXHAUSTIVE:
        raise ValueError(f"{scalar} has too many codes to list: give a scalar format of at most {EXHAUSTIVE} bits")
    return _decoded(scalar, np.arange(2**scalar.bits))


def numbers_of(fmt: Format | str) -> np.ndarray:
    """The finite numbers that a format of at most 16 bits rounds to, ascending, each once."""
    values = values_of(fmt)
    return np.unique(values[np.isfinite(values) & ~_unused(fmt, values)] + 0.0)


def _unused(fmt: Any, values: np.ndarray) -> np.ndarray:
    """Numbers that no number is rounded to, such as -8 in int4n."""
    finite = np.isfinite(values)
    return finite & (cast(np.where(finite, values, 0.0), fmt) != values)


def _decoded(fmt: Any, codes: np.ndarray) -> np.ndarray:
    narrow = codes.astype(f"u{code_bits(fmt) // 8}")
    return np.asarray(decode(narrow, fmt, dtype="float64"))


def spans(mask: np.ndarray) -> tuple[Span, ...]:
    """`spans(np.array([True, False, True, True])) == ((0, 0), (2, 3))`: where a mask holds."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return tuple((int(a), int(b) - 1) for a, b in edges.reshape(-1, 2))


def borders(fmt: Any, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Where rounding to nearest changes from low to high, neighbours of one sign: halfway for most formats, and
    for the others where they themselves say, found by halving the interval down to neighbouring float64."""
    if isinstance(fmt, (Float, Fixed, Codebook)):
        return low + (high - low) / 2
    inner, outer = low.copy(), high.copy()
    while True:
        middle = inner + (outer - inner) / 2
        if ((middle == inner) | (middle == outer)).all():
            return outer
        stays = np.asarray(cast(middle, fmt)) == low
        inner, outer = np.where(stays, middle, inner), np.where(stays, outer, middle)


def worst_gap(fmt: Any, numbers: np.ndarray) -> float:
    """The largest relative error of rounding to nearest between ascending numbers above zero, which is in one of
    the `WIDEST` gaps relative to their size."""
    low, high = numbers[:-1], numbers[1:]
    if len(low) > WIDEST:
        widest = np.argpartition(low / high, WIDEST)[:WIDEST]
        low, high = low[widest], high[widest]
    at = borders(fmt, low, high)
    return float(np.maximum(1 - low / at, high / at - 1).max(initial=0.0))


def _from_all_codes(fmt: Any) -> Facts:
    values = values_of(fmt)
    finite, unused = np.isfinite(values), _unused(fmt, values)
    numbers = numbers_of(fmt)
    positive, zero = numbers[numbers > 0], values == 0
    normal = _min_normal(fmt)
    gaps = np.diff(numbers)
    full = positive[positive >= (normal or 0)]
    negative = -numbers[numbers < 0][::-1]
    sides = [full] if normal is not None or np.array_equal(negative, positive) else [full, negative]
    # the positive numbers come first: those of a signed format that has none below zero are all there is
    above = numbers[np.searchsorted(numbers, 1.0, side="right") :] if 1.0 in numbers else numbers[:0]
    return Facts(
        format=fmt,
        bits=fmt.bits,
        finite=int(finite.sum()),
        distinct=len(numbers),
        zeros=spans(zero & ~np.signbit(values)),
        negative_zeros=spans(zero & np.signbit(values)),
        infinities=spans(np.isinf(values)),
        nans=spans(np.isnan(values)),
        unused=spans(unused),
        lowest=float(numbers[0]),
        max=float(numbers[-1]),
        min_positive=float(positive[0]) if len(positive) else math.nan,
        min_normal=normal,
        subnormals=int((finite & ~zero & (np.abs(values) < normal)).sum()) if normal else 0,
        step=float(gaps[0]) if len(gaps) and (gaps == gaps[0]).all() else None,
        ulp_of_one=float(above[0]) - 1.0 if len(above) else None,
        worst_error=max(worst_gap(fmt, side) for side in sides),
        symmetric=np.array_equal(negative, positive),
    )


def _min_normal(fmt: Any) -> float | None:
    has = isinstance(fmt, Float) and fmt.zero and fmt.emin <= fmt.emax
    return math.ldexp(1.0, fmt.emin) if has else None


def first_code(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The first code in low..high-1 from which on the condition holds; high where it never does."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _kind(value: float) -> str:
    if math.isfinite(value):
        return "number" if value else "minus zero" if math.copysign(1, value) < 0 else "zero"
    return "nan" if math.isnan(value) else "infinity"


def _from_search(fmt: Any) -> Facts:
    """Among the codes of either sign each kind of value is one run, and positive values ascend."""

    def value(code: int) -> float:
        return float(_decoded(fmt, np.array([code]))[0])

    found: dict[str, list[Span]] = {}
    half = 2 ** (fmt.bits - getattr(fmt, "signed", True))
    for start in range(0, 2**fmt.bits, half):
        code, stop = start, start + half
        while code < stop:
            kind = _kind(value(code))
            after = first_code(code, stop, lambda c: _kind(value(c)) != kind)  # noqa: B023
            found.setdefault(kind, []).append((code, after - 1))
            code = after
    runs = {kind: tuple(found.get(kind, ())) for kind in ("number", "zero", "minus zero", "infinity", "nan")}
    (first, last), *negative = runs["number"]
    normal = _min_normal(fmt)
    full = first_code(first, last, lambda c: value(c) >= normal) if normal else first
    one = first_code(first, last, lambda c: value(c) >= 1.0)
    ends = [worst_gap(fmt, np.array([value(c), value(c + 1)])) for c in (full, last - 1)]
    lengths = {kind: sum(b - a + 1 for a, b in spans) for kind, spans in runs.items()}
    return Facts(
        format=fmt,
        bits=fmt.bits,
        finite=lengths["number"] + lengths["zero"] + lengths["minus zero"],
        distinct=lengths["number"] + bool(lengths["zero"]),
        zeros=runs["zero"],
        negative_zeros=runs["minus zero"],
        infinities=runs["infinity"],
        nans=runs["nan"],
        unused=(),
        lowest=min(value(code) for span in negative for code in span) if negative else value(0),
        max=value(last),
        min_positive=value(first),
        min_normal=normal,
        subnormals=(1 + len(negative)) * (full - first),
        step=None,
        ulp_of_one=value(one + 1) - 1.0 if value(one) == 1.0 and one < last else None,
        worst_error=max(ends),
        symmetric=bool(negative),
    )


_ROUNDED = {
    "nearest_even": "to nearest even",
    "nearest_away": "to nearest, ties away from zero",
    "nearest_zero": "to nearest, ties toward zero",
    "toward_zero": "down",
    "up": "up",
}


def scale_in_words(fmt: Block) -> str:
    """How a block's scale follows from its elements.

    >>> scale_in_words(read_format("mxfp4"))
    'amax / 4, rounded down to a power of two'
    >>> scale_in_words(read_format("nvfp4"))
    'amax / 6 / tensor scale, rounded to nearest even to e4m3fn; tensor scale: amax of the tensor / 2688, in fp32'
    """
    rule, element = scale_rule(fmt.rule), fmt.element
    found = targets(fmt)
    of, over = "amax", f" / {found[0]:g}" * (found[0] != 1)
    if rule.round_amax:
        of = f"amax (first rounded to {element.mantissa + 1} significant bits)"  # type: ignore[union-attr]
    if fmt.zero_point:
        span = (element.high - element.low) * 2.0**-element.fraction  # type: ignore[union-attr]  # an integer
        of, over = "(max - min)", f" / {span:g}"
    if len(found) > 1:
        few = f"{', '.join(f'{t:g}' for t in found[:-1])} or {found[-1]:g}"
        over = " over " + (few if len(found) < 5 else f"{len(found)} numbers from {found[0]:g} to {found[-1]:g}")
    to = "a power of two" if fmt.scale.mantissa == 0 else str(fmt.scale)
    tensor = " / tensor scale" if fmt.tensor_scale else ""
    words = f"{of}{over}{tensor}, rounded {_ROUNDED.get(rule.rounding, rule.rounding)} to {to}"
    words += ": the one that loses least" * rule.search + ", which may be zero" * rule.zero
    if fmt.tensor_scale:
        words += f"; tensor scale: amax of the tensor / {fmt.scale.max * found[0]:g}, in {fmt.tensor_scale}"
    return words


def fate(fmt: Format | str) -> dict[str, str]:
    """What becomes by default of numbers too large, of infinity and of NaN: found out by casting them.

    >>> fate("e4m3fn")
    {'overflow': 'saturates to 448', 'infinity': 'saturates to 448', 'NaN': 'stays NaN'}
    >>> fate("fp16")
    {'overflow': 'becomes infinity', 'infinity': 'stays infinity', 'NaN': 'stays NaN'}
    """
    largest = describe(fmt).max
    given = {"overflow": min(largest, 2.0**1022) * 2, "infinity": math.inf, "NaN": math.nan}
    made = cast(np.array(list(given.values())), fmt)
    words = {}
    for (name, before), after in zip(given.items(), made.tolist()):
        if math.isfinite(after):
            words[name] = f"saturates to {after:g}" if name != "NaN" else f"becomes {after:g}"
        else:
            kind = "NaN" if math.isnan(after) else "infinity"
            words[name] = (
                f"{'stays' if not math.isfinite(before) and _kind(before) == _kind(after) else 'becomes'} {kind}"
            )
    return words


def constructor(fmt: Format) -> str:
    """The shortest call that makes the format: fields that have their default are left out.

    >>> constructor(read_format("e3m2")), constructor(read_format("mxfp4"))
    ('Float(exponent=3, mantissa=2, inf=False, nan=False)', "Block(element='e2m1')")
    """
    kind = type(fmt)
    given = {f.name: getattr(fmt, f.name) for f in fields(fmt) if f.init}
    required = {f.name for f in fields(fmt) if f.default is MISSING and f.default_factory is MISSING}
    for name in [name for name in given if name not in required]:
        rest = {key: value for key, value in given.items() if key != name}
        try:
            if kind(**rest) == fmt:
                given = rest
        except (ValueError, TypeError):
            continue  # the other fields make no format without this one
    shown = {key: str(value) if isinstance(value, Format) else value for key, value in given.items()}
    return f"{kind.__name__}({', '.join(f'{key}={value!r}' for key, value in shown.items())})"
