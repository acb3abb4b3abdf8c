"""Sums of products in rational arithmetic, rule by rule. Slow and readable; shares nothing with the compiled loops.

A number is a `Fraction`, or a float for -0.0, infinities and NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import singledispatch
from typing import Any

from .._format import Float
from .._names import format as read_format
from ._rules import (
    Aligned,
    AlignedLate,
    Chunked,
    Exact,
    Hardware,
    Integer,
    Pairwise,
    Sequential,
    sums_integers,
)

Number = Fraction | float
ZERO = Fraction(0)
FP32: Any = read_format("fp32")


@dataclass(frozen=True)
class Terms:
    """Operands of one sum: numbers, the smallest normal exponents of their formats, and the scale of each element."""

    a: list[Number]
    b: list[Number]
    emin: tuple[int, int] = (-126, -126)
    scale_a: list[Number] | None = None
    scale_b: list[Number] | None = None
    scale_emin: tuple[int, int] = (-127, -127)

    def part(self, k0: int, k1: int, step: int = 1) -> Terms:
        """Terms k0 to k1."""
        at = slice(k0, k1, step)
        scale_a, scale_b = (None if s is None else s[at] for s in (self.scale_a, self.scale_b))
        return Terms(self.a[at], self.b[at], self.emin, scale_a, scale_b, self.scale_emin)


def is_number(x: Number) -> bool:
    """Whether x is finite."""
    return math.isfinite(x)


def negative(x: Number) -> bool:
    """The sign, of zeros too."""
    return math.copysign(1.0, x) < 0 if isinstance(x, float) else x < 0


def multiply(x: Number, y: Number) -> Number:
    """The exact product, as IEEE 754 has it for zeros, infinities and NaN."""
    if math.isnan(x) or math.isnan(y):
        return math.nan
    minus = negative(x) != negative(y)
    if not (is_number(x) and is_number(y)):
        return math.nan if 0 in (x, y) else math.copysign(math.inf, -1 if minus else 1)
    product = Fraction(x) * Fraction(y)
    return -0.0 if product == 0 and minus else product


def add(x: Number, y: Number) -> Number:
    """The exact sum; -0 is the sum of -0 and -0 alone."""
    if not (is_number(x) and is_number(y)):
        return float(x if not is_number(x) else y) if is_number(x) or is_number(y) else float(x) + float(y)
    total = Fraction(x) + Fraction(y)
    return -0.0 if total == 0 and negative(x) and negative(y) else total


def exponent(x: Fraction) -> int:
    """floor(log2(|x|)) of a number that is not 0."""
    e = abs(x.numerator).bit_length() - x.denominator.bit_length()
    return e - (Fraction(2) ** e > abs(x))


def whole(x: Fraction, rounding: str) -> int:
    """x as an integer."""
    low, rest = math.floor(x), x - math.floor(x)
    half, even = Fraction(1, 2), low % 2 == 0
    up = {
        "nearest_even": rest > half or (rest == half and not even),
        "nearest_away": rest > half or (rest == half and x > 0),
        "nearest_zero": rest > half or (rest == half and x < 0),
        "toward_zero": x < 0 and rest > 0,
        "up": rest > 0,
        "down": False,
        "to_odd": rest > 0 and even,
    }[rounding]
    return low + up


def round_to(fmt: Float, x: Number, rounding: str, overflow: str | None = None, flush: bool = False) -> Number:
    """x as a number of the format; what becomes 0 keeps its sign."""
    if math.isnan(x) or x == 0:
        return x
    policy = overflow or ("inf" if fmt.inf else "saturate")
    over: Number = Fraction(fmt.max) if policy == "saturate" else float(policy)
    if math.isinf(x):
        return over if x > 0 else -over
    x = Fraction(x)
    unit = Fraction(2) ** (max(exponent(x), fmt.emin) - fmt.mantissa)
    y = whole(x / unit, rounding) * unit
    if abs(y) > Fraction(fmt.max):
        return over if y > 0 else -over
    if flush and abs(y) < Fraction(2) ** fmt.emin:
        y = ZERO
    return -0.0 if y == 0 and x < 0 else y


@singledispatch
def total(rule: Any, terms: Terms, c: Number) -> Number:
    """c + the sum of the products, under the rule.

    >>> two = Terms([Fraction(256), Fraction(1, 64)], [Fraction(1), Fraction(1)])
    >>> total(Aligned(32, 13, "e8m13"), two, ZERO), total(Sequential(), two, ZERO)
    (Fraction(256, 1), Fraction(16385, 64))
    """
    raise TypeError(f"no oracle for {rule!r}")


@total.register
def _(rule: Hardware, terms: Terms, c: Number) -> Number:
    return total(rule.rule, terms, c)


def _product(rule: Sequential | Pairwise, x: Number, y: Number) -> Number:
    product = multiply(x, y)
    if rule.product is None:
        return product
    overflow = rule.overflow if rule.product == rule.format else None
    return round_to(rule.product, product, rule.rounding, overflow, rule.flush)


def _rounded(rule: Any, x: Number) -> Number:
    return round_to(rule.format, x, rule.rounding, rule.overflow, getattr(rule, "flush", False))


@total.register
def _(rule: Sequential, terms: Terms, c: Number) -> Number:
    acc = _rounded(rule, c)
    for x, y in zip(terms.a, terms.b):
        acc = _rounded(rule, add(acc, _product(rule, x, y)))
    return acc


@total.register
def _(rule: Pairwise, terms: Terms, c: Number) -> Number:
    c = _rounded(rule, c)
    leaves = [_product(rule, x, y) for x, y in zip(terms.a, terms.b)]
    return _rounded(rule, add(c, _tree(rule, leaves))) if leaves else c


def _tree(rule: Pairwise, leaves: list[Number]) -> Number:
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return _rounded(rule, add(_tree(rule, leaves[:half]), _tree(rule, leaves[half:])))


@total.register
def _(rule: Exact, terms: Terms, c: Number) -> Number:
    acc = c
    for x, y in zip(terms.a, terms.b):
        acc = add(acc, multiply(x, y))
    return _rounded(rule, acc if acc != 0 else ZERO)


@total.register
def _(rule: Integer, terms: Terms, c: Number) -> Number:
    def contain(x: Number) -> Fraction:
        if rule.overflow == "saturate":
            return max(Fraction(-1 - rule.high), min(Fraction(rule.high), Fraction(x)))
        return (Fraction(x) + rule.high + 1) % 2**rule.bits - rule.high - 1

    acc = contain(c)
    for k in range(0, len(terms.a), rule.group):
        part = terms.part(k, k + rule.group)
        acc = contain(acc + sum(Fraction(x) * Fraction(y) for x, y in zip(part.a, part.b)))
    return acc


@total.register
def _(rule: Chunked, terms: Terms, c: Number) -> Number:
    partials = []
    scaled = terms.scale_a is not None and not _aligns_scales(rule.inner)
    for k in range(0, max(len(terms.a), 1), rule.every):
        part = terms.part(k, k + rule.every)
        plain = Terms(part.a, part.b, part.emin) if scaled else part
        partial = total(rule.inner, plain, ZERO)
        if sums_integers(rule.inner) and not isinstance(rule.outer, Integer):
            partial = round_to(FP32, partial, "nearest_even")
        scale: Number = Fraction(1)
        if scaled:
            assert part.scale_a is not None
            assert part.scale_b is not None
            scale = round_to(FP32, multiply(part.scale_a[0], part.scale_b[0]), "nearest_even")
        partials.append((partial, scale))
    if isinstance(rule.outer, Pairwise):
        leaves = [_rounded(rule.outer, add(ZERO, _product(rule.outer, x, y))) for x, y in partials]
        return _rounded(rule.outer, add(_rounded(rule.outer, c), _tree(rule.outer, leaves)))
    if isinstance(rule.outer, Integer):
        ones = Terms([x for x, _ in partials], [Fraction(1)] * len(partials))
        return total(Integer(rule.outer.bits, rule.outer.overflow), ones, c)
    return total(rule.outer, Terms([x for x, _ in partials], [y for _, y in partials]), c)


def _aligns_scales(rule: Any) -> bool:
    rule = rule.rule if isinstance(rule, Hardware) else rule
    return _aligns_scales(rule.inner) if isinstance(rule, Chunked) else isinstance(rule, Aligned) and rule.scaled


def _special(terms: Terms, c: Number) -> Number | None:
    """The sum where an infinity or NaN is in it."""
    products = [multiply(x, y) for x, y in zip(terms.a, terms.b)]
    scales = [*(terms.scale_a or []), *(terms.scale_b or [])]
    special = [x for x in (*products, c, *scales) if not is_number(x)]
    return sum(map(float, special)) if special else None


def _parts(x: Number, emin: int, zero: int | None) -> tuple[Fraction, int | None]:
    """(significand, exponent)."""
    if x == 0:
        return ZERO, zero
    e = max(exponent(Fraction(x)), emin)
    return Fraction(x) / Fraction(2) ** e, e


def _aligned_products(terms: Terms, zero: int | None) -> list[tuple[Fraction, int | None]]:
    out = []
    ones: list[Number] = [Fraction(1)] * len(terms.a)
    scales_a, scales_b = terms.scale_a or ones, terms.scale_b or ones
    for x, y, p, q in zip(terms.a, terms.b, scales_a, scales_b):
        pairs = [
            _parts(x, terms.emin[0], zero),
            _parts(y, terms.emin[1], zero),
            _parts(p, -400, None),
            _parts(q, -400, None),
        ]
        significand = Fraction(math.prod((s for s, _ in pairs), start=Fraction(1)))
        exponents = [e for _, e in pairs]
        out.append((significand, None if None in exponents else sum(e for e in exponents if e is not None)))
    return out


def _summed_terms(rule: Aligned, terms: Terms) -> list[tuple[Fraction, int | None]]:
    """Exact sums of ``terms`` products under one scale, and the scales' exponents."""
    out = []
    for k in range(0, len(terms.a), rule.terms):
        part = terms.part(k, k + rule.terms)
        inside = sum((Fraction(x) * Fraction(y) for x, y in zip(part.a, part.b)), start=ZERO)
        significand, e = inside, 0
        for scale, emin in ((part.scale_a, terms.scale_emin[0]), (part.scale_b, terms.scale_emin[1])):
            s, more = _parts(scale[0] if scale else Fraction(1), emin, rule.zero_exponent)
            significand, e = significand * s, e + (more if more is not None else -10_000)
        out.append((significand, e if e > -5000 else None))
    return out


def _cut(significand: Fraction, e: int | None, top: int, fraction: int, how: str) -> int:
    """In units of 2**(top - fraction)."""
    return 0 if e is None else whole(significand * Fraction(2) ** (fraction + e - top), how)


def _in_order(rule: Aligned, terms: Terms) -> Terms:
    """With the products of every two groups in the order in which the groups take them."""
    if not rule.interleave:
        return terms
    a, b, n = [], [], 2 * rule.group
    for start in range(0, len(terms.a), n):
        for which in (0, 1):
            for k in range(start, start + n):
                if k % n // rule.interleave % 2 == which:
                    a.append(terms.a[k] if k < len(terms.a) else ZERO)
                    b.append(terms.b[k] if k < len(terms.b) else ZERO)
    return Terms(a, b, terms.emin)


@total.register
def _(rule: Aligned, terms: Terms, c: Number) -> Number:
    terms = _in_order(rule, terms)
    for k in range(0, max(len(terms.a), 1), rule.group):
        part = terms.part(k, k + rule.group)
        special = _special(part, c)
        if special is not None:
            c = special
            continue
        products = _aligned_products(part, rule.zero_exponent) if rule.terms == 1 else _summed_terms(rule, part)
        all_terms = [*products, _parts(c, rule.output.emin, rule.zero_exponent)]
        exponents = [e for _, e in all_terms if e is not None]
        exponents += [] if rule.least_exponent is None else [rule.least_exponent]
        if not exponents:
            c = ZERO
            continue
        top = max(exponents)
        units = sum(_cut(s, e, top, rule.fraction, rule.cut) for s, e in all_terms)
        c = round_to(rule.output, units * Fraction(2) ** (top - rule.fraction), rule.rounding, "inf")
        c = ZERO if c == 0 else c
    return c


@total.register
def _(rule: AlignedLate, terms: Terms, c: Number) -> Number:
    for k in range(0, max(len(terms.a), 1), rule.group):
        part = terms.part(k, k + rule.group)
        special = _special(part, c)
        if special is None:
            products = [multiply(x, y) for x, y in zip(part.a, part.b)]
            large = {math.copysign(math.inf, p) for p in products if abs(Fraction(p)) >= Fraction(2) ** 128}
            special = sum(large) if large else None
        c = _late(rule, part, c) if special is None else special
    return c


def _late(rule: AlignedLate, part: Terms, c: Number) -> Number:
    sums = []
    for half in range(1 + rule.odd_even):
        products = _aligned_products(part.part(half, len(part.a), 1 + rule.odd_even), rule.zero_exponent)
        top = max([e for _, e in products if e is not None], default=-600)
        sums.append((sum(_cut(s, e, top, rule.fraction, "toward_zero") for s, e in products), top))
    top = max(e for _, e in sums)
    # one sum stays as it is: it is in these units already
    units = sum(math.floor(s * Fraction(2) ** (e - top)) for s, e in sums)
    significand, e = _parts(c, rule.output.emin, rule.zero_exponent)
    larger = max(top, -600 if e is None else e)
    finer = rule.sum_fraction - rule.fraction
    value = math.floor(units * Fraction(2) ** (finer + top - larger))
    if e is not None and not (rule.odd_even and e < larger - rule.fraction - 1):
        value += math.floor(significand * Fraction(2) ** (rule.fraction + e - larger)) * 2**finer
    return round_to(rule.output, value * Fraction(2) ** (larger - rule.sum_fraction), rule.rounding, "inf")
