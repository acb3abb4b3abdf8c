"""Backends and formats that the numerics tests share."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np

from halfulp import numerics as hn

SMALL = [
    *(n for n, f in hn.NAMED.items() if isinstance(f, (hn.Float, hn.Fixed)) and f.bits <= 8 and n[:6] != "binary"),
    "nf4",
    *["e4m3f", "e3m0fn", "e1m2f", "e2m1", "e2m2fn", "e3m3", "e5m2ns", "e4m3fnns", "ue4m3fn", "ue5m3", "e8m0"],
    *["e3m4b2fnuz", "e4m3b-3fn", "ue3m0fn", "e6m1", "e7m0fn"],
    *(f"int{b}" for b in range(2, 9)),
    *(f"uint{b}" for b in range(1, 9)),
    *["int4n", "int8n", "fixed8.6", "fixed6.-3", "ufixed5.7", "codebook(-1.5,-0.25,0,0.1,3)"],
    hn.Float(4, 3, inf=True, nan="top"),
    hn.Float(4, 3, inf=True, nan="negative_zero"),
    hn.Float(3, 2, negative_zero=False, inf=False, nan=False),
]
SMALL_FORMATS = list(dict.fromkeys(hn.format(f) for f in SMALL))
# formats of later families, with tests of their own: test_formats_*
P3109_FORMATS = [
    hn.p3109(k, p, signed, extended)
    for k in (3, 4, 5, 6, 7, 8)
    for p in range(1, k + 1)
    for signed in (True, False)
    for extended in (True, False)
    if p < k + (not signed)
]
INTEGER_FORMATS = [
    hn.format(n)
    for n in [
        *["int1", "int2sm", "int4sm", "int8sm", "fixed6.3sm", "fixed5.-2sm", "fixed1.3"],
        *["uint8b128", "uint4b8", "ufixed6.2b5", "uint1b1", "uint3b7"],
    ]
]
POSIT_FORMATS = [hn.Posit(bits) for bits in range(2, 9)] + [hn.Posit(b, es) for b in (2, 4, 6) for es in (0, 1, 3)]
LOG_FORMATS = [
    hn.format(n)
    for n in [
        "log4.3",
        "log3.2",
        "ulog4.4",
        "log5.0",
        "log0.5",
        "log2.1b9",
        "ulog3.3b-2",
        "log7.0",
        "log1.0",
        "log7.0b-300",
    ]
]
CODEBOOK_FORMATS = [
    hn.format(n)
    for n in [
        "binary",
        "ternary",
        "codebook(-1.5,-0.25,0,0.1,3)",
        "codebook(1,2,4,8)",
        "codebook(-3,-1,2.5)",
        "codebook(-1e300,0,1,1e300)",
        "nf4",
    ]
]
WIDE_FORMATS = [
    hn.format(n) for n in ["fp16", "bf16", "tf32", "fp32", "e6m9", "e5m14fn", "e11m20", "int12", "fixed16.9"]
]


def to_numpy(x):
    return np.asarray(x)


def to_torch(x):
    import torch

    return torch.from_numpy(np.array(x))


def to_jax(x):
    import jax.numpy as jnp

    return jnp.asarray(x)


BACKENDS = {"numpy": to_numpy, "torch": to_torch, "jax": to_jax}


def run(kind, function, x, *arguments, **options):
    """What a function makes of x in a backend, as numpy; under jit in jax, where every operation by itself would
    be compiled by itself."""

    def call(v):
        return function(v, *arguments, **options)

    if kind == "jax":
        import jax

        call = jax.jit(call)
    return np.asarray(call(BACKENDS[kind](x)))


def by_backend(formats, also):
    """Parameters (backend, format): numpy with each format, torch and jax with those named, with others slow."""
    import pytest

    return [
        pytest.param(
            kind, fmt, id=f"{kind}-{fmt}", marks=[pytest.mark.slow] * (kind != "numpy" and str(fmt) not in also)
        )
        for fmt in formats
        for kind in BACKENDS
    ]


def same(a, b):
    """Equal bit for bit, but for NaN, where the sign and payload may differ."""
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.kind != "f":
        return bool((a == b).all())
    nan = np.isnan(a) & np.isnan(b)
    return bool(((a.view(f"u{a.itemsize}") == b.view(f"u{b.itemsize}")) | nan).all())


def exact(value):
    """A float as the oracle takes it: a Fraction, or the float itself for -0.0, infinities and NaN."""
    value = float(value)
    if math.isnan(value) or math.isinf(value) or (value == 0 and math.copysign(1, value) < 0):
        return value
    return Fraction(value)


def critical(fmt, real):
    """Numbers at which a rounding can go wrong: values, midpoints, their neighbours, extremes; both signs."""
    from halfulp.numerics import _oracle

    values = sorted({v for c in range(2**fmt.bits) if not isinstance(v := _oracle.decode(fmt, c), float)})
    if isinstance(fmt, hn.Float):
        values.append(fmt.magnitude(fmt.max_code + 1))
        values.append(fmt.magnitude(1) / 4)
    else:
        values += [2 * values[-1] + 1, values[-1] + Fraction(1, 2)]
    points = {float(v) for v in values}
    points |= {float((a + b) / 2) for a, b in pairwise(values)}
    info = np.finfo(real)
    points |= {0.0, -0.0, np.inf, np.nan, float(info.max), float(info.tiny), float(info.smallest_subnormal)}
    points |= {float(info.tiny) * 1.5, 1e-30, 1e30, 3.0, 2.0**-127, 2.0**-126, 2.0**127}
    with np.errstate(over="ignore"):
        base = np.array(sorted(points, key=lambda v: (np.isnan(v), v)), dtype=real)
    base = np.concatenate([base, -base])
    with np.errstate(over="ignore", invalid="ignore"):
        return np.concatenate([base, np.nextafter(base, real(np.inf)), np.nextafter(base, real(-np.inf))])
