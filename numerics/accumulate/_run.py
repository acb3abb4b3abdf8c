"""Rules at work: operands laid out for the compiled loops, one function a rule."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from .._format import Float
from . import _kernels as kernels
from . import _sums as sums
from ._operands import Operand
from ._parts import MODES, target_of
from ._rules import (
    CUTS,
    QUIET_NAN,
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

Array = Any
_MASK = np.int64(0x7FF0000000000000)
_TINY = 2.0**-600  # below every product: an exponent that does not count
_ONE = np.ones(1, np.float32)
Indices = tuple[Array, Array]


def accumulate(rule: Any, a: Operand, b: Operand, out: Array, at: Indices) -> None:
    """Adds the products of a and b to out, ``[batch, rows, columns]``, under a rule.

    ``at``: for each of the batch, which of a's and of b's. Scales that the rule has no place for must have been
    folded. out is float32, of integers float64.
    """
    if isinstance(rule, Hardware):
        rule = rule.rule
    _WORK[type(rule)](rule, a, b, out, at)


def nan_bits(rule: Any) -> int:
    """The float32 bits of NaN in the rule's results."""
    rule = rule.rule if isinstance(rule, Hardware) else rule
    return rule.nan if isinstance(rule, Aligned) else QUIET_NAN


def takes_scales(rule: Any, a: Operand | None = None, b: Operand | None = None) -> bool:
    """Whether block scales have a place inside the sum: in aligned blocks, or, of these operands, where a chunk's
    sum is promoted."""
    rule = rule.rule if isinstance(rule, Hardware) else rule
    if not isinstance(rule, Chunked):
        return isinstance(rule, Aligned) and rule.scaled
    fits = a is not None and all(x is None or x.scale is None or x.size % rule.every == 0 for x in (a, b))
    return takes_scales(rule.inner, a, b) or (fits and not sums_integers(rule))


def _sequential(rule: Sequential, a: Operand, b: Operand, out: Array, at: Indices) -> None:
    products = ("None", str(rule.format))  # exact, or rounded as the sum is
    plain = not rule.flush and rule.rounding == "nearest_even" and rule.overflow in (None, "inf")
    if plain and str(rule.format) == "fp32" and str(rule.product) in products:
        sums.sequential_fp32(a.values, b.values, out, *at, rule.product is None)
    else:
        sums.sequential(a.values, b.values, out, *at, *_rounding(rule))


def _pairwise(rule: Pairwise, a: Operand, b: Operand, out: Array, at: Indices) -> None:
    sums.pairwise(a.values, b.values, out, *at, *_rounding(rule))


def _rounding(rule: Sequential | Pairwise) -> tuple[Any, ...]:
    """target, mode, whether products are rounded, and to what."""
    target = target_of(rule.format, rule.overflow, rule.flush)
    product = rule.product or rule.format
    return (
        target,
        MODES.index(rule.rounding),
        rule.product is not None,
        target_of(product, None if product != rule.format else rule.overflow, rule.flush),
    )


def _chunked(rule: Chunked, a: Operand, b: Operand, out: Array, at: Indices) -> None:
    n = a.values.shape[-1]
    scaled = not takes_scales(rule.inner, a, b) and not (a.scale is None and b.scale is None)
    partials: list[tuple[int, Array]] = []  # a tree's finished subtrees and how many partial sums each has
    if not isinstance(rule.outer, Integer):
        _promote(rule.outer, out, np.full_like(out, -0.0), _ONE)  # c in the outer format
    for k in range(0, max(n, 1), rule.every):
        x, y = a.part(k, min(k + rule.every, n)), b.part(k, min(k + rule.every, n))
        scale = _ONE
        if scaled:
            left, right = (v.scales(rule.every, 1).astype(np.float32)[i] for v, i in zip((x, y), at))
            scale = (left * right).reshape(-1)
            x, y = replace(x, scale=None), replace(y, scale=None)
        partial = np.zeros(out.shape, np.float64 if sums_integers(rule.inner) else np.float32)
        accumulate(rule.inner, x, y, partial, at)
        if isinstance(rule.outer, Integer):
            out[...] = _contain(rule.outer, out + partial)
        elif isinstance(rule.outer, Sequential):
            _promote(rule.outer, out, partial, scale)
        else:
            leaf = np.zeros_like(out)
            _promote(rule.outer, leaf, partial, scale)
            partials.append((1, leaf))
            while len(partials) > 1 and partials[-2][0] == partials[-1][0]:
                _join(rule.outer, partials)
    while len(partials) > 1:
        _join(rule.outer, partials)
    for _, total in partials:
        _promote(rule.outer, out, total, _ONE)


def _join(rule: Pairwise, partials: list[tuple[int, Array]]) -> None:
    count, right = partials.pop()
    _promote(rule, partials[-1][1], right, _ONE)
    partials[-1] = (partials[-1][0] + count, partials[-1][1])


def _promote(rule: Sequential | Pairwise, out: Array, partial: Array, scale: Array) -> None:
    sums.add_scaled(out.reshape(-1), partial.astype(np.float32, copy=False).reshape(-1), scale, *_rounding(rule))


def _aligned(rule: Aligned, a: Operand, b: Operand, out: Array, at: Indices) -> None:
    target = target_of(rule.output, "inf", positive=True)
    how, mode = CUTS.index(rule.cut), MODES.index(rule.rounding)
    zero = 0.0 if rule.zero_exponent is None else 2.0**rule.zero_exponent
    floor = _TINY if rule.least_exponent is None else 2.0**rule.least_exponent
    up, least = 2.0**rule.fraction, 2.0**rule.output.emin
    if rule.terms > 1:
        _aligned_terms(rule, a, b, out, at, (up, zero, least, floor, how, target, mode))
        return
    narrow = _is_narrow(a) and _is_narrow(b) and rule.fraction <= 27
    dtype = np.float32 if narrow else np.float64
    a, b = (_interleaved(v, rule.group, rule.interleave) for v in (a, b))
    x, y, px, py, raw, marks, group = _laid_out(a, b, rule.group, 4, zero, dtype)
    scales, bad = (np.empty((0, 0, 0)), np.empty((0, 0, 0))), None
    if rule.scaled and (a.scale is not None or b.scale is not None):
        count = x.shape[-1] // group
        scales, bad = _scales(a, b, rule.group, count, at)
        if not all(np.array_equal(s, _power(s, 0.0, 0.0)) for s in scales):
            raise ValueError(f"{rule} aligns scales that are powers of two, such as e8m0")
    kernels.aligned(
        x, px, y, py, *raw, *marks, *scales, out, *at, group, up, zero, least, floor, how, target, mode
    )  # fmt: skip
    if bad is not None:
        out[bad] = np.nan


def _aligned_terms(rule: Aligned, a: Operand, b: Operand, out: Array, at: Indices, options: tuple[Any, ...]) -> None:
    for name, x in (("a", a), ("b", b)):
        if not _is_short(x.format):
            raise ValueError(
                f"{rule} adds {rule.terms} products exactly: operand {name} is {x.format}, not of 4 or 6 bits"
            )
    zero = options[1]
    x, y = (_padded(v.values.astype(np.float64), v.axis, rule.group, rule.group) for v in (a, b))
    (sa, sb), bad = _scales(a, b, rule.terms, x.shape[-1] // rule.terms, at)
    least = [2.0**v.scale_format.emin if v.scale_format else 1.0 for v in (a, b)]
    powers = [_power(s, least[i], zero) for i, s in enumerate((sa, sb))]
    kernels.aligned_terms(x, y, sa, sb, *powers, out, *at, rule.group, rule.terms, *options)
    out[bad] = np.nan


def _aligned_late(rule: AlignedLate, a: Operand, b: Operand, out: Array, at: Indices) -> None:
    zero = 0.0 if rule.zero_exponent is None else 2.0**rule.zero_exponent
    halves = 2 if rule.odd_even else 1
    x, y, px, py, raw, marks, group = _laid_out(a, b, rule.group, 4 * halves, zero, np.float64)
    kernels.aligned_late(
        x, px, y, py, *raw, *marks, out, *at, group, halves, rule.fraction, rule.sum_fraction,
        max(zero, _TINY), 2.0**rule.output.emin, target_of(rule.output, "inf"), MODES.index(rule.rounding),
    )  # fmt: skip


def _is_short(fmt: Any) -> bool:
    """Whether exact sums of products stay far below 53 bits, and have no infinities or NaN in them."""
    return isinstance(fmt, Float) and not fmt.inf and not fmt.nan and fmt.max <= 32 and fmt.min_positive >= 2.0**-6


def _interleaved(x: Operand, group: int, run: int) -> Operand:
    """With the products of every two groups in the order in which the groups take them."""
    if not run:
        return x
    values = _padded(x.values, x.axis, 2 * group, 2 * group)
    places = np.arange(values.shape[x.axis])
    # by double group, then by group, then as they come
    order = np.lexsort((places, places // run % 2, places // (2 * group)))
    return replace(x, values=np.take(values, order, axis=x.axis))


def _is_narrow(x: Operand) -> bool:
    """Whether products and their alignment are exact in float32."""
    fmt = x.format
    return isinstance(fmt, Float) and fmt.mantissa <= 11 and fmt.emax <= 31 and fmt.emin - fmt.mantissa >= -32


def _laid_out(a: Operand, b: Operand, group: int, multiple: int, zero: float, dtype: Any) -> tuple[Any, ...]:
    """Values and exponents in whole groups, the values as they were, and where infinities and NaN are."""
    padded = -(-group // multiple) * multiple
    values, powers, raws, marks = [], [], [], []
    for x in (a, b):
        raw = _padded(x.values, x.axis, group, padded)
        finite = np.isfinite(raw)
        marks.append(~finite.all(axis=x.axis))
        clean = raw.astype(dtype) if finite.all() else np.where(finite, raw, 0).astype(dtype)
        emin = x.format.emin if isinstance(x.format, Float) else -126
        powers.append(_power(clean, 2.0**emin, zero))
        values.append(clean)
        raws.append(raw)
    return (*values, *powers, raws, marks, padded)


def _padded(values: Array, axis: int, group: int, padded: int) -> Array:
    """Whole groups along the axis, at least one, each filled up with zeros to ``padded``."""
    n = values.shape[axis]
    count = max(-(-n // group), 1)
    if n == count * padded:
        return np.ascontiguousarray(values)
    if axis == -2:
        return np.ascontiguousarray(np.swapaxes(_padded(np.swapaxes(values, -1, -2), -1, group, padded), -1, -2))
    out = np.zeros((*values.shape[:-1], count, padded), values.dtype)
    whole = n // group
    out[..., :whole, :group] = values[..., : whole * group].reshape(*values.shape[:-1], whole, group)
    out[..., whole:, : n - whole * group] = values[..., None, whole * group :] if whole < count else 0
    return out.reshape(*values.shape[:-1], count * padded)


def _power(x: Array, least: float, zero: float) -> Array:
    """``2**floor(log2|x|)``, at least ``least``; ``zero`` where x is 0."""
    integer, mask = (np.int64, 0x7FF0000000000000) if x.dtype == np.float64 else (np.int32, 0x7F800000)
    power: Array = (np.ascontiguousarray(x).view(integer) & integer(mask)).view(x.dtype)  # type: ignore[operator]
    np.maximum(power, x.dtype.type(least), out=power)
    power[x == 0] = zero
    return power


def _scales(a: Operand, b: Operand, step: int, count: int, at: Indices) -> tuple[tuple[Array, Array], Array]:
    """Scales of every ``step`` elements, 1 in place of NaN, and where the results are NaN for it."""
    sa, sb = a.scales(step, count), b.scales(step, count)
    rows, columns = np.isnan(sa).any(axis=-1), np.isnan(sb).any(axis=-2)
    bad = rows[at[0]][:, :, None] | columns[at[1]][:, None, :]
    return (np.where(np.isnan(sa), 1.0, sa), np.where(np.isnan(sb), 1.0, sb)), bad


def _exact(rule: Exact, a: Operand, b: Operand, out: Array, at: Indices) -> None:
    target, mode = target_of(rule.format, rule.overflow), MODES.index(rule.rounding)
    special = _special(a.values, b.values, out, at)
    x, y = (np.where(np.isfinite(v), v, np.float32(0)) for v in (a.values, b.values))
    if special is not None:
        out[~np.isfinite(out)] = 0
    unit = min(_unit(x) * _unit(y), _unit(out))
    n = max(x.shape[-1], 1)
    largest = max(_largest(x) * _largest(y), _largest(out))
    if n * largest + largest < 2.0**53 * unit:
        # sums of integers below 2**53, exact in any order
        whole = np.matmul(_of(x.astype(np.float64), at[0]), _of(y.astype(np.float64), at[1])) + out
        sums.round_flat(whole.reshape(-1), out.reshape(-1), target, mode)
    else:
        width = min(31, 52 - (n + 1).bit_length())
        span = math.frexp(largest)[1] - math.frexp(unit)[1] + 1
        units = unit * 2.0 ** (width * np.arange(-(-span // width)))
        sums.exact(x, y, out, *at, target, mode, units)
    if special is not None:
        infinite = np.where(special > 0, target[3], -target[3])
        np.copyto(out, infinite.astype(np.float32), where=np.isinf(special))
        out[np.isnan(special)] = np.nan


def _of(x: Array, index: Array) -> Array:
    """x of each of the batch, without a copy where it is x itself."""
    return x if len(x) == len(index) and np.array_equal(index, np.arange(len(x))) else x[index]


def _unit(x: Array) -> float:
    """A power of two that divides every number, as large as may be."""
    bits: Array = x.astype(np.float64).reshape(-1).view(np.int64)
    bits = bits[(bits & ~np.int64(-(2**63))) != 0]
    if not bits.size:
        return 1.0
    significand = (bits & (2**52 - 1)) | (1 << 52)
    last = np.ldexp((significand & -significand).astype(np.float64), -52)
    return float(np.min((bits & _MASK).view(np.float64) * last))


def _largest(x: Array) -> float:
    return float(np.abs(x).max(initial=0))


def _special(a: Array, b: Array, c: Array, at: Indices) -> Array | None:
    """The sum as IEEE 754 has it where an infinity or NaN is in it: every finite number stands as its sign."""
    if all(np.isfinite(v).all() for v in (a, b, c)):
        return None
    x, y, z = (np.asarray(np.where(np.isfinite(v), np.sign(v), v), np.float64) for v in (a, b, c))
    with np.errstate(invalid="ignore"):
        return z + np.einsum("tik,tkj->tij", _of(x, at[0]), _of(y, at[1]))


def _integer(rule: Integer, a: Operand, b: Operand, out: Array, at: Indices) -> None:
    x, y = a.values.astype(np.float64), b.values.astype(np.float64)
    n = x.shape[-1]
    largest = _largest(x) * _largest(y)
    if rule.overflow == "saturate" and n * largest + _largest(out) > rule.high:
        sums.integer(x, y, out, *at, rule.group, -1.0 - rule.high, float(rule.high))
        return
    for k in range(0, n, 1 << 19):  # so that every sum is an integer below 2**53
        part = np.matmul(_of(x, at[0])[:, :, k : k + (1 << 19)], _of(y, at[1])[:, k : k + (1 << 19)])
        out[...] = _contain(rule, out + part)


def _contain(rule: Integer, x: Array) -> Array:
    """Integers in float64, wrapped around or clipped."""
    if rule.overflow == "saturate":
        return np.clip(x, -1.0 - rule.high, rule.high)
    half = 2.0 ** (rule.bits - 1)
    return x - 2 * half * np.floor((x + half) / (2 * half))


_WORK: dict[type, Any] = {
    Sequential: _sequential,
    Pairwise: _pairwise,
    Chunked: _chunked,
    Exact: _exact,
    Integer: _integer,
    Aligned: _aligned,
    AlignedLate: _aligned_late,
}
