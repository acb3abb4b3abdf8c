"""Second opinions on the oracle: MPFR (gmpy2), which shares nothing with it, and gfloat."""

import math
import random
from fractions import Fraction

import numpy as np
import pytest

from halfulp import numerics as hn
from halfulp.numerics import _oracle

from .common import critical, exact

IEEE_LIKE = ["fp16", "bf16", "tf32", "e5m2", "e4m3", "e3m4", "e6m9", "e4m3b11", "e8m3", "fp32"]
MODES = {
    "nearest_even": "RoundToNearest",
    "toward_zero": "RoundToZero",
    "up": "RoundUp",
    "down": "RoundDown",
    "away": "RoundAwayZero",
}


def mpfr(fmt, x, mode):
    """x rounded by MPFR, whose exponents count from significands in [1/2, 1)."""
    gmpy2 = pytest.importorskip("gmpy2", reason="gmpy2 is not installed")
    context = gmpy2.context(
        precision=fmt.mantissa + 1,
        emax=fmt.emax + 1,
        emin=fmt.emin - fmt.mantissa + 1,
        subnormalize=True,
        round=getattr(gmpy2, MODES[mode]),
    )
    with context:
        return gmpy2.mpfr(gmpy2.mpq(x.numerator, x.denominator))


def rationals(fmt, seed):
    """Values and midpoints, a hair to either side of them, and numbers of every size with long denominators."""
    draw = random.Random(seed)
    some = [draw.randrange(fmt.max_code) for _ in range(150)]
    for code in {0, 1, 2, fmt.max_code - 1, fmt.max_code, *some}:
        low, high = fmt.magnitude(code), fmt.magnitude(code + 1)
        for point in (low, (low + high) / 2):
            hair = (high - low) / draw.choice([draw.randint(10**20, 10**25), 3**60])
            yield from (size for size in (point, point - hair, point + hair) if size >= 0)
    for _ in range(300):
        size = Fraction(2) ** draw.randrange(fmt.emin - fmt.mantissa - 4, fmt.emax + 3)
        yield size * Fraction(draw.randrange(1, 2**62), draw.randrange(1, 2**62))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", IEEE_LIKE)
def test_the_oracle_rounds_as_mpfr_does(name, mode):
    fmt = hn.format(name)
    beyond = fmt.magnitude(fmt.max_code + 1)
    count = 0
    for i, size in enumerate(rationals(fmt, 0)):
        x = -size if i % 2 else size
        rounding = mode if mode != "away" else "down" if x < 0 else "up"
        if size >= beyond and mode != "nearest_even":
            continue  # beyond the range MPFR's directed modes stop at the largest number
        value = _oracle.decode(fmt, _oracle.encode(fmt, x, rounding, "inf"))
        theirs = mpfr(fmt, x, mode)
        if math.isinf(theirs):
            assert value == math.copysign(math.inf, x), (x, value, theirs)
        else:
            assert value == Fraction(*map(int, theirs.as_integer_ratio())), (x, value, theirs)
            assert math.copysign(1, float(value)) == math.copysign(1, float(theirs)), (x, value)
        count += 1
    assert count > 500


def test_a_wrong_rounding_would_show():
    fmt = hn.format("fp16")
    tie = 1 + Fraction(1, 2**11)
    assert mpfr(fmt, tie, "nearest_even") == 1
    assert mpfr(fmt, tie + Fraction(1, 10**40), "nearest_even") == 1 + 2.0**-10
    assert mpfr(fmt, fmt.magnitude(1) / 2, "nearest_even") == 0
    assert mpfr(fmt, Fraction(65520), "nearest_even") == math.inf


# ---- gfloat

OCP = {
    name: f"format_info_ocp_{name.removesuffix('fn')}" for name in ("e4m3fn", "e5m2", "e3m2", "e2m3", "e2m1", "e8m0")
}
GFLOAT_MODES = {
    "nearest_even": "TiesToEven",
    "nearest_away": "TiesToAway",
    "toward_zero": "TowardZero",
    "up": "TowardPositive",
    "down": "TowardNegative",
}


@pytest.fixture(scope="module")
def gfloat():
    return pytest.importorskip("gfloat", reason="gfloat is not installed")


@pytest.mark.parametrize("name", OCP)
def test_every_code_means_what_gfloat_says(gfloat, name):
    import gfloat.formats

    info = getattr(gfloat.formats, OCP[name])
    for code in range(2 ** hn.format(name).bits):
        ours, theirs = float(_oracle.decode(hn.format(name), code)), float(gfloat.decode_float(info, code).fval)
        assert (ours == theirs and math.copysign(1, ours) == math.copysign(1, theirs)) or (
            ours != ours and theirs != theirs
        )


@pytest.mark.parametrize("rounding", GFLOAT_MODES)
@pytest.mark.parametrize("name", [n for n in OCP if n != "e8m0"])  # graphcore-research/gfloat#62
def test_the_oracle_rounds_as_gfloat_does(gfloat, name, rounding):
    import gfloat.formats

    x = critical(hn.format(name), np.float32)
    x = x[np.isfinite(x)]
    mode = gfloat.RoundMode[GFLOAT_MODES[rounding]]
    theirs = gfloat.round_ndarray(getattr(gfloat.formats, OCP[name]), x.astype(np.float64), mode, sat=True)
    ours = [
        float(_oracle.decode(hn.format(name), _oracle.encode(hn.format(name), exact(v), rounding, "saturate")))
        for v in x
    ]
    assert theirs.tolist() == ours
    assert np.signbit(theirs).tolist() == np.signbit(ours).tolist()
