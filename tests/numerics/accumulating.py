"""Operands at which sums go wrong, and sums by the rational model, for the tests of accumulators."""

from fractions import Fraction

import numpy as np

from halfulp import numerics as hn
from halfulp.numerics.accumulate import _oracle as oracle

from .common import exact

KINDS = ("normal", "codes", "wide", "cancel", "tiny", "faint", "zeros", "special")


def operands(rng, fmt, shape, kind):
    """Numbers of a format, as float32."""
    fmt, n = hn.format(fmt), int(np.prod(shape))
    fmt = hn.format("fp32") if str(fmt) == "tf32" else fmt  # of which the machine ignores the last bits
    dtype = np.dtype(f"u{1 if fmt.bits <= 8 else 2 if fmt.bits <= 16 else 4}")
    codes = hn.decode(rng.integers(0, 2**fmt.bits, n).astype(dtype), fmt)
    deviates = rng.standard_normal(n)

    def scaled(exponents):
        return hn.cast((deviates * 2.0**exponents).astype(np.float32), fmt)

    if kind == "codes":  # every exponent
        x = np.where(np.isfinite(codes), codes, 1)
    elif kind == "special":
        x = np.where(rng.random(n) < 0.95, scaled(np.zeros(n)), codes)
    elif kind == "tiny":  # around the smallest normal number
        x = scaled(fmt.emin + rng.integers(-fmt.mantissa - 1, 6, n))
    elif kind == "faint":  # products around the smallest normal sum, with zeros among them
        x = np.where(rng.random(n) < 0.2, 0.0, scaled(fmt.emin // 2 + rng.integers(-10, 10, n)))
        x = np.where(rng.random(n) < 0.004, scaled(rng.integers(0, -fmt.emin // 2 + 1, n)), x)
    elif kind == "wide":
        x = scaled(rng.integers(-16, 16, n))
    elif kind == "zeros":
        x = np.where(rng.random(n) < 0.5, 0.0, scaled(rng.integers(-16, 16, n))) * rng.choice([1, -1], n)
    else:
        x = scaled(np.zeros(n))
        if kind == "cancel":  # each number is followed by its negative, or nearly
            x[1::2] = -x[0::2][: n // 2]
    return x.astype(np.float32).reshape(shape)


def addend(rng, shape, kind, fmt="fp32"):
    """c, of the same kind; the widest of exponents only now and then, so that products count."""
    kind = {"faint": "tiny"}.get(kind, kind)
    return operands(rng, fmt, shape, "wide" if kind in ("codes", "cancel") and rng.random() < 0.5 else kind)


def taken(x, machine, fmt):
    """The operand as a machine takes it."""
    if getattr(machine, "truncates", False):
        return (x.view(np.int32) & -8192).view(np.float32)
    if getattr(machine, "flushes", False):
        return np.where(np.abs(x) < 2.0 ** hn.format(fmt).emin, np.float32(0), x)
    return x


def expected(rule, a, b, c, formats=("fp32", "fp32"), machine=None):
    """a @ b + c by the rational model, as float32 (which every sum is); NaN stands for any NaN."""
    a, b = (taken(x, machine, f) for x, f in zip((a, b), formats))
    if getattr(machine, "flushes", False):
        c = np.where(np.abs(c) < 2.0**-126, np.float32(0), c)
    converts = getattr(machine, "converts", None)
    emin = tuple(hn.format(converts or f).emin for f in formats)
    out = np.empty((a.shape[0], b.shape[1]), np.float32)
    for i, j in np.ndindex(out.shape):
        terms = oracle.Terms([exact(x) for x in a[i]], [exact(x) for x in b[:, j]], emin)
        total = oracle.total(rule, terms, exact(c[i, j]))
        out[i, j] = np.float32(float(total))
        assert np.isnan(out[i, j]) or Fraction(float(total)) == total if isinstance(total, Fraction) else True
    return out
