"""Logarithmic numbers: exact borders and correctly rounded values, proved by integer powers."""

import math
from fractions import Fraction

import numpy as np
import pytest

from halfulp import numerics as hn
from halfulp.numerics import _oracle

from .common import BACKENDS, LOG_FORMATS, by_backend, exact, run, same


def oracle_codes(fmt, x, rounding="nearest_even", **policy):
    return [_oracle.encode(fmt, exact(v), rounding, **policy) for v in x]


def inputs(fmt, real=np.float32):
    """Floats about every magnitude and every border, which are irrational, and extremes."""
    halves = np.arange(0, 2 * fmt.max_code + 3)
    logs = halves / 2.0 ** (fmt.fraction + 1) - fmt.bias
    points = 2.0 ** np.clip(logs, -140, 127.99)
    base = np.array([*points, 0.0, 1e-45, 1e-30, 3e38, 1.7, 0.3, np.inf], real)
    base = np.concatenate([base, -base, [real(np.nan)]])
    with np.errstate(over="ignore", invalid="ignore"):
        up, down = np.nextafter(base, real(np.inf)), np.nextafter(base, real(-np.inf))
        return np.concatenate([base, up, down, np.nextafter(up, real(np.inf)), np.nextafter(down, real(-np.inf))])


def codes_of(fmt):
    return np.arange(2**fmt.bits, dtype=np.uint8 if fmt.bits <= 8 else np.uint16)


@pytest.mark.parametrize(("kind", "fmt"), by_backend(LOG_FORMATS, also=("log4.3",)))
def test_every_code_and_rounding_is_the_oracles(kind, fmt):
    codes = codes_of(fmt)
    for wide, real in ((32, np.float32), (64, np.float64)) if kind != "jax" else ((32, np.float32),):
        values = run(kind, hn.decode, codes, fmt, dtype=real)
        assert same(values, np.array([float(_oracle.log_float(fmt, int(c), wide)) for c in codes], real))
        if fmt.top < 128 or wide == 64:
            assert run(kind, hn.encode, values, fmt).tolist() == codes.tolist()
    x = inputs(fmt)
    for mode in hn.ROUNDINGS if kind == "numpy" else ("nearest_even",):
        got = run(kind, hn.encode, x, fmt, rounding=mode)
        expected = oracle_codes(fmt, x, mode)
        wrong = np.flatnonzero(got != expected)
        assert not wrong.size, (mode, x[wrong[:3]], got[wrong[:3]])
    for policy in ({"zero": "positive"}, {"nan": "max"}, {"nan": 1}):
        assert run(kind, hn.encode, x, fmt, **policy).tolist() == oracle_codes(fmt, x, **policy)


@pytest.mark.parametrize("fmt", [f for f in LOG_FORMATS if f.fraction], ids=str)
def test_borders_and_values_by_powers_of_integers(fmt):
    """``x**(2**d)`` against ``2**n`` in integers: the float before and after each border, and half an ulp about
    each value. Nothing here is taken from the code under test."""
    root = 2 ** (fmt.fraction + 1)

    def above(x, power):  # x > 2**(power / root)
        a, b = x.numerator**root, x.denominator**root
        return a > b << power if power >= 0 else a << -power > b

    for code in range(1, fmt.max_code):
        twice = 2 * (code - fmt.bias * 2**fmt.fraction) + 1
        near = np.float64(2.0 ** (twice / root))
        for x in (near, np.nextafter(near, 0), np.nextafter(near, 9e300)):
            if np.abs(np.log2(x)) < 1000:
                expected = code + above(Fraction(float(x)), twice)
                assert int(hn.encode(x, fmt)) == expected
    values = hn.decode(codes_of(fmt)[1 : fmt.max_code + 1], fmt, dtype="float64")
    for code, value in enumerate(values, 1):
        power = 2 * (code - fmt.bias * 2**fmt.fraction)
        ulp = Fraction(np.spacing(value))
        assert above(Fraction(value) + ulp / 2, power)
        assert not above(Fraction(value) - ulp / 2, power)


def test_nearest_is_nearest_in_the_logarithm():
    x = np.exp(np.random.default_rng(0).uniform(-5, 5, 4000))
    y = hn.cast(x, "log4.3")
    inside = (x > hn.format("log4.3").min_positive) & (x < hn.format("log4.3").max)
    steps = np.log2(y[inside] / x[inside]) * 8
    assert np.abs(steps).max() <= 0.5 + 1e-9
    assert np.abs(steps).max() > 0.49
    # a power of two is a number of the format, decoded exactly
    assert hn.cast(np.float32([0.25, 1, 8, -2]), "log4.3").tolist() == [0.25, 1, 8, -2]
    assert abs(float(hn.cast(np.float64([3.0]), "log4.3")[0]) - math.pow(2, 13 / 8)) < 1e-15


def test_ends_of_the_range():
    fmt = hn.format("log4.3")  # from 2**(1/8 - 7) to 2**(127/8 - 7); the border to zero half a step below
    border = 2.0 ** (1 / 16 - 7)
    x = np.float32([border * 0.999, border * 1.001, -border * 0.999, 1e9, -np.inf, np.nan, -np.nan])
    for kind in BACKENDS:
        assert run(kind, hn.encode, x, fmt).tolist() == [0, 1, 0x80, 0x7F, 0xFF, 0, 0]
    assert hn.encode(x[2:3], fmt, zero="positive").tolist() == [0]
    assert hn.encode(-x[1:2], "ulog4.3").tolist() == [0]
    assert hn.encode(np.float32([1e-30, -1e-30]), fmt, rounding="up").tolist() == [1, 0x80]
    with pytest.raises(ValueError, match=r"stochastic rounding to log4\.3: the share of an irrational step"):
        hn.cast(x, fmt, rounding=hn.Stochastic(1))
    with pytest.raises(ValueError, match=r"overflow='inf' is not possible for log4\.3: choose 'saturate'"):
        hn.cast(x, fmt, overflow="inf")
    for make, message in [
        (lambda: hn.Log(0, 0), "logarithmic numbers have 1 to 16 bits here"),
        (lambda: hn.Log(-1, 3), "Log needs integer >= 0 and 0 <= fraction <= 10"),
        (lambda: hn.Log(4, 11), "Log needs integer >= 0 and 0 <= fraction <= 10"),
        (lambda: hn.Log(9, 8), "logarithmic numbers have 1 to 16 bits here, got 18"),
        (lambda: hn.Log(11, 0, bias=-900), "has numbers that float64 has not"),
        (lambda: hn.Log(4, 3, bias=2000), "has numbers that float64 has not"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


def test_logarithmic_blocks():
    x = np.random.default_rng(1).standard_normal((4, 32)).astype(np.float32)
    fmt = hn.format("log3.2:g16")
    y = hn.cast(x, fmt)
    for kind in BACKENDS:
        assert same(run(kind, hn.cast, x, fmt), y)
    with pytest.raises(ValueError, match="needs the element's exponent range, which a logarithmic number has not"):
        hn.Block("log3.2", 16, "e8m0", "floor")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["log5.10", "log8.7", "ulog6.10", "log10.5", "log6.6", "log3.9"])
def test_every_code_of_wide_ones(name):
    """Every value half an ulp about itself, and every border, by integer powers of a hundred thousand bits."""
    fmt = hn.format(name)
    codes = codes_of(fmt)
    values = hn.decode(codes, fmt, dtype="float64")
    assert (hn.encode(values, fmt) == codes).all()
    single = hn.decode(codes, fmt)
    picked = np.concatenate([codes[:3], codes[fmt.max_code - 2 : fmt.max_code + 1], codes[:: max(1, len(codes) // 37)]])
    for code in picked:
        assert float(values[code]) == float(_oracle.log_float(fmt, int(code), 64))
        assert float(single[code]) == float(_oracle.log_float(fmt, int(code), 32))
    x = inputs(fmt, np.float64)[:: max(1, fmt.max_code // 40)]
    for mode in hn.ROUNDINGS:
        assert hn.encode(x, fmt, rounding=mode).tolist() == oracle_codes(fmt, x, mode), mode
